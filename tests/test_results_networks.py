"""Which networks work, as committed: the page shows it, and no step ends in an error that is not a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapcal.experiments.page.networks import networks_page, read

ROOT = Path(__file__).parent.parent
FOUND = read(ROOT / "results")
ROWS = FOUND["rows"]


def test_the_page_shows_the_result_file():
    text = (ROOT / "docs" / "networks.md").read_text(encoding="utf-8")
    assert networks_page(text, ROOT / "results") == text, "run `make page`"


def test_there_are_enough_kinds_and_all_steps():
    assert len(ROWS) >= 25
    assert all(list(row["steps"]) == FOUND["steps"] for row in ROWS.values())


@pytest.mark.parametrize("name", ROWS)
def test_every_step_works_or_is_refused_with_a_sentence(name):
    for outcome in ROWS[name]["steps"].values():
        assert "NOT A SENTENCE" not in outcome
        if outcome not in ("works", "–"):
            assert ";" in outcome, "what to do instead"


def test_features_are_those_that_a_person_would_name():
    """What enters the head; of networks without one what comes closest."""
    named = {name: row["features"].rpartition(".")[2] for name, row in ROWS.items() if row["features"] != "–"}
    assert named["Hugging Face GPT-2"] == "score"
    assert named["Hugging Face BERT"] == named["Hugging Face ViT"] == "classifier"
    assert ROWS["LoRA adapters (peft) on BERT"]["features"].startswith("base_model.model.classifier.")
    assert named["LoRA adapters on the last layer, too"] == "base_layer"
    assert named["CNN without a linear layer"] == "2"
    assert {named[n] for n in ("torch.compile", "DataParallel", "float16", "frozen body", "all weights frozen")} == {
        "3"
    }
    assert named["weight-normed last layer"] == named["spectral-normed last layer"] == "3"
