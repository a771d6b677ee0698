"""`dapcal calibrate` for a Hugging Face folder and tables of texts: from a tiny config to predictions and a report."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

import dapcal.integrations.mlflow as flavor
from dapcal import artifact
from dapcal.models import load, text_fitting
from dapcal.models.text import TextModel
from dapcal.models.text_folder import read_network
from dapcal.serve import Served
from table_cases import refused, run

TOPICS = {
    "sport": ["match", "goal", "team", "coach", "league", "referee", "striker"],
    "money": ["bank", "market", "shares", "profit", "interest", "loan", "budget"],
    "music": ["guitar", "concert", "melody", "rhythm", "chorus", "album", "singer"],
}
COMMON = ["the", "a", "of", "and", "to", "in", "is", "was", "for", "on", "with"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCABULARY = [*SPECIAL, *sorted({word for words in (COMMON, *TOPICS.values()) for word in words})]


def sentence(topic: str, random: random.Random) -> str:
    words = [random.choice(COMMON if random.random() < 0.5 else TOPICS[topic]) for _ in range(random.randint(3, 9))]
    if random.random() < 0.2:
        words += random.choices(TOPICS["sport"] + TOPICS["money"], k=3)
    return " ".join(words)


def write_table(path: Path, n: int, seed: int, topics=("sport", "money")) -> Path:
    source = random.Random(seed)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "text", "topic", "length"])
        for i in range(n):
            topic = topics[i % len(topics)]
            text = sentence(topic, source)
            rows.writerow([f"t{i}", text, topic, len(text.split()) / 10])
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **named)


def config(**options) -> BertConfig:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=16, pad_token_id=0, **sizes, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """model/, train.csv, held-out.csv, new.csv (of known topics) and music.csv."""
    place = tmp_path_factory.mktemp("texts")
    for name, n, seed in (("train", 160, 0), ("held-out", 120, 1), ("new", 60, 2)):
        write_table(place / f"{name}.csv", n, seed)
    write_table(place / "music.csv", 40, 3, ["music"])
    torch.manual_seed(0)
    names = {0: "sport", 1: "money"}
    network = BertForSequenceClassification(
        config(num_labels=2, id2label=names, label2id={v: k for k, v in names.items()})
    )
    rows = pd.read_csv(place / "train.csv")
    encoded = tokenizer()(rows["text"].tolist(), padding=True, return_tensors="pt")
    y = torch.tensor((rows["topic"] == "money").astype(int).tolist())
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(15):
        for index in torch.randperm(len(y)).split(40):
            optimizer.zero_grad()
            network(**{name: part[index] for name, part in encoded.items()}, labels=y[index]).loss.backward()
            optimizer.step()
    network.save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    return place


def arguments(folder: Path, out: Path, model: Path | None = None, target: str = "topic") -> list[object]:
    return [
        "calibrate", "--model", model or folder / "model", "--train", folder / "train.csv", "--held-out",
        folder / "held-out.csv", "--ood", folder / "music.csv", "--text", "text", "--target", target, "-o", out,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(folder) -> Path:
    done = run(*arguments(folder, folder / "topics.dap"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["classes"] == ["sport", "money"]
    assert found["accuracy"] > 0.8
    assert "Loading weights" not in done.stderr
    return folder / "topics.dap"


def test_texts_in_and_predictions_out(folder, calibrated, tmp_path):
    for name in ("new", "music"):
        done = run("predict", calibrated, folder / f"{name}.csv", "--keep", "id", "-o", tmp_path / f"{name}.csv")
        assert done.exit_code == 0, done.output
    new, music = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("new", "music"))
    truth = pd.read_csv(folder / "new.csv")
    assert list(new["id"]) == list(truth["id"])
    assert (new["prediction"] == truth["topic"]).mean() > 0.8
    assert {"probability_sport", "probability_money", "ood_p_value", "ood", "reason"} <= set(new)
    assert music["ood"].mean() > new["ood"].mean() + 0.2


def test_the_network_sees_what_hugging_face_gives_it(folder, calibrated):
    """Fixed length and mask from the ids give what the tokenizer's own padding and mask do."""
    model, texts = load(calibrated), pd.read_csv(folder / "new.csv")["text"].tolist()
    assert isinstance(model, TextModel)
    own = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    encoded = AutoTokenizer.from_pretrained(folder / "model")(texts, padding=True, return_tensors="pt")
    x = model.encode([{"text": text} for text in texts])
    with torch.no_grad():
        torch.testing.assert_close(model.calibrated.posterior.network(x), own(**encoded).logits, rtol=1e-4, atol=1e-5)
    assert [row["text"] for row in model.show(x)] == texts


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # so few rows end at the edge of the search for σ0
def test_the_file_alone_gives_the_same_predictions(folder, calibrated, tmp_path):
    texts = text_fitting.read(
        folder / "model",
        folder / "train.csv",
        folder / "held-out.csv",
        text="text",
        target="topic",
        ood=folder / "music.csv",
    )
    fitted = text_fitting.fit(texts)
    shutil.copy(calibrated, tmp_path / "alone.dap")
    again = load(tmp_path / "alone.dap")
    x = again.inputs(folder / "music.csv", 100)
    torch.testing.assert_close(again.calibrated(x).probs, fitted.calibrated(x).probs)
    refused(
        run("predict", calibrated, folder / "new.csv", "--model", "nets:make", "-o", tmp_path / "o.csv"),
        "is a model of texts and needs no --model",
    )


