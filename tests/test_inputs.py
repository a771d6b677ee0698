"""Inputs as people have them: dicts, several tensors, variable lengths and half precision, from fit to file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dapcal
from dapcal.distances import Space
from dapcal.distances.outliers import shuffled_fields
from dapcal.distances.projectors import Identity
from dapcal.errors import CannotRun
from dapcal.inputs import Field, Fields, find_fields, parts_of
from dapcal.inputs.reading import Takes
from dapcal.likelihoods import Categorical
from dapcal.networks import reading, reads, take
from dapcal.posteriors import dropout, ensemble, laplace, swag, variational
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors.predictions import StackedPredictions

pytestmark = pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # so few held-out inputs

PAD, WORDS, CLASSES = 3, 31, 3


class Text(nn.Module):
    """Mean of the words that the mask keeps, as small as a classifier of texts can be."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 5), nn.Linear(5, CLASSES)
        self.dropout = nn.Dropout(dropped)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> dict[str, Tensor]:
        kept = (input_ids != PAD if attention_mask is None else attention_mask)[..., None].float()
        hidden = (self.words(input_ids) * kept).sum(1) / kept.sum(1)
        return {"logits": self.head(self.dropout(torch.relu(self.body(hidden))))}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(2, 4), nn.Linear(3, 4), nn.Linear(8, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([torch.relu(self.one(a)), torch.relu(self.two(b))], 1))


class TakesDict(Pair):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["left"], batch["right"])


def seeded(make, *args) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args)


class Texts(Dataset):
    """Items as a tokenizer gives them: lists of ids of any length; the class is that of the words."""

    def __init__(self, n: int, seed: int, longest: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.items = []
        for number in range(n):
            kind, length = number % CLASSES, 3 + int(torch.randint(longest - 2, (), generator=generator))
            ids = 4 + 9 * kind + torch.randint(9, (length,), generator=generator)
            self.items.append({"input_ids": ids.tolist(), "attention_mask": [1] * length, "label": kind})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.items[index]


def collated(items: list[dict]) -> dict[str, Tensor]:
    """What a collator of Hugging Face makes: batches padded to their own longest text."""
    length = max(len(item["input_ids"]) for item in items)
    ids = [item["input_ids"] + [PAD] * (length - len(item["input_ids"])) for item in items]
    masks = [item["attention_mask"] + [0] * (length - len(item["input_ids"])) for item in items]
    labels = [item["label"] for item in items]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks), "labels": torch.tensor(labels)}


def loader(n: int, seed: int, **options) -> DataLoader:
    return DataLoader(Texts(n, seed), batch_size=5, collate_fn=collated, **options)


TRAIN, HELD_OUT = loader(30, 0), loader(24, 1)
ONE = collated(Texts(4, 2).items)


