"""Data files: found, verified, decoded, kept; on small files made here, and on real ones where DAPCAL_DATA is set."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import warnings
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from dapcal.experiments import datasets
from dapcal.experiments.datasets import decoded, files, images
from dapcal.types import DapcalWarning
from data_cases import Places, encoded, idx, parquet_file

REAL = os.environ.get("DAPCAL_DATA")
real = pytest.mark.skipif(REAL is None, reason="wants real data: set DAPCAL_DATA to a folder as in docs/data.md")


@pytest.fixture
def places(tmp_path, monkeypatch):
    return Places(tmp_path, monkeypatch)


@pytest.fixture
def digits():
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (7, 28, 28), np.uint8), draw.integers(0, 10, 7, np.uint8)


@pytest.fixture
def photographs():
    return np.random.default_rng(1).integers(0, 256, (9, 32, 32, 3), np.uint8), list(range(9))


def refuse(*_):
    raise AssertionError("the source was read")


# --- decoding


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("test", "t10k")])
def test_idx_files_are_decoded(places, digits, split, part):
    places.put_mnist(*digits, part)
    found = datasets.mnist(split)
    assert (found.x.dtype, found.y.dtype) == (torch.uint8, torch.int64)
    np.testing.assert_array_equal(found.x, digits[0][:, None])
    np.testing.assert_array_equal(found.y, digits[1])


@pytest.mark.parametrize(
    ("name", "split", "label"),
    [
        ("cifar10", "train", "label"),
        ("cifar10", "test", "label"),
        ("cifar100", "test", "fine_label"),
        ("svhn", "test", "label"),
    ],
)
def test_parquet_files_are_decoded(places, photographs, name, split, label):
    pictures, labels = photographs
    places.put(f"{name}/{split}.parquet", parquet_file(pictures, labels, label))
    found = datasets.DATASETS[name](split)
    assert (found.x.dtype, found.y.dtype) == (torch.uint8, torch.int64)
    np.testing.assert_array_equal(found.x, pictures.transpose(0, 3, 1, 2))
    assert found.y.tolist() == labels


def test_characters_are_labelled_by_their_sorted_folders(places):
    inked = np.zeros((105, 105), bool)
    inked[3] = True
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("images_evaluation/", "")
        for folder in ("Tengwar/character01", "Angelic/character02", "Angelic/character01"):
            for drawer in ("02", "01"):
                picture = ~inked if drawer == "01" else inked
                archive.writestr(f"images_evaluation/{folder}/0965_{drawer}.png", encoded(picture, "png"))
    places.put("omniglot/images_evaluation.zip", raw.getvalue())
    found = datasets.omniglot("evaluation")
    assert found.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.x.shape == (6, 1, 105, 105)
    np.testing.assert_array_equal(found.x[0, 0], np.where(inked, 0, 255))
    np.testing.assert_array_equal(found.x[1, 0], np.where(inked, 255, 0))


def test_tables_have_their_target_last_and_one_split_per_feature(places):
    places.put("uci/boston.csv", b"CRIM,ZN,MEDV\n0.25,18.0,24.0\n1e-3,0,21.5\n7,8,9\n")
    raw = io.BytesIO()
    np.savez(raw, boston_0=np.array([2, 0], np.int32), boston_1=np.array([1], np.int32), wine_0=np.array([5]))
    places.put("uci/gap_test_indices.npz", raw.getvalue())
    found = datasets.uci("boston")
    assert (found.columns, found.target) == (("CRIM", "ZN"), "MEDV")
    assert found.x.dtype == found.y.dtype == torch.float64
    assert found.x.tolist() == [[0.25, 18], [0.001, 0], [7, 8]]
    assert found.y.tolist() == [24, 21.5, 9]
    assert [rows.tolist() for rows in found.splits] == [[2, 0], [1]]
    assert found.y[found.splits[0]].tolist() == [9, 24]


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("mnist", "evaluation", "'train' or 'test', got 'evaluation'"),
        ("fashion_mnist", "t10k", "'train' or 'test'"),
        ("cifar10", "extra", "'train' or 'test'"),
        ("cifar100", "train", "of cifar100 as 'test', got 'train'"),
        ("svhn", "train", "of svhn as 'test'"),
        ("omniglot", "test", "of omniglot as 'evaluation'"),
    ],
)
def test_an_unknown_split_is_refused(places, name, split, message):
    with pytest.raises(ValueError, match=message):
        datasets.DATASETS[name](split)


def test_an_unknown_table_is_refused(places):
    with pytest.raises(ValueError, match="one of boston, concrete, energy, naval, wine, got 'yacht'"):
        datasets.uci("yacht")


def test_a_file_that_is_no_idx_file_is_refused(places, digits):
    places.put_mnist(*digits)
    places.put("mnist/t10k-images-idx3-ubyte.gz", gzip.compress(b"\0\0\x0d\x03" + bytes(16)))
    with pytest.raises(ValueError, match=r"Expected an IDX file of bytes at .*t10k-images"):
        datasets.mnist("test")


# --- finding and verifying


def test_the_data_folder_comes_before_the_cache(places, digits):
    x, y = digits
    places.put_mnist(x, y)
    places.put("mnist/t10k-labels-idx1-ubyte.gz", idx(y[::-1]), under=places.cache / "data")
    places.put("mnist/t10k-labels-idx1-ubyte.gz", idx(y))
    assert datasets.mnist("test").y.tolist() == y.tolist()


@pytest.mark.parametrize("given", [True, False])
def test_a_file_is_also_found_in_the_cache(places, given, monkeypatch):
    if not given:
        monkeypatch.delenv("DAPCAL_DATA")
    path = places.put("uci/wine.csv", b"a,b\n1,2\n", under=places.cache / "data")
    assert files.verified("uci/wine.csv") == path


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("DAPCAL_CACHE", "own")
    monkeypatch.setenv("XDG_CACHE_HOME", "common")
    monkeypatch.setenv("HOME", "home")
    assert files.cache_folder() == Path("own")
    monkeypatch.delenv("DAPCAL_CACHE")
    assert files.cache_folder() == Path("common/dapcal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_folder() == Path("home/.cache/dapcal")


def test_a_file_with_another_checksum_is_refused(places, digits, photographs):
    expected = files.SHA256["uci/wine.csv"], files.SHA256["cifar10/test.parquet"]
    places.put_mnist(*digits)[1].write_bytes(idx(digits[1][::-1]))
    with pytest.raises(ValueError, match=r"mnist/t10k-labels.* with SHA-256 .*damaged or another version; replace it"):
        datasets.mnist("test")
    wine = places.data / "uci/wine.csv"
    wine.parent.mkdir()
    wine.write_bytes(b"a,b\n1,2\n")
    with pytest.raises(
        ValueError, match=rf"Expected uci/wine.csv with SHA-256 {expected[0]}, got SHA-256 .* at {wine}"
    ):
        datasets.uci("wine")
    other = places.data / "cifar10/test.parquet"
    other.parent.mkdir()
    other.write_bytes(parquet_file(*photographs, "label"))
    with pytest.raises(ValueError, match=rf"SHA-256 {expected[1]}, or the same pixels and labels, got .* at {other}"):
        datasets.cifar10("test")
    assert not (places.cache / "decoded").exists()


def test_the_same_pixels_in_another_wrapping_are_accepted(places, photographs, monkeypatch):
    places.put("cifar10/test.parquet", parquet_file(*photographs, "label", "webp"))
    expected = datasets.cifar10("test")
    same = decoded.Arrays(expected.x.numpy(), expected.y.numpy()).checksum()
    monkeypatch.setitem(decoded.CONTENTS, "cifar10-test", same)
    (places.data / "cifar10/test.parquet").write_bytes(parquet_file(*photographs, "label", "png"))
    found = datasets.cifar10("test")
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y, expected.y)
    assert len(list((places.cache / "decoded").glob("*-x.npy"))) == 2  # another source, decoded anew
    pictures, labels = photographs
    for changed in ((pictures, labels[::-1]), (pictures[::-1], labels), (pictures // 2, labels)):
        (places.data / "cifar10/test.parquet").write_bytes(parquet_file(*changed, "label", "png"))
        with pytest.raises(ValueError, match="or the same pixels and labels"):
            datasets.cifar10("test")


@pytest.mark.parametrize("damage", [lambda raw: raw[:200], lambda raw: raw[:500] + bytes(2000) + raw[2500:]])
@pytest.mark.parametrize("kind", ["parquet", "zip"])
def test_a_damaged_file_is_refused_like_any_other(places, photographs, kind, damage):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("images_evaluation/Angelic/character01/0965_01.png", encoded(photographs[0][0], "png"))
    file, whole = {
        "parquet": ("svhn/test.parquet", parquet_file(*photographs, "label")),
        "zip": ("omniglot/images_evaluation.zip", raw.getvalue()),
    }[kind]
    places.put(file, whole).write_bytes(damage(whole))
    with pytest.raises(ValueError, match=f"Expected {file} with SHA-256 {files.SHA256[file]}, or the same pixels"):
        datasets.DATASETS[file.split("/")[0]]({"parquet": "test", "zip": "evaluation"}[kind])


def test_a_file_is_hashed_once_and_again_when_it_changes(places, monkeypatch):
    path = places.put("uci/wine.csv", b"a,b\n1,2\n")
    assert files.verified("uci/wine.csv") == path
    count = []
    hashing = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: count.append(1) or hashing(*args))
    files.verified("uci/wine.csv")
    assert count == []
    path.write_bytes(b"a,b\n1,3\n")
    os.utime(path, ns=(0, 1))
    with pytest.raises(ValueError, match=r"uci/wine.csv"):
        files.verified("uci/wine.csv")
    assert count == [1]


@pytest.mark.parametrize("memory", ["{ half of", "[]"])
def test_a_damaged_memory_of_checksums_only_costs_time(places, memory):
    path = places.put("uci/wine.csv", b"a,b\n1,2\n")
    places.cache.mkdir()
    (places.cache / "digests.json").write_text(memory)
    assert files.verified("uci/wine.csv") == path


# --- the cache of decoded images


def test_images_are_decoded_once(places, digits, monkeypatch):
    places.put_mnist(*digits)
    first = datasets.mnist("test")
    monkeypatch.setattr(images, "_from_idx", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    second = datasets.mnist("test")
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.y, second.y)
    assert second.x.dtype == torch.uint8
    second.x.zero_()  # its own copy
    assert torch.equal(datasets.mnist("test").x, first.x)


def test_a_changed_source_is_decoded_anew(places, digits):
    x, y = digits
    places.put_mnist(x, y)
    datasets.mnist("test")
    places.put_mnist(255 - x, y)
    np.testing.assert_array_equal(datasets.mnist("test").x, 255 - x[:, None])


@pytest.mark.parametrize("size", [0, 50, 300])
def test_a_damaged_decoded_file_is_made_again(places, digits, size):
    places.put_mnist(*digits)
    datasets.mnist("test")
    [kept] = (places.cache / "decoded").glob("*-x.npy")
    kept.write_bytes(kept.read_bytes()[:size])
    np.testing.assert_array_equal(datasets.mnist("test").x, digits[0][:, None])
    assert len(np.load(kept)) == 7


def test_a_cache_that_cannot_be_written_costs_time_and_one_warning(places, digits):
    places.put_mnist(*digits)
    places.cache.write_text("a file where the folder should be")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            np.testing.assert_array_equal(datasets.mnist("test").x, digits[0][:, None])
    assert [w.category for w in caught] == [DapcalWarning]
    assert "set DAPCAL_CACHE to a folder that can be" in str(caught[0].message)


@pytest.mark.parametrize(
    ("module", "message"),
    [("pyarrow.parquet", "Parquet files need pyarrow"), ("PIL", "Images need pillow")],
)
def test_a_missing_extra_is_named(places, photographs, monkeypatch, module, message):
    places.put("cifar10/test.parquet", parquet_file(*photographs, "label"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message + r".* pip install 'dapcal\[experiments\]'"):
        datasets.cifar10("test")


# --- downloads


class Fake:
    """A data set of torchvision's: files that it leaves in its folder, pairs that it yields."""

    def __init__(self, left: dict[str, bytes] | None = None, pairs: tuple = ()) -> None:
        self.left, self.pairs, self.calls = left or {}, pairs, []

    def __call__(self, root, download, **options):
        assert download
        self.calls.append(options)
        for name, raw in self.left.items():
            path = Path(root) / "Any" / "raw" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        return self.pairs


