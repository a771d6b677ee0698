"""`dapcal predict`: predictions for a table, in batches, whatever its size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dapcal.cli.common import Device, Json, Output, Quiet, all_written, checked, output, too_few, typer, writable
from dapcal.types import ALPHA, LEVEL

if TYPE_CHECKING:
    import pyarrow as pa

    from dapcal.tables import Encoded
    from dapcal.tables.model import TableModel

_PEEK = 2**20  # bytes from which the number of rows is estimated


def predict(
    model: Annotated[Path, typer.Argument(readable=False, help="What `dapcal fit` wrote.")],
    data: Annotated[
        Path, typer.Argument(readable=False, help="Table with the same columns: .csv, .tsv, .parquet or .npz.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", readable=False, help="Predictions: .csv, .tsv or .parquet.")],
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Rows with a p-value up to this are flagged.")] = ALPHA,
    level: Annotated[float, typer.Option(help="Probability that an interval holds the target (regression).")] = LEVEL,
    keep: Annotated[list[str] | None, typer.Option(help="Column to copy, e.g. an id; may be repeated.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict every row of a table: prediction, uncertainty, and whether it is like the training rows.

    Columns are matched by name. The file may be larger than memory; the output appears when it is complete.

    Example: dapcal predict house.dap new.csv -o out.csv
    """
    with output(as_json, quiet) as said:
        from dapcal.tables import columns_of, stream
        from dapcal.tables import model as models
        from dapcal.tables.writing import writer

        writable(out, data, model)
        if not 0 < level < 1:
            raise ValueError(f"Expected --level between 0 and 1, got {level}")
        loaded = models.load(model, checked(device))
        too_few(said, len(loaded.calibrated.evidence.held_out), alpha)
        kept = _kept(keep or [], columns_of(data), data)
        total = _expected_rows(data)
        rows, flagged, met = 0, 0, _Met()
        with writer(out) as write:
            for batch in stream(data, loaded.encoder.expected):
                predicted = loaded.predict(batch, alpha=alpha, level=level, first_row=rows + 1)
                rows, flagged = rows + len(batch), flagged + sum(predicted.table["ood"].to_pylist())
                met.add(predicted.encoded)
                write(_beside(batch, kept, predicted.table))
                said.progress("predicting", rows, None if total is None else max(total, rows))
            if not rows:
                raise ValueError(f"{data} has a header and no rows; there is nothing to predict")
            all_written(rows, write.rows, data)
        said.progress("predicting", rows, rows)
        met.tell(said, loaded)
        share = f"{flagged:,} of {rows:,} rows ({100 * flagged / rows:.1f} %) are out of distribution at {alpha:g}"
        said.result({"file": str(out), "rows": rows, "ood": flagged, "alpha": alpha}, f"{share}\nSaved to {out}")


class _Met:
    """What had to be made up for on the way."""

    def __init__(self) -> None:
        self.unknown: Counter[str] = Counter()
        self.imputed: Counter[str] = Counter()
        self.ignored: tuple[str, ...] = ()

    def add(self, encoded: Encoded) -> None:
        self.unknown.update(encoded.unknown)
        self.imputed.update(encoded.imputed)
        self.ignored = encoded.ignored

    def tell(self, said: Output, model: TableModel) -> None:
        for name, count in self.unknown.items():
            said.note(
                f"column `{name}`: {_rows(count)} with a category that training never saw, further from every training "
                "row for it"
            )
        for name, count in self.imputed.items():
            filled = "the mean" if model.encoder.expected[name] == "number" else "the most frequent category"
            said.note(
                f"column `{name}`: {_rows(count)} without a value, none in training; there {filled} stands for it"
            )
        if self.ignored:
            said.note(f"columns that the model does not know were ignored: {', '.join(self.ignored)}")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _kept(keep: list[str], columns: tuple[str, ...], data: Path) -> list[str]:
    from dapcal.tables.columns import listed

    for name in keep:
        if name not in columns:
            raise ValueError(f"There is no column `{name}` in {data} to --keep; there are: {listed(columns)}")
    return keep


def _beside(batch: pa.Table, kept: list[str], predicted: pa.Table) -> pa.Table:
    """Copied columns before the predictions; one of the same name as a prediction gets a mark."""
    import pyarrow as pa

    own = {f"input_{name}" if name in predicted.column_names else name: batch[name] for name in kept}
    if len(own) < len(set(kept)):
        raise ValueError("--keep would write two columns of one name (input_…); rename one in the table")
    return pa.table({**own, **dict(zip(predicted.column_names, predicted.columns, strict=True))})


def _expected_rows(path: Path) -> int | None:
    """For the bar: known for Parquet, estimated from the first lines of a text, else unknown."""
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    if suffix in (".csv", ".tsv"):
        with path.open("rb") as file:
            head = file.read(_PEEK)
        return int(path.stat().st_size * head.count(b"\n") / max(len(head), 1)) or None
    return None
