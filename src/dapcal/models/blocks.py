"""A table's files in blocks of rows, and the one function that answers a block, wherever it runs.

A block is some whole batches of the run on one machine, so its answers are the same to the last bit. Of a Parquet file
a block is where its rows stand, and a worker reads them; of other files it is the rows themselves, as these can only be
read from their beginning on.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from dapcal.models.columns import Columns
from dapcal.models.drift import drawn
from dapcal.models.table import TableModel
from dapcal.models.tally import Counted, counted
from dapcal.records import DapcalWarning
from dapcal.tables.encoder import Encoded
from dapcal.tables.files import BATCH_ROWS, as_expected, unconverted
from dapcal.tables.typed import parquet_rows

_MOST_BATCHES = 8  # of a block: what is done again at most where a worker is lost
_ENOUGH = 64  # blocks: of fewer rows smaller ones, so that several workers have something to do
_TOLD = b"dapcal"  # the key of what is told beside a batch


@dataclass(frozen=True)
class Asked:
    """What is asked about every row.

    Attributes:
        level: of the intervals.
        alpha: p-values up to this are flagged.
        keep: columns to hand on.
    """

    level: float
    alpha: float
    keep: tuple[str, ...]


class Block(NamedTuple):
    """Some rows of a file, `rows` of them from the `start`-th of the file on, which is the `seen`-th of all."""

    path: Path  # as it was named
    start: int
    rows: int
    seen: int
    tables: pa.Buffer | None = None  # None: to be read where they are answered
    whole: Path = Path()  # then, the path from the root on


class Answer(NamedTuple):
    """One batch with its predictions, as it is to be written, and what is told of it."""

    beside: dict[str, Any]  # columns that are kept
    table: pa.Table  # the predictions
    targets: pa.ChunkedArray | None
    counted: Counted
    met: Encoded  # its `x` are the rows that a sample takes up
    notes: list[str]

    @property
    def columns(self) -> Columns:
        """Of the predictions those that targets are compared with."""
        names = [name for name in ("prediction", "lower", "upper") if name in self.table.column_names]
        return {name: self.table[name].to_numpy() for name in names}


def batches_of_a_block(rows: int | None) -> int:
    """So many, for this number of rows in all; None where it is not known."""
    return _MOST_BATCHES if rows is None else min(max(rows // (BATCH_ROWS * _ENOUGH), 1), _MOST_BATCHES)


def blocks_of(paths: Sequence[Path], batches: int, unseen: Container[Path] = ()) -> Iterator[Block]:
    """All rows of some files, so many batches a block; rows of files that workers cannot see are part of it."""
    seen = 0
    for path in paths:
        places = _parquet if is_parquet(path) and path not in unseen else _others
        for block in places(path, seen, batches):
            yield block
            seen += block.rows


def is_parquet(path: Path) -> bool:
    """Whether rows can be read from the middle of a file."""
    return path.suffix.lower() in (".parquet", ".pq")


def _parquet(path: Path, seen: int, batches: int) -> Iterator[Block]:
    next(unconverted(path))  # what is wrong with the file is found out here
    total = pyarrow.parquet.read_metadata(path).num_rows
    for start in range(0, total, batches * BATCH_ROWS):
        rows = min(batches * BATCH_ROWS, total - start)
        yield Block(path, start, rows, seen + start, whole=path.resolve())


def _others(path: Path, seen: int, batches: int) -> Iterator[Block]:
    start, held = 0, []
    for table in unconverted(path):
        held.append(table)
        if len(held) == batches:
            rows = sum(map(len, held))
            yield Block(path, start, rows, seen + start, packed(held))
            start, held = start + rows, []
    if held:
        yield Block(path, start, sum(map(len, held)), seen + start, packed(held))


def answered(model: TableModel, asked: Asked, block: Block) -> pa.Buffer:
    """The predictions for a block, batch by batch (`answers_in` reads them)."""
    row, seen, answers = block.start + 1, block.seen, []
    for table in _tables(block):
        answers.append(
            _answer(model, asked, as_expected(table, model.encoder.expected, str(block.path), row), row, seen)
        )
        row, seen = row + len(table), seen + len(table)
    return _written(answers)


def _tables(block: Block) -> Iterator[pa.Table]:
    if block.tables is not None:
        yield from (pa.Table.from_batches([batch]) for batch in pa.ipc.open_stream(block.tables))
        return
    if not block.whole.exists():
        raise FileNotFoundError(f"A node of the cluster does not see {block.whole}; put it where all nodes do")
    yield from parquet_rows(block.whole, block.start, block.start + block.rows, BATCH_ROWS)


def _answer(model: TableModel, asked: Asked, table: pa.Table, row: int, seen: int) -> Answer:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DapcalWarning)
        encoded = model.encoder(table, row)
        columns = model.columns(encoded.x, level=asked.level, alpha=asked.alpha)
    target = model.encoder.target
    return Answer(
        beside={name: table[name] for name in asked.keep},
        table=model.table(columns),
        targets=table[target] if target in table.column_names else None,
        counted=counted(columns),
        met=encoded._replace(x=encoded.x[torch.from_numpy(drawn(seen, len(table)).rows)]),
        notes=[str(one.message) for one in caught if issubclass(one.category, DapcalWarning)],
    )


# As bytes: an Arrow stream, a record batch for every batch, with what is told of it beside


def packed(tables: Iterable[pa.Table]) -> pa.Buffer:
    """Tables of one schema as an Arrow stream, one record batch each."""
    return _stream((table, {}) for table in tables)


def _written(answers: Sequence[Answer]) -> pa.Buffer:
    return _stream(
        (_columns(answer), {_TOLD: json.dumps(_told(answer)), "x": _bytes(answer.met.x)}) for answer in answers
    )


def _stream(pairs: Iterable[tuple[pa.Table, Mapping[Any, Any]]]) -> pa.Buffer:
    sink, writer = pa.BufferOutputStream(), None
    for table, told in pairs:
        (batch,) = table.combine_chunks().to_batches()
        if writer is None:
            writer = pa.ipc.new_stream(sink, batch.schema)
        writer.write_batch(batch, custom_metadata=told or None)
    assert writer is not None
    writer.close()
    return sink.getvalue()


def answers_in(content: pa.Buffer | Path) -> Iterator[Answer]:
    """What `answered` gave."""
    with pa.ipc.open_stream(content if isinstance(content, pa.Buffer) else pa.memory_map(str(content))) as reader:
        while True:
            try:
                batch, told = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            yield _answer_of(pa.Table.from_batches([batch]), json.loads(told[_TOLD]), told[b"x"])


def _columns(answer: Answer) -> pa.Table:
    """All columns under numbers, as two may have one name."""
    arrays = [*answer.beside.values(), *answer.table.columns, *([] if answer.targets is None else [answer.targets])]
    return pa.table(arrays, [str(place) for place in range(len(arrays))])


def _told(answer: Answer) -> dict[str, Any]:
    return {
        "beside": list(answer.beside),
        "names": answer.table.column_names,
        "counted": answer.counted,
        "unknown": answer.met.unknown,
        "imputed": answer.met.imputed,
        "ignored": answer.met.ignored,
        "width": answer.met.x.shape[1],
        "notes": answer.notes,
    }


def _answer_of(table: pa.Table, told: dict[str, Any], x: bytes) -> Answer:
    kept, names = told["beside"], told["names"]
    columns = table.columns
    rows, flagged, reasons, behind = told["counted"]
    return Answer(
        beside=dict(zip(kept, columns[: len(kept)], strict=True)),
        table=pa.table(columns[len(kept) : len(kept) + len(names)], names),
        targets=columns[-1] if len(columns) > len(kept) + len(names) else None,
        counted=Counted(rows, flagged, Counter(reasons), Counter(behind)),
        met=Encoded(
            torch.from_numpy(np.frombuffer(x, np.float32).reshape(-1, told["width"]).copy()),
            {name: Counter(levels) for name, levels in told["unknown"].items()},
            told["imputed"],
            tuple(told["ignored"]),
        ),
        notes=told["notes"],
    )


def _bytes(x: Tensor) -> bytes:
    return x.cpu().contiguous().numpy().tobytes()