def install(monkeypatch, **kinds):
    module = ModuleType("torchvision")
    module.datasets = ModuleType("torchvision.datasets")
    for kind, value in kinds.items():
        setattr(module.datasets, kind, value)
    monkeypatch.setitem(sys.modules, "torchvision", module)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module.datasets)


def test_a_missing_file_says_where_it_was_looked_for_and_how_to_get_it(places, monkeypatch):
    file = "mnist/train-images-idx3-ubyte.gz"
    with pytest.raises(FileNotFoundError) as caught:
        datasets.mnist("train")
    for part in (file, places.data / file, places.cache / "data" / file, "pip install torchvision", "Set DAPCAL_DATA"):
        assert str(part) in str(caught.value)
    monkeypatch.delenv("DAPCAL_DATA")
    with pytest.raises(FileNotFoundError, match=r"it is not set.*docs/data.md"):
        datasets.mnist("train")
    with pytest.raises(FileNotFoundError, match=r"uci/wine.csv is neither .* no package downloads this file"):
        datasets.uci("wine")


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("test", "t10k")])
def test_digits_are_downloaded_once_into_the_cache(places, digits, monkeypatch, split, part):
    raw = {f"{part}-images-idx3-ubyte.gz": idx(digits[0]), f"{part}-labels-idx1-ubyte.gz": idx(digits[1])}
    for name, content in raw.items():
        monkeypatch.setitem(files.SHA256, f"fashion_mnist/{name}", hashlib.sha256(content).hexdigest())
    fake = Fake(raw)
    install(monkeypatch, FashionMNIST=fake)
    np.testing.assert_array_equal(datasets.fashion_mnist(split).x, digits[0][:, None])
    assert {p.name for p in (places.cache / "data/fashion_mnist").iterdir()} == set(raw)
    assert fake.calls == [{"train": split == "train"}] * 2
    datasets.fashion_mnist(split)
    assert len(fake.calls) == 2


