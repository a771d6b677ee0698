"""`dapcal predict --engine ray`: a table's rows in blocks that an engine answers, written as by one machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapcal.cli.common import Output, all_written, too_few
from dapcal.records import DapcalWarning

if TYPE_CHECKING:
    import pyarrow as pa

    from dapcal.engines import Engine
    from dapcal.models import Model
    from dapcal.models.blocks import Answer, Asked, Block
    from dapcal.models.model import Reading
    from dapcal.models.parts import Parts
    from dapcal.models.table import TableModel


def predicted_in_blocks(
    model: Model,
    model_file: Path,
    data: Path,
    reading: Reading,
    out: Path,
    alpha: float,
    level: float,
    said: Output,
    excel_safe: bool,
    engine_name: str,
    address: str | None,
    brought: Mapping[Path, str],
) -> None:
    """Read, predict and write, block by block, and say what `predicted` says.

    Other nodes do not see files that were brought here, from a URL or standard input: their rows are sent.
    """
    from dapcal.engines import named
    from dapcal.models import table_files
    from dapcal.models.blocks import Asked, batches_of_a_block, blocks_of
    from dapcal.models.formulas import SUFFIXES, Formulas
    from dapcal.models.parts import Parts
    from dapcal.models.table import TableModel, with_beside
    from dapcal.models.tally import Tally
    from dapcal.tables.writing import writer

    if not isinstance(model, TableModel):
        raise ValueError(
            f"--engine {engine_name} is for models of tables, and {model_file} is of another kind; leave it out"
        )
    model.check_reading(reading)
    too_few(said, len(model.calibrated.evidence.held_out), alpha)
    paths = table_files.files_of([data, *reading.also])
    table_files.check_columns(paths, reading.keep)
    asked = Asked(level, alpha, reading.keep)
    total = table_files.expected_rows(paths)
    batches = batches_of_a_block(total)
    engine = named(engine_name, address)
    parts = Parts(out)
    if note := parts.begin(_about(model_file, paths, asked, batches, brought)):
        said.note(note)
    formulas, is_sheet = Formulas(excel_safe), out.suffix.lower() in SUFFIXES
    met, tally = table_files.Met(model.encoder), Tally(model)
    missing = _Missing(blocks_of(paths, batches, brought), parts)
    with writer(out) as write:
        for answer in _answers(engine, model, asked, missing, parts):
            for told in answer.notes:
                warnings.warn(told, DapcalWarning, stacklevel=1)
            write(with_beside(answer.beside, answer.table, formulas if is_sheet else None))
            met.add(answer.met)
            tally.sample.add_drawn(answer.met.x, answer.counted.rows)
            tally.add(answer.counted, answer.columns, answer.targets)
            said.progress("predicting", tally.rows, None if total is None else max(total, tally.rows))
        all_written(missing.rows, write.rows, data)
    engine.release()
    parts.remove()
    said.progress("predicting", tally.rows, tally.rows)
    for note in filter(None, [*met.notes(), formulas.note(), tally.problem()]):
        said.note(note)
    said.result(*tally.told(out, "rows", alpha, level))


def _answers(engine: Engine, model: TableModel, asked: Asked, missing: _Missing, parts: Parts) -> Iterator[Answer]:
    """Every batch with its predictions, in the order of the rows, as soon as all before it are there."""
    from dapcal.models.blocks import answers_in

    turn = 0
    for place, content in engine.each(model, partial(_answered, asked), missing):
        parts.write(missing.numbers[place], content)
        while turn < missing.count and parts.has(turn):
            yield from answers_in(parts.path(turn))
            turn += 1
    for number in range(turn, missing.count):
        yield from answers_in(parts.path(number))


def _answered(asked: Asked, model: TableModel, block: Block) -> pa.Buffer:
    from dapcal.models.blocks import answered

    return answered(model, asked, block)


@dataclass
class _Missing:
    """The blocks that are not finished, one after the other."""

    blocks: Iterator[Block]
    parts: Parts
    count: int = 0  # blocks seen so far, finished ones among them
    rows: int = 0  # of these

    def __post_init__(self) -> None:
        self.numbers: list[int] = []

    def __iter__(self) -> Iterator[Block]:
        for number, block in enumerate(self.blocks):
            self.count, self.rows = number + 1, self.rows + block.rows
            if not self.parts.has(number):
                self.numbers.append(number)
                yield block


def _about(
    model_file: Path, paths: list[Path], asked: Asked, batches: int, brought: Mapping[Path, str]
) -> dict[str, Any]:
    """All that the answers depend on."""
    from dapcal.engines.nodes import versions
    from dapcal.models.parts import about_files, digest
    from dapcal.tables.files import BATCH_ROWS

    return {
        "model": digest(model_file),
        "files": about_files(paths, brought),
        "asked": asdict(asked),
        "bounds": [batches, BATCH_ROWS],
        "versions": versions(),
    }
