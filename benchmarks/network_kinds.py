"""Kinds of networks that people have, each as small as can be, with a loader of inputs for it.

`KINDS` has them by name, those of other libraries included where these can be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

CLASSES, WORDS, PAD = 3, 40, 0


class Kind(NamedTuple):
    """A network, and its inputs: n rows of class y under a generator, as its forward takes them."""

    make: Callable[[], nn.Module]
    inputs: Callable[[Tensor, torch.Generator], Any]
    wrap: Callable[[nn.Module], nn.Module] = lambda network: network  # on what is calibrated, not what is loaded


def loader(kind: Kind, n: int, seed: int) -> DataLoader:
    """Batches of pairs, or of dicts with labels, as the kind has them."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    batches = []
    for rows in y.split(8):
        x = kind.inputs(rows, generator)
        batches.append({**x, "labels": rows} if isinstance(x, dict) else (x, rows))
    return DataLoader(batches, batch_size=None)


# Inputs


def values(*shape: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Normal values around the class."""

    def make(y: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(len(y), *shape, generator=generator) + y.reshape(-1, *[1] * len(shape))

    return make


def ids(y: Tensor, generator: torch.Generator, length: int = 6) -> Tensor:
    return 1 + 12 * y[:, None] + torch.randint(12, (len(y), length), generator=generator)


def texts(y: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Padded to the longest of their batch, as collators do."""
    lengths = 3 + torch.randint(5, (len(y),), generator=generator)
    places = torch.arange(int(lengths.max()))
    mask = (places < lengths[:, None]).long()
    return {"input_ids": ids(y, generator, len(places)) * mask, "attention_mask": mask}


def lengths(y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    found = texts(y, generator)
    return found["input_ids"], found["attention_mask"].sum(1)


def several(**parts: Callable) -> Callable[[Tensor, torch.Generator], dict[str, Tensor]]:
    return lambda y, generator: {name: part(y, generator) for name, part in parts.items()}


def pixels(y: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": values(3, 8, 8)(y, generator)}


# Networks


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, before: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(inputs if before else outputs), nn.BatchNorm2d(outputs)])
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)]
        )
        self.around, self.before = nn.Conv2d(inputs, outputs, 1), before

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            h = convolution(torch.relu(norm(h))) if self.before else torch.relu(norm(convolution(h)))
        return h + self.around(x)


