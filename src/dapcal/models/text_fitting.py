"""From a Hugging Face folder and tables of texts to a calibrated model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from dapcal.data import Labelled
from dapcal.models import network_fitting, text_files
from dapcal.models.factories import moved
from dapcal.models.network import NetworkModel
from dapcal.models.text import TextModel
from dapcal.models.text_folder import TextNetwork, Words, read_network, read_words
from dapcal.progress import Stages


class Texts(NamedTuple):
    """A folder and tables that were read."""

    folder: Path
    network: nn.Module
    config: dict[str, Any]
    words: Words
    text: str
    classes: tuple[str, ...]
    train: Labelled
    held_out: Labelled
    ood: Tensor | None


def read(folder: str | Path, train: Path, held_out: Path, *, text: str, target: str, ood: Path | None = None) -> Texts:
    """A trained classifier and its texts.

    Args:
        folder: what `model.save_pretrained` and `tokenizer.save_pretrained` wrote.
        train: table of the texts that it was trained on, with labels.
        held_out: such a table of texts that it has not seen.
        text: the column of texts.
        target: the column of labels: names of the classes as the config has them, or their numbers.
        ood: table of texts unlike them, to choose φ on.
    """
    folder = Path(folder)
    network, config = read_network(folder)
    classes = _classes(config)
    tables = [train, held_out, *([ood] if ood else [])]
    columns = {path: text_files.column_of_texts(path, text) for path in tables}
    words = read_words(folder, config).fitted([one for some in columns.values() for one in some])
    known, others = (
        Labelled(words(columns[path], str(path)), text_files.targets(path, target, classes))
        for path in (train, held_out)
    )
    return Texts(
        folder,
        network,
        config,
        words,
        text,
        classes,
        known,
        others,
        None if ood is None else words(columns[ood], str(ood)),
    )


def fit(
    texts: Texts,
    *,
    posterior: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Stages | None = None,
) -> TextModel:
    """Make a trained classifier of texts distance-aware; arguments as in `network_fitting.fit`."""
    fitted = network_fitting.fit(
        [moved(TextNetwork(texts.network, texts.words.pad), device)],
        texts.train,
        texts.held_out,
        ood=texts.ood,
        posterior=posterior,
        task="classification" if texts.classes else "regression",
        classes=texts.classes,
        factory=str(texts.folder),
        seed=seed,
        progress=progress,
    )
    parts = {one.name: getattr(fitted, one.name) for one in fields(NetworkModel)}
    return TextModel(**parts, words=texts.words, config=texts.config, text=texts.text)


def _classes(config: dict[str, Any]) -> tuple[str, ...]:
    """Names of the classes; none where one number is predicted."""
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # as the library understands their absence
    ordered = [str(names[number]) for number in sorted(names, key=int)]
    return () if len(ordered) == 1 or config.get("problem_type") == "regression" else tuple(ordered)