@pytest.mark.parametrize(
    ("name", "split", "kind", "options"),
    [
        ("cifar10", "train", "CIFAR10", {"train": True}),
        ("cifar100", "test", "CIFAR100", {"train": False}),
        ("svhn", "test", "SVHN", {"split": "test"}),
    ],
)
def test_photographs_are_downloaded_and_compared_by_their_pixels(
    places, photographs, monkeypatch, name, split, kind, options
):
    pictures, labels = photographs
    fake = Fake(pairs=tuple(zip(map(Image.fromarray, pictures), labels, strict=True)))
    install(monkeypatch, **{kind: fake})
    with pytest.raises(ValueError, match=f"Expected {name}/{split}.parquet .*or the same pixels and labels"):
        datasets.DATASETS[name](split)
    arrays = decoded.Arrays(pictures.transpose(0, 3, 1, 2), np.array(labels))
    monkeypatch.setitem(decoded.CONTENTS, f"{name}-{split}", arrays.checksum())
    found = datasets.DATASETS[name](split)
    np.testing.assert_array_equal(found.x, arrays.x)
    assert found.y.tolist() == labels
    assert fake.calls == [options]


def test_a_download_that_fails_says_why_and_leaves_nothing(places, monkeypatch):
    def offline(*_, **__):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    install(monkeypatch, MNIST=offline, Omniglot=Fake())
    with pytest.raises(FileNotFoundError, match=r"was not downloaded: Error downloading train-images.*Set DAPCAL_DATA"):
        datasets.mnist("train")
    with pytest.raises(FileNotFoundError, match=r"was not downloaded: .*images_evaluation.zip"):
        datasets.omniglot("evaluation")
    assert [p for p in places.cache.rglob("*") if p.is_file()] == []


