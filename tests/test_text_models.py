"""Texts and timm's models without their libraries: columns and labels of tables, options of names, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dapcal.models import text_files
from dapcal.models.factories import network
from dapcal.models.model import Reading
from dapcal.models.text_folder import Words
from table_cases import refused, run

TOPICS = ("sport", "money")


class Letters:
    """A tokenizer in the library's manner: a token for every letter, with none for blanks."""

    most: int | None = None

    def no_padding(self) -> None:
        pass

    def no_truncation(self) -> None:
        self.most = None

    def enable_truncation(self, most: int) -> None:
        self.most = most

    def encode_batch(self, texts: list[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(ids=[ord(letter) for letter in text if letter != " "][: self.most]) for text in texts]

    def decode_batch(self, rows: list[list[int]]) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text('id,text,topic\n7,a goal,sport\n8,"rates, up",money\n9,NA,sport\n')
    return tmp_path / "t.csv"


def test_texts_are_padded_to_the_longest_and_given_back():
    words = Words(Letters(), pad=0, length=100).fitted(["ab", "abcd", "a"])
    assert words.length == 4
    assert words(["ab", "abcdef"]).tolist() == [[97, 98, 0, 0], [97, 98, 99, 100]]
    assert words.texts(words(["ab", "a b c"])) == ["ab", "abc"]
    assert words.cut(["ab", "abcd", "abcde"]) == 1
    with pytest.raises(ValueError, match=r"new\.csv, row 6: Expected a text with at least one token, got ' '"):
        words(["a", " "], "new.csv", 5)


def test_a_table_of_texts_is_read_in_batches(table: Path):
    words = Words(Letters(), pad=0, length=3)
    source = text_files.read(table, Reading(keep=("id",), batch_size=2), words, "text")
    batches = list(source.batches)
    assert [len(batch.x) for batch in batches] == [2, 1]
    assert [list(batch.beside["id"]) for batch in batches] == [["7", "8"], ["9"]]
    assert [list(batch.beside["index"]) for batch in batches] == [[0, 1], [2]]
    assert words.texts(torch.cat([batch.x for batch in batches])) == ["ago", "rat", "NA"]  # NA is a text here
    assert source.notes() == ["2 texts have more than 3 tokens, the most that calibration saw, and were cut"]


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (Reading(keep=("ids",)), "There is no column `ids`"),
        (Reading(resize=True), "takes no --resize"),
    ],
)
def test_readings_that_are_refused(table: Path, reading: Reading, words: str):
    with pytest.raises(ValueError, match=words):
        text_files.read(table, reading, Words(Letters(), 0, 3), "text")


def test_labels_are_names_numbers_or_amounts(table: Path, tmp_path: Path):
    assert text_files.targets(table, "topic", TOPICS).tolist() == [0, 1, 0]
    assert text_files.targets(table, "id", ()).tolist() == [7.0, 8.0, 9.0]
    (tmp_path / "n.csv").write_text("text,y\na,1\nb,0\n")
    assert text_files.targets(tmp_path / "n.csv", "y", TOPICS).tolist() == [1, 0]
    with pytest.raises(
        ValueError, match=r"row 1: Expected one of the model's classes in column `id` \(sport, money, or"
    ):
        text_files.targets(table, "id", TOPICS)
    with pytest.raises(ValueError, match="no column `topics`; did you mean `topic`"):
        text_files.targets(table, "topics", TOPICS)


def test_a_folder_that_is_not_of_hugging_face_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    common = ["calibrate", "--model", "model", "--train", table, "--held-out", table, "-o", "m.dap"]
    refused(run(*common, "--text", "text", "--target", "topic"), "There is no config.json in model")
    refused(run(*common, "--text", "text"), "Expected --text and --target")
    refused(run(*common, "--weights", "w.pt", "--text", "text", "--target", "topic"), "--weights itself")
    for config, words in (
        ("{", "is damaged"),
        ("{}", "names no `model_type`"),
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', "got BertForMaskedLM"),
        (
            '{"model_type": "bert", "architectures": ["BertForSequenceClassification"], "auto_map": {"A": "x"}}',
            "asks for auto_map, which dapcal does not run",
        ),
        (
            '{"model_type": "bert", "architectures": ["BertForSequenceClassification"], "problem_type": '
            '"multi_label_classification"}',
            "several labels of a text",
        ),
    ):
        (tmp_path / "model" / "config.json").write_text(config)
        refused(run(*common, "--text", "text", "--target", "topic"), words)


def test_texts_want_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Path):
    monkeypatch.chdir(tmp_path)
    common = ["calibrate", "--model", "nets:make", "--train", table, "--held-out", table, "-o", "m.dap"]
    refused(run(*common, "--text", "text", "--target", "topic"), "there is no folder nets:make")
    refused(run(*common), "Expected --weights")


def test_models_of_timm_by_name(monkeypatch: pytest.MonkeyPatch):
    def create_model(name: str, pretrained: bool = True, num_classes: int = 1000) -> nn.Module:
        assert not pretrained
        if name != "tiny":
            raise RuntimeError("Unknown model")
        return nn.Linear(2, num_classes)

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    state = torch.get_rng_state()
    made = network("timm:tiny,num_classes=3")
    assert made.out_features == 3
    assert torch.equal(made.weight, network("timm:tiny, num_classes=3").weight)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="timm cannot make the model 'huge' \\(Unknown model\\)"):
        network("timm:huge")
    with pytest.raises(
        ValueError, match="options like num_classes=10 after the name of timm's model, got 'num_classes'"
    ):
        network("timm:tiny,num_classes")


def test_without_timm_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"timm:tiny needs timm \(.*\); install it"):
        network("timm:tiny")