def pairs(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    return torch.randn(n, 2, generator=generator) + y[:, None], torch.randn(n, 3, generator=generator), y


def calibrate(subject, train=TRAIN, held_out=HELD_OUT, **options):
    likelihood = Categorical() if isinstance(subject, nn.Module) else None
    return dapcal.calibrate(subject, likelihood, train=train, held_out=held_out, candidates=8, **options)


# Packing.


def test_fields_come_back_as_they_were():
    fields = Fields(
        (Field("ids", (), "int64", True, 7), Field("x", (2, 2), "float32"), Field("on", (), "bool"),
         Field("wide", (3,), "float64", True)), "keywords",
    )  # fmt: skip
    given = {
        "ids": torch.tensor([[1, 2**52 + 1], [-3, 4]]), "x": torch.rand(2, 2, 2), "on": torch.tensor([True, False]),
        "wide": torch.rand(2, 2, 3, dtype=torch.float64),
    }  # fmt: skip
    packed = fields.pack(given, "x")
    assert packed.shape == (2, 2 + 4 + 1 + 6)
    assert fields.holds(packed)
    for name, part in fields.unpack(packed).items():
        assert part.dtype == given[name].dtype
        assert torch.equal(part, given[name])
    longer = fields.unpack(fields.pack(given, "x", 4))
    assert longer["ids"].tolist() == [[1, 2**52 + 1, 7, 7], [-3, 4, 7, 7]]
    assert longer["wide"].shape == (2, 4, 3)
    assert not longer["wide"][:, 2:].any()


def test_whole_numbers_stay_whole_numbers():
    ids = Fields((Field("ids", (), "int32", True), Field("mask", (), "bool", True)), "keywords")
    assert ids.dtype == torch.int64
    assert Fields((Field("a", (2,), "float32"), Field("on", (), "bool")), "positions").dtype == torch.float32


def test_what_pads_is_read_off_the_data_or_the_network():
    takes = Takes(("input_ids",), 1, ("input_ids", "attention_mask"))
    batches = [parts_of(batch, takes, "train") for batch in TRAIN]
    fields = find_fields(batches, "train")
    assert [(f.name, f.varies, f.pad) for f in fields.fields] == [
        ("input_ids", True, PAD),
        ("attention_mask", True, 0),
    ]
    assert find_fields(batches, "train", pad_id=9).fields[0].pad == 9
    ignored = {"ids": torch.ones(2, 3), "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}
    masked = find_fields([parts_of((ignored, torch.zeros(2)), Takes((), 0, (), True), "train")], "train")
    assert masked.fields[1].pad == 1  # torch marks what is to be ignored


def test_shuffled_texts_have_words_where_they_had_words():
    taken = take(seeded(Text), {"train": TRAIN})
    x = taken.data["train"].x
    before = taken.fields.unpack(x)
    after = taken.fields.unpack(shuffled_fields(x, taken.fields, torch.Generator().manual_seed(0)))
    kept = before["attention_mask"] == 1
    assert torch.equal(before["attention_mask"], after["attention_mask"])
    assert ((after["input_ids"] == PAD) == ~kept).all()
    assert not torch.equal(before["input_ids"], after["input_ids"])
    assert torch.equal(before["input_ids"].sort(0).values, after["input_ids"].sort(0).values)


# Texts of several lengths.


def test_a_loader_of_dicts_is_enough(tmp_path):
    network = seeded(Text)
    calibrated = calibrate(network)
    assert reads(network) is None  # the user's own is as it was
    assert {space.name for space in calibrated.distance.spaces} <= {"features", "normalised features"}
    prediction = calibrated(ONE)
    own = network(ONE["input_ids"], ONE["attention_mask"])["logits"].softmax(1)
    torch.testing.assert_close(prediction.base.mean, own, atol=0.05, rtol=0)  # a narrow posterior around it
    longer = {
        name: nn.functional.pad(part, (0, 9), value=PAD * ("ids" in name))
        for name, part in ONE.items()
        if part.ndim > 1
    }
    torch.testing.assert_close(calibrated(longer).probs, prediction.probs)
    torch.testing.assert_close(calibrated(longer).ood_score, prediction.ood_score)
    torch.testing.assert_close(calibrated.module()(ONE).mean, prediction.mean)
    by_batch = calibrated.predict(HELD_OUT)
    torch.testing.assert_close(by_batch.probs, calibrated.predict(Texts(24, 1), batch_size=6).probs)
    torch.testing.assert_close(by_batch.probs[:5], calibrated(next(iter(HELD_OUT))).probs)
    calibrated.save(tmp_path / "text.dap")
    again = dapcal.load(tmp_path / "text.dap", seeded(Text))
    assert torch.equal(again(ONE).probs, prediction.probs)
    assert again.inputs == calibrated.inputs
    assert torch.equal(again.to("cpu")(ONE).probs, prediction.probs)


QUICK = {"epochs": 2, "batch_size": 12}
FITS = {
    "last layer": lambda: laplace.last_layer(seeded(Text), Categorical(), TRAIN, held_out=HELD_OUT, draws=3),
    "laplace": lambda: laplace.fit(
        seeded(Text),
        Categorical(),
        TRAIN,
        structure=laplace.Diagonal,
        prior_scale=laplace.HeldOut(HELD_OUT, steps=3),
        draws=3,
    ),
    "ensemble": lambda: ensemble.fit(Text, Categorical(), TRAIN, members=2, held_out=HELD_OUT, patience=2, **QUICK),
    "members": lambda: ensemble.of([Text(), Text()], Categorical()),
    "dropout": lambda: dropout.wrap(seeded(Text, 0.3), Categorical(), draws=3),
    "swag": lambda: swag.fit(seeded(Text), Categorical(), TRAIN, rank=2, start=0.0, draws=3, **QUICK),
    "variational": lambda: variational.fit(seeded(Text), Categorical(), TRAIN, draws=3, **QUICK),
}


@pytest.mark.parametrize("method", FITS)
def test_posteriors_take_dicts(method, tmp_path):
    posterior = FITS[method]()
    calibrated = calibrate(posterior, distance=Space(radius=None))
    prediction = calibrated(ONE)
    torch.testing.assert_close(calibrated.predict(ONE, batch_size=2).probs, prediction.probs)
    calibrated.save(tmp_path / "m.dap")
    made = Text(0.3) if method == "dropout" else Text()
    assert torch.equal(dapcal.load(tmp_path / "m.dap", made)(ONE).probs, prediction.probs)


def test_training_goes_on_from_a_checkpoint(tmp_path):
    def trained(epochs: int, place: Path | None = None) -> nn.Module:
        options = {"checkpoint": place, "schedule": dapcal.posteriors.training.constant}
        return map_posterior.fit(seeded(Text), Categorical(), loader(30, 0), epochs=epochs, **options).network

    whole = trained(2, tmp_path / "c")
    again = trained(2, tmp_path / "c")
    assert torch.equal(whole.head.weight, again.head.weight)


def test_ids_alone_in_batches_of_several_lengths():
    """A network that knows padding by its id needs no mask; one that does not is refused."""

    def pair(items: list[dict]) -> tuple[Tensor, Tensor]:
        batch = collated(items)
        return batch["input_ids"], batch["labels"]

    class ById(Text):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 6, padding_idx=PAD)

    class Blind(Text):
        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(self.words(input_ids).mean(1))))

    train, held_out = (DataLoader(part.dataset, 5, collate_fn=pair) for part in (TRAIN, HELD_OUT))
    calibrated = calibrate(seeded(ById), train, held_out)
    assert calibrated(ONE["input_ids"]).probs.shape == (4, CLASSES)
    with pytest.raises(ValueError, match=r"padding them to one length changes this network's outputs .*; let it heed"):
        calibrate(seeded(Blind), train, held_out)


