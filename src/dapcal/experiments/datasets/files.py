"""Where a data file is: the folder that DAPCAL_DATA names, else the cache, else a download; and whether it is the one.

Both places have the same layout, `<data set>/<file>`; `SHA256` lists the files. A file is hashed once, and known again
by its size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from functools import cache
from pathlib import Path

from dapcal.experiments.datasets.downloads import download
from dapcal.files import write_text
from dapcal.types import DapcalWarning

SHA256: dict[str, str] = {
    "cifar10/test.parquet": "325ef40c68a989775add82e26695f05c43c557f09dfa54333f85dd90da2be4c3",
    "cifar10/train.parquet": "14f655d33cf09d6fd45c699e605e8da10e921f429da7d5615378a6f0c9417abd",
    "cifar100/test.parquet": "e65e054887897b7fa211820d1f5c0773c36ae017ed961d2a5a5c9ba84172d96b",
    "fashion_mnist/t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "fashion_mnist/t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "fashion_mnist/train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "fashion_mnist/train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "mnist/t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "mnist/t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "mnist/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "mnist/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "omniglot/images_evaluation.zip": "b939ca0d70552ebff8d0f037528f4debd6b6d7ad6fa547cfb5232e014559a316",
    "svhn/test.parquet": "7ba8ea8b40252ca253f8e4a52cdc7e59866d49db807cdd96acd28575d7ca91be",
    "tables/ames.csv": "65a1cbb89c2b58b11674097135dd04e710df5db726bcfe6ec551de38b44e4911",
    "tables/german_credit.csv": "5c9906df163beb8c7d9c497146d3bdf210c4816401f32b488d6c10fcbff0d048",
    "tables/insurance.csv": "505c1cbc2e63d0363bac59501563df2530aadf4cdb9cfee226f4ef32f5468281",
    "tables/penguins.csv": "e07636bd8af74260099ea2f8678e2eabbf35def579940cc76f67061ee16c06c1",
    "tables/titanic.csv": "4a437fde05fe5264e1701a7387ac6fb75393772ba38bb2c9c566405af5af4bd7",
    "tables/wine_white.csv": "66b071bfe464e02aaef19d61fe28ce99b6f75efebb81be0fb58555713c3ab7a6",
    "uci/boston.csv": "def728f3dfad742a04650803561a9cab051fcb03e1b646fe0145d1017e5aeb7f",
    "uci/concrete.csv": "2de88722a4562bfd7581c3a14d41488a5f9dd33b366c68a306b72c078ed8a8d5",
    "uci/energy.csv": "030b6cb43c181576bec42d752da7948251beda5a27d8c14e426440d847e93aed",
    "uci/gap_test_indices.npz": "d67fc6b1fce0b32930559e3207416de11c966cedc816573874210b12298d3347",
    "uci/naval.csv": "1c3133d2ac69953a5ee1805d5ff02708a08deef0e28a28288b059568f20ca3ac",
    "uci/wine.csv": "0b1d1fa8980c722efa971b88513ab4e41c8a03a8ea996817b69e7a74999a715e",
}


def verified(file: str) -> Path:
    """The path of a file of `SHA256`, with the bytes that it should have."""
    path = find(file)
    found = digest(path)
    if found != SHA256[file]:
        raise mismatch(file, path, found)
    return path


def find(file: str) -> Path:
    """The path of a file, its bytes not looked at yet; downloaded where it is in neither place."""
    given = os.environ.get("DAPCAL_DATA")
    cached = cache_folder() / "data" / file
    places = [*([Path(given) / file] if given else []), cached]
    for path in places:
        if path.is_file():
            return path
    try:
        download(file, cached)
    except (ImportError, OSError, RuntimeError) as error:
        place = places[0] if given else "a place that DAPCAL_DATA names (it is not set)"
        raise FileNotFoundError(
            f"{file} is neither at {place} nor at {cached}, and was not downloaded: {error}. Set DAPCAL_DATA to a "
            "folder laid out as docs/data.md describes"
        ) from error
    return cached


def digest(path: Path) -> str:
    """SHA-256 of a file, remembered in the cache folder for as long as its size and time of change stay the same."""
    state, memory = path.stat(), cache_folder() / "digests.json"
    mark = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"
    known = _read(memory)
    if mark in known:
        return known[mark]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_text(memory, json.dumps({**known, mark: found}, indent=1) + "\n")
    except OSError:
        warn_unwritable(cache_folder())
    return found


def mismatch(file: str, path: Path, found: str, *alternative: str) -> ValueError:
    """The error for a file with other contents than the experiments were made with."""
    expected = ", ".join([f"SHA-256 {SHA256[file]}", *alternative])
    return ValueError(
        f"Expected {file} with {expected}, got SHA-256 {found} at {path}: it is damaged or another version; "
        "replace it, or delete it to have it looked for elsewhere"
    )


def cache_folder() -> Path:
    """DAPCAL_CACHE, else dapcal/ in XDG_CACHE_HOME, else ~/.cache/dapcal."""
    own, common = os.environ.get("DAPCAL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(common) if common else Path.home() / ".cache") / "dapcal"


@cache
def warn_unwritable(folder: Path) -> None:
    """Once per folder: a cache that cannot be written costs time, nothing else."""
    warnings.warn(
        f"The cache {folder} cannot be written, so data are hashed and decoded anew every time; set DAPCAL_CACHE to a "
        "folder that can be",
        DapcalWarning,
        stacklevel=2,
    )


def _read(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: files are hashed again
        return {}
    return known if isinstance(known, dict) else {}
