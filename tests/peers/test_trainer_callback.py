"""The callback for Hugging Face's Trainer: dict batches, each padded to its own length, calibrated at the end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_text_folders import TOPICS, config, sentence, tokenizer
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import dapcal
from dapcal import artifact
from dapcal.integrations.huggingface import Calibrate
from dapcal.likelihoods import Categorical

NAMES = {0: "sport", 1: "money"}


class Sentences(Dataset):
    """Dicts of token ids, mask and label, each of its own length; and a column that no network takes."""

    def __init__(self, n: int, seed: int, topics=("sport", "money")) -> None:
        source = random.Random(seed)
        self.labels = [i % len(topics) for i in range(n)]
        texts = [sentence(topics[label], source) for label in self.labels]
        self.encoded = tokenizer()(texts)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict:
        parts = {name: self.encoded[name][row] for name in ("input_ids", "attention_mask")}
        return {**parts, "labels": self.labels[row]}


def network() -> BertForSequenceClassification:
    return BertForSequenceClassification(config(num_labels=2, id2label=NAMES))


def fit(callback, tmp_path, evaluation=True, **options):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        num_train_epochs=6, per_device_train_batch_size=20, learning_rate=3e-3, logging_strategy="no", seed=0,
        **{"eval_strategy": "epoch" if evaluation else "no", **options},
    )  # fmt: skip
    words = tokenizer()
    trainer = Trainer(
        network(),
        arguments,
        data_collator=DataCollatorWithPadding(words),
        train_dataset=Sentences(160, 0),
        eval_dataset=Sentences(160, 1) if evaluation else None,
        processing_class=words,
        callbacks=[callback],
    )
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore::dapcal.DapcalWarning")  # of few rows
def test_artefact_and_report_are_written_when_training_ends(tmp_path):
    callback = Calibrate(tmp_path / "topics.dap", Categorical(), share=0.75)
    trainer = fit(callback, tmp_path)
    assert {"topics.dap", "topics.html"} <= {path.name for path in tmp_path.iterdir()}
    page = (tmp_path / "topics.html").read_text()
    assert TOPICS["sport"][0] in page
    assert "money" in page
    calibrated = callback.model.calibrated
    assert callback.model.classes == ("sport", "money")
    assert len(callback.model.train.x) == 160
    assert len(callback.model.held_out.x) == 120

    batch = tokenizer()(
        ["goal for the team", "shares of the bank market and a loan"], padding=True, return_tensors="pt"
    )
    prediction = calibrated(dict(batch))
    assert prediction.probs.argmax(1).tolist() == [0, 1]
    again = dapcal.load(tmp_path / "topics.dap", network())
    torch.testing.assert_close(again(dict(batch)).probs, prediction.probs)
    own = trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(calibrated.posterior.network(**batch).logits, own(**batch).logits)

    collate = DataCollatorWithPadding(tokenizer())
    loaders = [
        DataLoader(data, batch_size=32, collate_fn=collate)
        for data in (Sentences(160, 0), torch.utils.data.Subset(Sentences(160, 1), callback.ending.rows(160).tolist()))
    ]
    expected = dapcal.calibrate(own, Categorical(), train=loaders[0], held_out=loaders[1])
    with pytest.raises(ValueError, match=r"takes input_ids, attention_mask, which .* predict in Python"):
        callback.model.read(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=r"takes input_ids, attention_mask, which no file of one array holds"):
        callback.model.fields()
    assert expected.phi == pytest.approx(calibrated.phi, rel=1e-3)


def test_with_several_processes_the_first_calibrates_on_all_rows(tmp_path):
    here = Path(__file__).parent
    program = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*program, str(here / "trainer_program.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["True", "False"]
    stored = artifact.open(tmp_path / "topics.dap")
    assert len(stored.attachments["train.x"]) == 160
    assert len(stored.attachments["held_out.x"]) == 80


def test_what_cannot_work_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"evaluates nothing \(eval_strategy='no'\); give `held_out`"):
        fit(Calibrate(tmp_path / "m.dap"), tmp_path, evaluation=False)
    with pytest.raises(FileNotFoundError):
        fit(Calibrate(tmp_path / "nowhere" / "m.dap"), tmp_path)


def test_an_error_at_the_end_is_a_warning(tmp_path):
    with pytest.warns(dapcal.DapcalWarning, match="Training has ended well.*at least 4 held-out"):
        trainer = fit(Calibrate(tmp_path / "m.dap", held_out=Sentences(2, 5)), tmp_path, evaluation=False)
    assert trainer.state.global_step
    assert not (tmp_path / "m.dap").exists()
