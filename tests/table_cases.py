"""A table of houses, and the command line as people call it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from click.testing import Result
from typer.testing import CliRunner

from dapcal.cli import app

SMALL = ["--epochs", "4", "--hidden", "8"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result, *words: str, code: int = 2) -> None:
    """One line that says what is wrong, an exit code, and no traceback."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), "an error that nobody caught"
    lines = [line for line in result.stderr.splitlines() if line.strip() and "━" not in line and "note:" not in line]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in lines[0], lines[0]


def write_rows(path: Path, n: int = 160, seed: int = 0, target: bool = True) -> Path:
    random = np.random.default_rng(seed)
    area, rooms = random.normal(80, 20, n), random.integers(1, 6, n)
    city = random.choice(["Rome", "Oslo"], n)
    price = 3 * area + 10 * rooms + 40 * (city == "Rome") + random.normal(0, 5, n)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "area", "rooms", "city", *(["price"] if target else [])])
        for i in range(n):
            row = [f"h{i}", f"{area[i]:.3f}", rooms[i] if i % 11 else "", city[i]]
            writer.writerow([*row, *([f"{price[i]:.2f}"] if target else [])])
    return path


def write_houses(folder: Path) -> Path:
    """train.csv, new.csv, and house.dap as `dapcal fit` writes it."""
    write_rows(folder / "train.csv", 220)
    write_rows(folder / "new.csv", 30, seed=1, target=False)
    result = run("fit", folder / "train.csv", "--target", "price", "-o", folder / "house.dap", *SMALL)
    assert result.exit_code == 0, result.output
    return folder
