"""A calibrated classifier of texts: a network's model whose inputs are texts, in a file that needs no code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dapcal.artifact import Stored
from dapcal.models import text_files
from dapcal.models.factories import moved
from dapcal.models.fields import Field
from dapcal.models.kept import checked_texts
from dapcal.models.model import PLAIN, TEXT, Reading, Source, first_inputs
from dapcal.models.network import NetworkModel, checked, parts_of
from dapcal.models.subject import Picture, Row
from dapcal.models.text_folder import LONGEST, TextNetwork, Words, make_network, make_tokenizer
from dapcal.reading import refused_if_damaged


@dataclass(frozen=True, eq=False, kw_only=True)
class TextModel(NetworkModel):
    """A calibrated classifier of texts (a `dapcal.models.Model`).

    Attributes:
        words: how texts become token ids.
        config: of the network, as Hugging Face writes it.
        text: the column that texts stand in.
    """

    words: Words
    config: dict[str, Any] = field(repr=False)
    text: str = "text"

    kind = TEXT

    @property
    def features(self) -> tuple[str, ...]:
        """Token ids are not columns that a person knows."""
        return ()

    def read(self, path: Path, reading: Reading = PLAIN) -> Source:
        """The texts of a table."""
        return text_files.read(path, reading, self.words, self.text)

    def inputs(self, path: Path, most: int) -> Tensor:
        """The first texts of a table, as token ids."""
        return first_inputs(self.read(path), most).to(self.calibrated.example.device)

    def fields(self) -> tuple[Field, ...]:
        """One field, the text."""
        return (Field(self.text, "category"),)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Texts of a service as token ids."""
        return self.words([row[self.text] for row in rows])

    def show(self, x: Tensor) -> list[Row | Picture]:
        """Texts as the tokenizer gives them back."""
        return [{self.text: text} for text in self.words.texts(x)]

    def about(self) -> dict[str, Any]:
        """What the file says of the model, its tokenizer and config included."""
        self.words.tokenizer.no_truncation()
        return {
            **super().about(),
            "text": self.text,
            "config": self.config,
            "tokenizer": self.words.tokenizer.to_str(),
            "pad": self.words.pad,
            "length": self.words.length,
        }


def restored(stored: Stored, device: str = "cpu") -> TextModel:
    """What `TextModel.save` wrote: the network is built from its config, by the library alone."""
    about = stored.about
    with refused_if_damaged(stored.path):
        tokenizer, text = checked_texts([about["tokenizer"], about["text"]])
        config, pad, length = about["config"], about["pad"], about["length"]
        if not isinstance(config, dict) or type(pad) is not int or type(length) is not int or not 0 < length <= LONGEST:
            raise ValueError("it does not say how texts become token ids")
        words = Words(make_tokenizer(tokenizer, str(stored.path)), pad, length)
        network = TextNetwork(make_network(config, stored.tensors), pad)
    calibrated = stored.calibrated(moved(network, device))
    with refused_if_damaged(stored.path):
        if calibrated.example.shape[1:] != (length,):
            raise ValueError(f"its texts have {length} tokens and its inputs {tuple(calibrated.example.shape[1:])}")
        return checked(TextModel(**parts_of(stored, calibrated), words=words, config=config, text=text))