# Several inputs.


@pytest.mark.parametrize("form", ["nested", "flat", "loader", "flat loader", "names", "dict beside targets"])
def test_several_inputs(form, tmp_path):
    def given(n: int, seed: int):
        a, b, y = pairs(n, seed)
        named = {"a": a, "b": b}
        return {
            "nested": ((a, b), y), "flat": (a, b, y), "loader": [((a[i], b[i]), y[i]) for i in range(n)],
            "flat loader": TensorDataset(a, b, y), "names": {**named, "y": y}, "dict beside targets": (named, y),
        }[form]  # fmt: skip

    train, held_out = given(30, 0), given(24, 1)
    if form == "loader":
        train, held_out = (DataLoader(part, batch_size=6) for part in (train, held_out))
    network = seeded(Pair)
    calibrated = calibrate(network, train, held_out)
    a, b, y = pairs(5, 2)
    x = {"a": a, "b": b} if "names" in form or "dict" in form else (a, b)
    prediction = calibrated(x)
    reference = calibrate(laplace.last_layer(network, Categorical(), train, held_out=held_out), train, held_out)
    assert reference(x).probs.shape == (5, CLASSES)
    assert torch.equal(calibrated.predict(((a, b), y) if isinstance(x, tuple) else (x, y)).probs, prediction.probs)
    calibrated.save(tmp_path / "pair.dap")
    assert torch.equal(dapcal.load(tmp_path / "pair.dap", Pair())(x).probs, prediction.probs)