def test_report_service_and_mlflow(folder, calibrated, tmp_path):
    done = run("report", calibrated, "--data", folder / "music.csv", "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert "guitar" in page
    assert "x0" not in page
    served = Served.of(load(calibrated), "topics")
    (record,) = served.predict([{"text": "goal for the team of the coach"}])
    assert record["prediction"] == "sport"
    flavor.save_model(calibrated, tmp_path / "mlflow")
    frame = flavor.Predictor(flavor.load_model(tmp_path / "mlflow")).predict(pd.read_csv(folder / "new.csv"))
    assert len(frame) == 60


def test_explain_shows_the_nearest_texts(folder, calibrated):
    done = run("explain", calibrated, folder / "new.csv", "--row", "2", "--neighbours", "3")
    assert done.exit_code == 0, done.output
    shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
    texts = pd.read_csv(folder / "new.csv")["text"]
    assert f"this row {texts[1]} ?" in shown
    known = set(pd.read_csv(folder / "train.csv")["text"])
    near = [line for line in shown if line.startswith("training row at")]
    assert len(near) == 3
    assert all(" ".join(line.split()[4:-1]) in known for line in near)
    model = load(calibrated)
    x, network = model.encode([{"text": texts[1]}]), model.calibrated.posterior.network
    features = {}
    network.network.classifier.register_forward_pre_hook(lambda _, given: features.setdefault("x", given[0]))
    with torch.no_grad():
        network(torch.cat([x, model.train.x]))
    nearest = (features["x"][1:] - features["x"][:1]).norm(dim=1).argmin()
    assert " ".join(near[0].split()[4:-1]) == model.words.texts(model.train.x[nearest][None])[0]


def test_numbers_of_texts(folder, tmp_path):
    """One output is a number: here the length, in tens of words."""
    torch.manual_seed(0)
    network = BertForSequenceClassification(config(num_labels=1))
    network.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    done = run(*arguments(folder, tmp_path / "m.dap", tmp_path / "model", "length"), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["task"] == "regression"
    assert load(tmp_path / "m.dap").classes == ()


def changed(folder: Path, to: Path, **config_changes) -> Path:
    shutil.copytree(folder / "model", to)
    about = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(about | config_changes))
    return to


def test_what_is_refused(folder, tmp_path):
    bad = changed(folder, tmp_path / "code", auto_map={"AutoModel": "evil.Model"})
    (bad / "evil.py").write_text("raise SystemExit('ran')")
    refused(run(*arguments(folder, tmp_path / "m.dap", bad)), "asks for auto_map")
    unknown = changed(folder, tmp_path / "unknown", model_type="no-such-model")
    refused(run(*arguments(folder, tmp_path / "m.dap", unknown)), "does not know the model 'no-such-model'")
    bare = changed(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    refused(run(*arguments(folder, tmp_path / "m.dap", bare)), "There is no tokenizer.json")
    (bare / "tokenizer.json").write_text("{}")
    refused(run(*arguments(folder, tmp_path / "m.dap", bare)), "is not a tokenizer")
    (bare / "model.safetensors").unlink()
    refused(run(*arguments(folder, tmp_path / "m.dap", bare)), "weights of", "cannot be read")
    headless = tmp_path / "headless"
    BertForMaskedLM(config()).save_pretrained(headless)
    about = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps(about | {"architectures": ["BertForSequenceClassification"]}))
    refused(run(*arguments(folder, tmp_path / "m.dap", headless)), "lacks weights of a classifier (")
    rows = (folder / "held-out.csv").read_text().replace("sport", "chess", 1)
    odd = tmp_path / "odd"
    shutil.copytree(folder, odd)
    (odd / "held-out.csv").write_text(rows)
    refused(run(*arguments(odd, tmp_path / "m.dap")), "row 1: Expected one of the model's classes", "got 'chess'")
    assert not (tmp_path / "m.dap").exists()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"config": {"vocab_size": 10**13}}, "asks for 2400000"),
        ({"config": {"num_hidden_layers": 10**9}}, "asks for 1000000000 as num_hidden_layers"),
        ({"config": {"model_type": "no-such-model"}}, "does not know the model"),
        ({"config": {"hidden_size": 12}}, "another model"),
        ({"tokenizer": "{}"}, "is not a tokenizer"),
        ({"pad": "0"}, "does not say how texts become token ids"),
        ({"length": 3}, "its texts have 3 tokens"),
        ({"text": 5}, "holds something else"),
    ],
)
def test_files_that_were_edited_are_refused_before_anything_large_is_built(calibrated, tmp_path, edit, words):
    model = load(calibrated)
    about = model.about()
    edited = {name: {**about[name], **part} if isinstance(part, dict) else part for name, part in edit.items()}
    attachments = {"held_out.x": model.held_out.x, "held_out.y": model.held_out.y}
    artifact.save(model.calibrated, tmp_path / "edited.dap", {**about, **edited}, attachments)
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "edited.dap")


def test_weights_are_in_float32_whatever_the_file_has(folder, tmp_path):
    half = AutoModelForSequenceClassification.from_pretrained(folder / "model").to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    network, _ = read_network(tmp_path / "half")
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert isinstance(network, nn.Module)
    assert not network.training
