"""Artefacts signed by a private key, and verified by its public one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from typer.testing import CliRunner

import artefact_bytes
import dapcal
from dapcal import models
from dapcal.cli import app
from previous_cases import FOLDER, smooth

NONE = serialization.NoEncryption()


def written(folder: Path, name: str, key: object) -> tuple[Path, Path]:
    """PEM files of a private key and its public one."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, NONE))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def keys(tmp_path):
    return written(tmp_path, "mine", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture
def other(tmp_path):
    return written(tmp_path, "other", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture
def calibrated():
    return dapcal.load(FOLDER / "ensemble.dap", smooth())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.dap"


def test_a_signed_file_is_verified_by_the_public_key(calibrated, keys, path):
    private, public = keys
    calibrated.save(path, sign=private)
    assert dapcal.load(path, smooth(), key=public).phi == calibrated.phi
    loaded = serialization.load_pem_private_key(private.read_bytes(), None)
    calibrated.save(path, sign=loaded)
    assert dapcal.load(path, smooth(), key=loaded.public_key()).phi == calibrated.phi


def test_another_key_or_no_signature_is_refused(calibrated, keys, other, path):
    calibrated.save(path, sign=keys[0])
    with pytest.raises(ValueError, match=r"model\.dap was not signed by the key .*other\.pub"):
        dapcal.load(path, smooth(), key=other[1])
    calibrated.save(path)
    with pytest.raises(ValueError, match=r"model\.dap is not signed"):
        dapcal.load(path, smooth(), key=keys[1])
    with pytest.raises(ValueError, match=r"ensemble\.dap is not signed"):
        dapcal.load(FOLDER / "ensemble.dap", smooth(), key=keys[1])


def test_what_was_changed_after_signing_is_refused_also_with_a_new_checksum(calibrated, keys, path):
    calibrated.save(path, sign=keys[0])
    description, tensors = artefact_bytes.opened(path.read_bytes())
    signature = artefact_bytes.header_and_data(path.read_bytes())[0]["__metadata__"]["signature"]
    description["tree"]["fields"]["phi"] = {"float": (3.0).hex()}
    forged = artefact_bytes.header_and_data(artefact_bytes.sealed(description, tensors))
    for words in (signature, "", "zz", signature[:-2], "00" * 64):
        forged[0]["__metadata__"]["signature"] = words
        path.write_bytes(artefact_bytes.with_header(*forged))
        with pytest.raises(ValueError, match="was not signed by the key"):
            dapcal.load(path, smooth(), key=keys[1])


def test_without_a_key_a_signed_file_loads_with_a_note(calibrated, keys, path):
    calibrated.save(path, sign=keys[0])
    with pytest.warns(dapcal.DapcalWarning, match=r"model\.dap is signed.*key="):
        assert dapcal.load(path, smooth()).phi == calibrated.phi
    with warnings.catch_warnings(action="error"):
        dapcal.load(path, smooth(), key=keys[1])


def test_keys_of_another_kind_are_refused_before_anything_is_written(calibrated, keys, tmp_path, path):
    _, wrong = written(tmp_path, "wrong", x25519.X25519PrivateKey.generate())
    locked = tmp_path / "locked.pem"
    private = serialization.load_pem_private_key(keys[0].read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    (tmp_path / "text").write_text("hello")
    for key, words in (
        (keys[1], "private Ed25519 key"),
        (tmp_path / "text", "private Ed25519 key"),
        (locked, "password"),
        (tmp_path / "wrong.pem", "private Ed25519 key"),
    ):
        with pytest.raises(ValueError, match=rf"{key.name}.*{words}"):
            calibrated.save(path, sign=key)
    with pytest.raises(FileNotFoundError, match=r"no file .*missing"):
        calibrated.save(path, sign=tmp_path / "missing")
    assert not path.exists()
    calibrated.save(path, sign=keys[0])
    for key in (keys[0], wrong, tmp_path / "text"):
        with pytest.raises(ValueError, match=rf"{key.name}.*public Ed25519 key"):
            dapcal.load(path, smooth(), key=key)


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_commands_sign_and_verify(keys, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    private, public = keys
    models.load(FOLDER / "table-regression.dap").save("old.dap")
    rows = "\n".join(f"{i},{'Rome' if i % 3 else 'Oslo'},{3 * i % 17}" for i in range(60))
    Path("train.csv").write_text(f"area,city,target\n{rows}\n")
    quick = ["--fast", "--epochs", 1, "--hidden", 4]
    fitted = run("fit", "train.csv", "--target", "target", "-o", "m.dap", "--sign", private, *quick)
    assert fitted.exit_code == 0, fitted.output
    good = run("predict", "m.dap", "train.csv", "-o", "out.csv", "--key", public, "--json")
    assert good.exit_code == 0, good.output
    assert not [note for note in json.loads(good.stdout)["notes"] if "signed" in note]
    noted = run("predict", "m.dap", "train.csv", "-o", "out.csv", "--json")
    assert any("is signed" in note for note in json.loads(noted.stdout)["notes"])
    before = Path("out.csv").read_bytes()
    for command in (["predict", "-o", "out.csv"], ["report", "-o", "r.html", "--data"], ["explain"]):
        refused = run(command[0], "m.dap", *command[1:], "train.csv", "--key", other[1])
        assert refused.exit_code == 2, refused.output
        assert "was not signed by the key" in refused.output
    refused = run("serve", "old.dap", "--key", public)
    assert refused.exit_code == 2
    assert "is not signed" in refused.output
    assert Path("out.csv").read_bytes() == before
    assert not Path("r.html").exists()
    wrong = run("fit", "train.csv", "--target", "target", "-o", "n.dap", "--sign", public)
    assert wrong.exit_code == 2
    assert "private Ed25519 key" in wrong.output
    assert not Path("n.dap").exists()
