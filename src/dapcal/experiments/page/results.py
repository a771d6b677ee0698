"""The results page and its figures, made from result files and from nothing else but the paper's numbers.

Run: python -m dapcal.experiments.page.results results docs
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dapcal.experiments.checkout import NOT_RECORDED
from dapcal.experiments.page.bar import section as bar_section
from dapcal.experiments.page.cells import DOWN, UP, table
from dapcal.experiments.page.drawings import Drawing, save
from dapcal.experiments.page.files import GapResults, ImageResults, Source, read_gap, read_images
from dapcal.experiments.page.gap import section as gap_section
from dapcal.experiments.page.images import section as image_section
from dapcal.experiments.page.opening import opening
from dapcal.experiments.page.rank_figures import section as rank_section
from dapcal.experiments.page.summary import section as summary_section
from dapcal.experiments.published import IMAGES
from dapcal.experiments.records import DEFAULTS
from dapcal.files import complete_or_absent, write_text

Block = str | Drawing


class Page(NamedTuple):
    """The text, and the figures that it shows."""

    text: str
    drawings: list[Drawing]


def results_page(folder: Path) -> Page:
    """The page for whichever experiments have a file in the folder."""
    gap = read_gap(folder)
    images = [found for name in IMAGES if (found := read_images(folder, name)) is not None]
    blocks: list[Block] = [
        "# Results",
        *opening(images),
        "Every number and figure here is made by `make page` from the files in `results/`; the paper's numbers are in "
        "`src/dapcal/experiments/published.py`. The toy experiments are in the [README](../README.md) and in "
        "[every posterior, before and after](posteriors.md).",
    ]
    if images:
        blocks += ["## All pairs of image sets"]
        blocks += [*bar_section(images), *summary_section(images), *rank_section(images)]
    if gap is not None:
        blocks += gap_section(gap)
    for found in images:
        blocks += image_section(found)
    blocks += _how(gap, images)
    text = "\n\n".join(folded([_shown(block) if isinstance(block, Drawing) else block for block in blocks]))
    return Page(text + "\n", [block for block in blocks if isinstance(block, Drawing)])


def folded(blocks: Iterable[str]) -> Iterator[str]:
    """What follows a heading of the third level, up to the next heading, is shown when its line is opened.

    >>> print(" ".join(folded(["## Data", "### How", "So.", "## End"])))
    ## Data <details markdown="1">
    <summary>How</summary> So. </details> ## End
    """
    is_open = False
    for block in blocks:
        if is_open and block.startswith(("## ", "### ")):
            is_open = False
            yield "</details>"
        if block.startswith("### "):
            is_open = True
            title = html.escape(block.removeprefix("### "), quote=False)
            yield f'<details markdown="1">\n<summary>{title}</summary>'
        else:
            yield block
    if is_open:
        yield "</details>"


def write(results: Path, docs: Path) -> None:
    """`results.md` with its figures; figures that it no longer shows are removed."""
    page = results_page(results)
    docs.mkdir(parents=True, exist_ok=True)
    for drawing in page.drawings:
        with complete_or_absent(docs / _file(drawing)) as part:
            save(drawing, part)
    write_text(docs / "results.md", page.text)
    for path in docs.glob("results-*.png"):
        if path.name not in map(_file, page.drawings):
            path.unlink()


def _how(gap: GapResults | None, images: Sequence[ImageResults]) -> list[str]:
    """What was run, how to run it again, and how to read the numbers."""
    sources = [(found.experiment, source) for found in images for source in found.sources]
    if gap is not None:
        sources.insert(0, ("uci-gap", gap.source))
    commands = "\n".join(f"dapcal reproduce {name}" for name in dict.fromkeys(name for name, _ in sources))
    return [
        "## How this was made",
        "### How to read it",
        _CONVENTIONS,
        "### What was run",
        table(["experiment", "file", "seeds", "commit", "made on"], [_source(*one) for one in sources], words=5),
        *_earlier(sources),
        f"To run it again (for the data see [data.md](data.md); images want a GPU, `--device cuda`):\n\n"
        f"```\nexport DAPCAL_DATA=...\n{commands}\n```",
    ]


def _earlier(sources: Sequence[tuple[str, Source]]) -> list[str]:
    """Which files are to be made again."""
    names = [f"`{source.name}`" for _, source in sources if source.environment.get("defaults") != DEFAULTS]
    if not names:
        return []
    return [
        f"**Made with earlier defaults of `dapcal.calibrate`:** {', '.join(names)}. With defaults 3 the pieces of "
        "evidence weigh by AUROC in the OOD score, with 2 all weigh the same. Before that "
        "(no number) harm is measured against the posterior alone, nothing is scaled in the domain, and an ensemble's "
        "distances see the features of its first member. They stand until they are run again."
    ]


def _source(name: str, source: Source) -> list[str]:
    own = source.environment
    versions = ", ".join(f"{tool} {version}" for tool, version in own.items() if tool not in ("device", "commit"))
    seeds = ", ".join(map(str, source.seeds))
    return [name, f"`{source.name}`", seeds, own.get("commit", NOT_RECORDED), f"{own['device']}; {versions}"]


def _shown(drawing: Drawing) -> str:
    first_sentence = drawing.caption.partition(". ")[0]
    return f"![{first_sentence}]({_file(drawing)})\n\n*{drawing.caption}*"


def _file(drawing: Drawing) -> str:
    return f"results-{drawing.name}.png"


_CONVENTIONS = f"""\
- Numbers are mean ± standard error, over seeds (images; UCI gap where it was run under several) or over splits (UCI
  gap under one seed). A seed draws what is held out, the initial weights, the batches and the posterior draws; a
  single seed of images has no error.