def test_a_network_that_takes_the_dict_itself():
    def named(n: int, seed: int) -> dict[str, Tensor]:
        a, b, y = pairs(n, seed)
        return {"left": a, "right": b, "target": y}

    calibrated = calibrate(seeded(TakesDict), named(30, 0), named(24, 1), ood=named(20, 3))
    assert calibrated(named(5, 2)).probs.shape == (5, CLASSES)
    assert calibrated.inputs.call == "mapping"


def test_names_of_layers_and_parameters_stay():
    network = seeded(Pair)
    fields = take(network, {"train": ((pairs(4, 0)[:2]), pairs(4, 0)[2])}).fields
    packed = reading(network, fields)
    assert list(packed.state_dict()) == list(network.state_dict())
    assert packed.head is network.head
    a, b, _ = pairs(4, 0)
    assert torch.equal(packed(fields.pack({"a": a, "b": b}, "x")), network(a, b))
    assert torch.equal(packed(a, b), network(a, b))  # called as before, it does as before
    assert torch.equal(copy.deepcopy(packed)(fields.pack({"a": a, "b": b}, "x")), network(a, b))


# Half precision and wrappers.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_in_half_precision(dtype, tmp_path):
    a, _, y = pairs(30, 0)
    network = seeded(lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, CLASSES))).to(dtype)
    calibrated = calibrate(network, (a, y), pairs(24, 1)[::2])
    assert network[0].weight.dtype == dtype
    prediction = calibrated(a)
    assert prediction.probs.dtype == torch.float32
    assert torch.equal(calibrated(a.to(dtype).float()).probs, calibrated(a.to(dtype)).probs)
    calibrated.save(tmp_path / "half.dap")
    assert torch.equal(dapcal.load(tmp_path / "half.dap", network)(a).probs, prediction.probs)
    members = ensemble.of([network, copy.deepcopy(network).float()], Categorical())
    assert members.draws.dtype == torch.float32


# What cannot work.


def no_targets():
    return calibrate(seeded(Text), train={"input_ids": ONE["input_ids"]})


REFUSED = [
    (no_targets, TypeError, "targets in `train` under one of .* rename them"),
    (lambda: calibrate(seeded(Text), train={**ONE, "label": ONE["labels"]}), TypeError, "under one name"),
    (lambda: calibrate(seeded(Pair), train={"left": ONE["input_ids"], "y": ONE["labels"]}), TypeError, "names that"),
    (lambda: calibrate(nn.Linear(2, 3), train=(*pairs(9, 0)[:2], *pairs(9, 0)[1:])), TypeError, r"\(\(a, b\), targ"),
    (lambda: calibrate(seeded(Pair), (pairs(9, 0)[:2][::-1], pairs(9, 0)[2]),
                       (pairs(9, 0)[:2][::-1], pairs(9, 0)[2])), CannotRun, r"could not run on a \(1, 3\)"),
    (lambda: calibrate(StackedPredictions(lambda x: x, Categorical())), TypeError, "without a network"),
    (lambda: calibrate(FITS["members"](), distance=Space(Identity())), ValueError, "Expected features as the space"),
    (lambda: calibrate(FITS["members"](), distance=Space())({"input_ids": ONE["input_ids"]}), ValueError,
     r"add \['attention_mask'\]"),
    (lambda: calibrate(FITS["members"](), distance=Space())({**ONE, "input_ids": ONE["input_ids"].float()}), ValueError,
     "`input_ids` of torch.int64 as in training, got torch.float32"),
    (lambda: find_fields([parts_of((torch.zeros(2, 3, n), torch.zeros(2)), Takes(("x",), 1, ("x",)), "train")
                          for n in (4, 5)], "train"), ValueError, "of one shape but for its length"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[row[2][:24] for row in REFUSED])
def test_what_cannot_work_is_said(call, error, words):
    with pytest.raises(error, match=words):
        call()