def test_a_downloaded_file_is_verified(places, digits, monkeypatch):
    install(monkeypatch, MNIST=Fake({f"t10k-{p}-ubyte.gz": idx(digits[1]) for p in ("images-idx3", "labels-idx1")}))
    with pytest.raises(ValueError, match=r"Expected mnist/t10k-images-idx3-ubyte.gz with SHA-256 8d422c7b"):
        datasets.mnist("test")


# --- inputs of a network


def test_floats_are_between_zero_and_one():
    x = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    found = datasets.as_floats(datasets.Images(x, torch.zeros(1, dtype=torch.long)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.flatten(), torch.arange(256) / 255)


def test_grey_is_that_of_pillow(photographs):
    pictures = photographs[0][:, :28, :28]
    found = datasets.like_mnist(torch.from_numpy(pictures.transpose(0, 3, 1, 2).copy()))
    expected = np.stack([np.asarray(Image.fromarray(p).convert("L")) for p in pictures])
    np.testing.assert_array_equal((255 * found[:, 0]).round().to(torch.uint8), expected)


@pytest.mark.parametrize("size", [105, 32, 14])
def test_resizing_is_that_of_pillow(size):
    picture = np.random.default_rng(0).integers(0, 256, (size, size), np.uint8)
    expected = np.asarray(Image.fromarray(picture.astype(np.float32)).resize((28, 28), Image.Resampling.BILINEAR)) / 255
    found = datasets.like_mnist(torch.from_numpy(picture)[None, None])
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[0, 0], expected, atol=1e-5)