- AUROC, AUCPR and FPR95 are in per cent, OOD images are the positive class, the in-distribution test set is the
  negative one. FPR95 is the share of test images that are flagged where 95 % of the OOD images are.
- Numbers in brackets are the paper's. {UP} (ours is higher) and {DOWN} (ours is lower) mark a difference to the paper
  of more than two percentage points and two of our standard errors (images, for which it gives no errors), or of more
  than two standard errors of both together (UCI gap). Higher is not always better.
- “Paper's” is the paper's estimator as we read it: closed-form importance weights that are not normalised, distances
  between features of the MAP network, φ chosen on misclassified held-out images (UCI gap: on the 30 % of held-out rows
  with the largest error). “Ours” is `dapcal.calibrate` with all defaults.
- In these runs held-out training data chose φ, the temperatures and ODIN's step, the learning rates and epochs of UCI
  gap and the learning rate of VI on images. In a run OOD and test data choose nothing, except in rows that are called
  an oracle.
- Three things were not blind. Our default stops widening a regression's variance at the mean square of the training
  targets around the prediction, and its radius has a smallest unit: both were added after intervals on UCI gap had been
  seen to be far too wide, so our numbers there are not those of an untouched test. “VI, untuned” is there because the
  paper's estimator does with it what it is known for; it was found by going through trained posteriors on three splits
  of naval. DUE's and SNGP's defaults were settled while looking at Fashion-MNIST's test images.
- Training differs from the paper's on images: it names SGD with momentum and a learning rate of 10⁻⁶ (a size that
  suits a log joint summed over the training set) for MNIST and Fashion-MNIST; we use Adam, at the rates named below. On
  CIFAR-10 it trains for 200 epochs, we for fewer. Our MAP, DE and VI are therefore other networks than the paper's, and
  need not agree with them.
- SVHN's test set is cropped anew from the official images of whole numbers; that it equals the published crops bit by
  bit is not proven ([data.md](data.md)).
- Naval has two constant columns, whose splits are arbitrary; it is given with and without them."""


if __name__ == "__main__":
    write(*(Path(argument) for argument in sys.argv[1:]))
