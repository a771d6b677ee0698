"""Ed25519 signatures of artefacts: who holds the private key signs, who has the public one knows that it was they.

Keys are PEM files, as openssl makes them:

    openssl genpkey -algorithm ed25519 -out signing.pem
    openssl pkey -in signing.pem -pubout -out signing.pub
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MESSAGE = b"dapcal artefact "  # so that no signature of something else is one of an artefact
_MOST_BYTES = 100_000  # of a file with a key


def signer(key: str | Path | Ed25519PrivateKey) -> Callable[[bytes], str]:
    """What makes the signature of a checksum, from a private key or its file."""
    serialization, kinds = _cryptography()
    load = partial(serialization.load_pem_private_key, password=None)
    private = _read(key, "private", kinds.Ed25519PrivateKey, load) if isinstance(key, str | Path) else key
    if not isinstance(private, kinds.Ed25519PrivateKey):
        raise TypeError(f"Expected a private Ed25519 key or its file, got {type(key).__name__}")
    return lambda seal: private.sign(_MESSAGE + seal).hex()


def verifier(key: str | Path | Ed25519PublicKey) -> Callable[[bytes, str], bool]:
    """What tells whether a signature is this key's, from a public key or its file."""
    serialization, kinds = _cryptography()
    load = serialization.load_pem_public_key
    public = _read(key, "public", kinds.Ed25519PublicKey, load) if isinstance(key, str | Path) else key
    if not isinstance(public, kinds.Ed25519PublicKey):
        raise TypeError(f"Expected a public Ed25519 key or its file, got {type(key).__name__}")
    from cryptography.exceptions import InvalidSignature

    def is_signed(seal: bytes, signature: str) -> bool:
        try:
            public.verify(bytes.fromhex(signature), _MESSAGE + seal)
        except (InvalidSignature, ValueError):
            return False
        return True

    return is_signed


def _read(path: str | Path, which: str, kind: type, load: Callable[[bytes], Any]) -> Any:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}; give the {which} key as a PEM file")
    with path.open("rb") as file:
        pem = file.read(_MOST_BYTES)
    try:
        found = load(pem)
    except TypeError as error:  # so cryptography says that a password is missing
        raise ValueError(f"{path} is locked by a password, which dapcal does not ask for; use another") from error
    except Exception as error:  # ValueError as a rule; others for algorithms that it does not know
        raise ValueError(f"Expected {path} to hold a {which} Ed25519 key as PEM; see openssl genpkey") from error
    if not isinstance(found, kind):
        raise ValueError(f"Expected {path} to hold a {which} Ed25519 key as PEM, it holds another kind")
    return found


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ImportError("Signatures need cryptography; install it with: pip install 'dapcal[sign]'") from error
    return serialization, ed25519