def test_images_are_resized_in_parts_and_inverted(monkeypatch):
    x = torch.randint(256, (10, 3, 32, 32), dtype=torch.uint8)
    whole = datasets.like_mnist(x)
    monkeypatch.setattr(images, "_RESIZED_AT_ONCE", 3)
    assert torch.equal(datasets.like_mnist(x), whole)
    torch.testing.assert_close(datasets.like_mnist(x, invert=True), 1 - whole)
    assert whole.shape == (10, 1, 28, 28)


@pytest.mark.parametrize("x", [torch.rand(2, 1, 28, 28), torch.zeros(2, 28, 28, dtype=torch.uint8)])
def test_other_images_are_refused(x):
    for change in (datasets.as_floats, datasets.like_mnist):
        with pytest.raises(ValueError, match=r"uint8 \(N, 1 or 3, H, W\), got .*; pass them as loaded"):
            change(x)


# --- the real data


@real
@pytest.mark.parametrize(
    ("name", "split", "shape", "first", "counts"),
    [
        ("mnist", "train", (60_000, 1, 28, 28), [5, 0, 4, 1], (5421, 6742)),
        ("mnist", "test", (10_000, 1, 28, 28), [7, 2, 1, 0], (892, 1135)),
        ("fashion_mnist", "train", (60_000, 1, 28, 28), [9, 0, 0, 3], (6000, 6000)),
        ("fashion_mnist", "test", (10_000, 1, 28, 28), [9, 2, 1, 1], (1000, 1000)),
        ("cifar10", "test", (10_000, 3, 32, 32), [3, 8, 8, 0], (1000, 1000)),
        ("cifar100", "test", (10_000, 3, 32, 32), [49, 33, 72, 51], (100, 100)),
        ("svhn", "test", (26_032, 3, 32, 32), [5, 2, 1, 0], (1595, 5099)),
        ("omniglot", "evaluation", (13_180, 1, 105, 105), [0, 0, 0, 0], (20, 20)),
    ],
)
def test_real_images(name, split, shape, first, counts):
    x, y = datasets.DATASETS[name](split)
    assert (tuple(x.shape), x.dtype, y.dtype) == (shape, torch.uint8, torch.int64)
    assert y[:4].tolist() == first
    balance = y.bincount()
    assert len(balance) == {"cifar100": 100, "omniglot": 659}.get(name, 10)
    assert (int(balance.min()), int(balance.max())) == counts
    assert (int(x.min()), int(x.max())) == (0, 255)
    if name in ("svhn", "omniglot"):
        grey = datasets.like_mnist(x[:2000], invert=name == "omniglot")
        assert grey.shape == (2000, 1, 28, 28)
        assert 0 <= grey.min() < grey.max() <= 1
        assert name != "omniglot" or grey.mean() < 0.2  # little ink, and it is bright


@real
@pytest.mark.parametrize(
    ("name", "rows", "features", "constant"),
    [
        ("boston", 506, 13, []),
        ("concrete", 1030, 8, []),
        ("energy", 768, 8, []),
        ("naval", 11_934, 16, [8, 11]),
        ("wine", 1599, 11, []),
    ],
)
def test_real_tables_and_their_gaps(name, rows, features, constant):
    table = datasets.uci(name)
    assert table.x.shape == (rows, features)
    assert table.y.shape == (rows,)
    assert table.x.isfinite().all()
    assert len(table.columns) == len(table.splits) == features
    assert [k for k in range(features) if table.x[:, k].min() == table.x[:, k].max()] == constant
    for k, test in enumerate(table.splits):
        assert len(test.unique()) == len(test) == pytest.approx(rows / 3, abs=2)
        if k in constant:
            continue
        ordered, gap = table.x[:, k].sort().values, table.x[test, k]
        third = (rows - len(test)) // 2
        # the sorted values of the test rows are those of the middle third: ties leave open which rows, not which values
        near = [ordered[start : start + len(test)] for start in range(third, third + 2)]
        assert any(torch.equal(gap.sort().values, middle) for middle in near)