def residual(width: int, before: bool) -> nn.Module:
    return nn.Sequential(
        Residual(1, width, before), nn.AvgPool2d(2), Residual(width, width, before), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(width, CLASSES),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body, self.head = kind(3, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class WithLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, 5), nn.GRU(5, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(
            self.words(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.body(rows)[1][-1])


class Encoder(nn.Module):
    """Patches or words through a transformer; with a mask, where one is given."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embed(input_ids)
        h = h.flatten(2).mT if h.ndim == 4 else h
        kept = torch.ones_like(h[..., 0]) if attention_mask is None else attention_mask
        h = self.layer(h, src_key_padding_mask=None if attention_mask is None else attention_mask == 0)
        return self.head((h * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


class SetNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(3, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.each(x)).mean(1))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.one(edges @ nodes))
        return self.head(torch.relu(self.two(edges @ h)).mean(1))


class Cosine(nn.Module):
    """Scaled cosines to a direction for every class: no linear layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.directions = nn.Linear(5, 8), nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        return 8 * cosine_similarity(torch.relu(self.body(x))[:, None], self.directions[None], dim=-1)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.table = nn.Conv2d(1, 4, 3), nn.Linear(3, 4)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.cat([torch.relu(self.image(image)).mean((2, 3)), torch.relu(self.table(table))], 1))


class TakesDict(TwoInputs):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["picture"], batch["row"])


class Tied(nn.Module):
    """Words in and words out by one table; the classes are those of the first words."""

    def __init__(self, out: bool) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.again, self.head = nn.Linear(8, 8), nn.Linear(8, WORDS if out else CLASSES, bias=False)
        if out:
            self.head.weight = self.words.weight
        else:
            self.again.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.again(torch.relu(self.body(self.words(x).mean(1))))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Pixelwise(nn.Sequential):
    """A class for every pixel."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1))


def mlp(last: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), last(nn.Linear(8, CLASSES)))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, CLASSES),
    )  # fmt: skip


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    )


def along() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def frozen() -> nn.Module:
    network = mlp()
    network[0].requires_grad_(False)
    return network


def quantised() -> nn.Module:
    torch.backends.quantized.engine = "onednn" if "onednn" in torch.backends.quantized.supported_engines else "qnnpack"
    return torch.ao.quantization.quantize_dynamic(mlp().eval(), {nn.Linear}, torch.qint8)


def compiled(network: nn.Module) -> nn.Module:
    return torch.compile(network)  # type: ignore[return-value]


def words() -> nn.Module:
    return nn.Embedding(WORDS, 8, padding_idx=PAD)


image, row = values(1, 8, 8), values(5)
two = several(image=image, table=values(3))
KINDS: dict[str, Kind] = {
    "MLP with dropout, in training mode": Kind(mlp, row),
    "LeNet": Kind(lenet, image),
    "ResNet, batch norm": Kind(lambda: residual(6, False), image),
    "WideResNet, norms first": Kind(lambda: residual(12, True), image),
    "CNN, group norm": Kind(grouped, image),
    "CNN of one dimension": Kind(along, values(2, 9)),
    "CNN without a linear layer": Kind(convolutional, image),
    "LSTM": Kind(lambda: Recurrent(nn.LSTM), values(5, 3)),
    "GRU": Kind(lambda: Recurrent(nn.GRU), values(5, 3)),
    "transformer of token ids": Kind(lambda: Encoder(words()), ids),
    "vision transformer": Kind(lambda: Encoder(nn.Conv2d(1, 8, 4, 4)), image),
    "set network": Kind(SetNetwork, values(6, 3)),
    "graph network (nodes, edges)": Kind(Graph, several(nodes=values(5, 3), edges=values(5, 5))),
    "two inputs, `((a, b), y)`": Kind(TwoInputs, lambda y, generator: tuple(two(y, generator).values())),
    "two inputs by name": Kind(TwoInputs, two),
    "a dict as the one input": Kind(TakesDict, several(picture=image, row=values(3))),
    "texts of several lengths, mask": Kind(lambda: Encoder(words()), texts),
    "texts of several lengths, `lengths`": Kind(WithLengths, lengths),
    "cosine head": Kind(Cosine, row),
    "weight-normed last layer": Kind(lambda: mlp(weight_norm), row),
    "spectral-normed last layer": Kind(lambda: mlp(spectral_norm), row),
    "weight norm by hooks (deprecated)": Kind(lambda: mlp(nn.utils.weight_norm), row),
    "weights tied inside": Kind(lambda: Tied(False), ids),
    "last layer tied to the first": Kind(lambda: Tied(True), ids),
    "frozen body": Kind(frozen, row),
    "all weights frozen": Kind(lambda: mlp().requires_grad_(False), row),
    "activation checkpointing": Kind(Checkpointed, row),
    "channels_last": Kind(lenet, image, lambda network: network.to(memory_format=torch.channels_last)),
    "torch.compile": Kind(mlp, row, compiled),
    "DataParallel": Kind(mlp, row, nn.DataParallel),
    "bfloat16": Kind(lenet, image, lambda network: network.bfloat16()),
    "float16": Kind(mlp, row, lambda network: network.half()),
    "quantised (int8, dynamic)": Kind(quantised, row),
    "a class for every pixel": Kind(Pixelwise, image),
}


# Other libraries'

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=CLASSES, **SIZES)
    )


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12, "max_position_embeddings": 16}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=WORDS, num_labels=CLASSES, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": PAD}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=WORDS, num_labels=CLASSES, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **SIZES))


def low_rank() -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    return get_peft_model(
        bert(), LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query", "value"], init_lora_weights=False)
    )


def low_rank_everywhere() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(mlp(), LoraConfig(r=2, target_modules=["0", "3"], init_lora_weights=False))


def dispatched(network: nn.Module) -> nn.Module:
    """As `from_pretrained(..., device_map="cpu")` gives it."""
    from accelerate import dispatch_model

    return dispatch_model(network, device_map={"": "cpu"})


def offloaded(network: nn.Module) -> nn.Module:
    """Weights wait elsewhere until a layer runs."""
    from accelerate import cpu_offload

    return cpu_offload(network)


def lightning_module() -> nn.Module:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp()
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.loss(self(batch[0]), batch[1])

    return Classifier()


def timm_model() -> nn.Module:
    import timm

    return timm.create_model("resnet10t", num_classes=CLASSES, in_chans=1)


def importable(name: str) -> bool:
    try:
        return find_spec(name) is not None and bool(__import__(name))
    except Exception:  # a library that is there and does not import, e.g. without torchvision
        return False


if importable("transformers"):
    KINDS |= {
        "Hugging Face BERT": Kind(bert, texts),
        "Hugging Face DistilBERT": Kind(distilbert, texts),
        "Hugging Face GPT-2": Kind(gpt2, texts),
        "Hugging Face ViT": Kind(vit, pixels),
        "Hugging Face BERT in bfloat16": Kind(bert, texts, lambda network: network.bfloat16()),
    }
if importable("accelerate") and importable("transformers"):
    KINDS["Hugging Face BERT with a `device_map`"] = Kind(bert, texts, dispatched)
    KINDS["Hugging Face BERT, offloaded"] = Kind(bert, texts, offloaded)
if importable("peft"):
    KINDS["LoRA adapters (peft) on BERT"] = Kind(low_rank, texts)
    KINDS["LoRA adapters on the last layer, too"] = Kind(low_rank_everywhere, row)
if importable("lightning"):
    KINDS["Lightning module"] = Kind(lightning_module, row)
if importable("timm"):
    KINDS["timm ResNet"] = Kind(timm_model, values(1, 32, 32))
