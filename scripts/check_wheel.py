"""The wheel alone, in an empty environment without the checkout: README's lines, doctor, fit, predict, report.

Run: python scripts/check_wheel.py dist/dapcal-….whl [options of pip install]
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(?:^<!-- (?P<marker>[^\n]*?) -->\n+)?^```python\n(?P<code>.*?)^```$", re.M | re.S)


def main(wheel: Path, options: list[str]) -> None:
    lines = readme()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        work = folder / "work"
        work.mkdir()

        def run(*command: str, expected: int = 0) -> str:
            """Run a program of the environment in the empty folder."""
            path = str(folder / "venv" / "bin" / command[0])
            env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            done = subprocess.run([path, *command[1:]], cwd=work, env=env, capture_output=True, text=True)
            said = done.stdout + done.stderr
            if done.returncode != expected or "Traceback" in said:
                raise SystemExit(f"{' '.join(command)[:200]}: exit code {done.returncode}, expected {expected}\n{said}")
            print(f"ok: {' '.join(command)[:100].splitlines()[0]}", flush=True)
            return said

        def install(what: str) -> None:
            run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options, what)

        install(str(wheel))
        run("python", "-W", "ignore", "-c", lines)
        where = run("python", "-c", "import dapcal; print(dapcal.__file__, dapcal.__version__)")
        if str(folder) not in where or wheel.name.split("-")[1] not in where:
            raise SystemExit(f"Expected dapcal of {wheel.name}, got {where}")
        if "dapcal[all]" not in run("dapcal", "doctor", expected=1):  # one sentence: the command line is an extra
            raise SystemExit("Expected `dapcal` without its extra to say how to install it")
        install(f"{wheel}[cli]")
        write_table(work / "train.csv")
        run("dapcal", "doctor")
        run("dapcal", "fit", "train.csv", "--target", "price", "--epochs", "10", "-o", "house.dap")
        run("dapcal", "predict", "house.dap", "train.csv", "-o", "out.csv")
        run("dapcal", "report", "house.dap", "--data", "train.csv", "-o", "report.html")
        rows = (work / "out.csv").read_text().splitlines()
        if len(rows) != len((work / "train.csv").read_text().splitlines()):
            raise SystemExit(f"Expected a prediction for every row, got {len(rows) - 1}")
    print(f"{wheel.name} works on its own")


def readme() -> str:
    """The README's blocks of Python that need nothing else."""
    found = list(BLOCK.finditer(README.read_text(encoding="utf-8")))
    marked = [block["marker"] or "" for block in found]
    return "\n".join(
        block["code"]
        for block, marker in zip(found, marked, strict=True)
        if not marker.startswith(("not run", "needs"))
    )


def write_table(path: Path) -> None:
    draws = random.Random(0)
    lines = ["area,city,price"]
    for _ in range(200):
        area, city = draws.uniform(40, 160), draws.choice(["Rome", "Oslo"])
        lines.append(f"{area:.1f},{city},{2 * area + 40 * (city == 'Rome') + draws.gauss(0, 5):.1f}")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
