"""A Hugging Face folder as a network of texts: config.json, weights in safetensors, tokenizer.json.

All three are data. The classes that a config names are those of the library; code that a folder brings is never run,
and nothing is downloaded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dapcal.models.factories import told
from dapcal.networks import as_tensor

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
LONGEST = 512  # tokens of a text, where neither model nor tokenizer says
_CODE = ("auto_map", "quantization_config")  # what a config may ask for that is more than data
_KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")  # may be a download


class TextNetwork(nn.Module):
    """Token ids (N, length), padded on the right, to outputs (N, C); padding is masked."""

    def __init__(self, network: nn.Module, pad: int) -> None:
        super().__init__()
        self.network, self.pad = network, pad

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return as_tensor(self.network(input_ids=ids, attention_mask=(ids != self.pad).long()))


@dataclass(frozen=True, eq=False)
class Words:
    """How texts become token ids.

    Attributes:
        tokenizer: of the library `tokenizers`.
        pad: what fills places after the end of a text.
        length: tokens of every input; longer texts are cut.
    """

    tokenizer: Any
    pad: int
    length: int

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, cut but not padded."""
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.length)
        return [found.ids for found in self.tokenizer.encode_batch(list(texts))]

    def __call__(self, texts: Sequence[str], source: str = "", first_row: int = 1) -> Tensor:
        """Inputs (N, length); errors name `source` and count rows from `first_row`."""
        x = torch.full((len(texts), self.length), self.pad)
        for row, found in enumerate(self.ids(texts)):
            if not found:
                where = f"{source}, row {first_row + row}: " if source else ""
                raise ValueError(f"{where}Expected a text with at least one token, got {texts[row]!r}; drop that row")
            x[row, : len(found)] = torch.tensor(found)
        return x

    def cut(self, texts: Sequence[str]) -> int:
        """How many texts have more tokens than are read."""
        self.tokenizer.no_truncation()
        return sum(len(found.ids) > self.length for found in self.tokenizer.encode_batch(list(texts)))

    def texts(self, x: Tensor) -> list[str]:
        """What the tokenizer makes of inputs."""
        return self.tokenizer.decode_batch([row[row != self.pad].tolist() for row in x.cpu()])

    def fitted(self, texts: Sequence[str]) -> Words:
        """The same for texts of the length of these."""
        return replace(self, length=max(1, *(len(found) for found in self.ids(texts))))


def is_folder(name: str) -> bool:
    """Whether a model is named by its folder."""
    return Path(name).is_dir()


def read_network(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier with the folder's weights, all of them, in float32; and its config."""
    config = _config(folder)
    transformers = library("transformers")
    try:
        with _without_bars(transformers):
            network, found = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=_known(config),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"The weights of {folder} cannot be read ({told(error)}); save the trained classifier with "
            "model.save_pretrained(folder)"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder} lacks weights of a classifier ({', '.join(missing[:3])}); train it for your classes, and save "
            "it with model.save_pretrained(folder)"
        )
    return network.float().eval(), config


def make_network(config: dict[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """The classifier that a config describes, of these weights, which are filled in later.

    Nothing is built that is larger than what was read: a number in a file could ask for any size.
    """
    deep = [key for key, value in config.items() if "layer" in key and type(value) is int and value > len(weights)]
    if deep:
        raise ValueError(f"its config asks for {config[deep[0]]} as {deep[0]}, and it holds {len(weights)} tensors")
    make, known = library("transformers").AutoModelForSequenceClassification.from_config, _known(config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(known).parameters())
    if size > sum(tensor.numel() for tensor in weights.values()):
        raise ValueError(f"its config asks for {size} weights, and it holds fewer")
    with torch.random.fork_rng(devices=[]):
        return make(known).float().eval()


def read_words(folder: Path, config: dict[str, Any]) -> Words:
    """The folder's tokenizer."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {TOKENIZER} in {folder}; save the tokenizer there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    text = path.read_text(encoding="utf-8")
    beside = folder / "tokenizer_config.json"
    about = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    tokenizer = make_tokenizer(text, str(path))
    limits = (config.get("max_position_embeddings"), config.get("n_positions"), about.get("model_max_length"))
    length = min([LONGEST, *(int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 2**31)])
    return Words(tokenizer, _pad(tokenizer, config, about, folder), length)


def make_tokenizer(text: str, source: str) -> Any:
    """The tokenizer that a JSON text describes."""
    try:
        return library("tokenizers").Tokenizer.from_str(text)
    except ImportError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{source} is not a tokenizer ({told(error)}); save it again") from error


def library(name: str) -> Any:
    """transformers or tokenizers."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"Texts need {name} ({error}); install it with: pip install 'dapcal[huggingface]'") from error


@contextmanager
def _without_bars(transformers: Any) -> Iterator[None]:
    """The library's progress bars off, and back as they were."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {CONFIG} in {folder}; expected the folder that model.save_pretrained(folder) writes"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); save the model again") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{path} names no `model_type`; expected what model.save_pretrained(folder) writes")
    named = config.get("architectures") or []
    if not any("SequenceClassification" in name for name in named):
        raise ValueError(
            f"Expected a classifier of texts (…ForSequenceClassification) in {folder}, got "
            f"{', '.join(named) or 'none'}; train one on your classes first"
        )
    if config.get("problem_type") == "multi_label_classification":
        raise ValueError(f"{folder} predicts several labels of a text; calibrate it in Python with dapcal.calibrate")
    if asked := [key for key in _CODE if config.get(key)]:
        raise ValueError(
            f"{path} asks for {' and '.join(asked)}, which dapcal does not run; save a plain model, or name a function "
            "that makes yours by --model package.module:factory"
        )
    return {key: value for key, value in config.items() if key not in _KERNELS}


def _known(config: dict[str, Any]) -> Any:
    """The library's own config, without what could run code or fetch any."""
    plain = {key: value for key, value in config.items() if key not in (*_CODE, *_KERNELS, "model_type")}
    try:
        return library("transformers").AutoConfig.for_model(config["model_type"], **plain)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"This transformers does not know the model {config['model_type']!r} ({told(error)}); upgrade it"
        ) from error


def _pad(tokenizer: Any, config: dict[str, Any], about: dict[str, Any], folder: Path) -> int:
    token = about.get("pad_token")
    named = tokenizer.token_to_id(token.get("content") if isinstance(token, dict) else token) if token else None
    given = [named, config.get("pad_token_id"), (tokenizer.padding or {}).get("pad_id")]
    found = next((int(one) for one in given if one is not None), None)
    if found is None:
        raise ValueError(f"{folder} names no padding token; set tokenizer.pad_token and model.config.pad_token_id")
    return found
