"""Artefacts taken apart and put together again, with a checksum that is right whatever is in them."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from dapcal import container


def header_and_data(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def opened(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads(header_and_data(content)[0]["__metadata__"]["dapcal"]), load_bytes(content)


def sealed(description: Any, tensors: dict[str, Tensor]) -> bytes:
    text = description if isinstance(description, str) else json.dumps(description)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if '"version": 1' in text:
        return save_bytes(tensors, {"dapcal": text, "sha256": container.digest(text, tensors).hex()})
    file = io.BytesIO()
    container.write(file, text, tensors)
    return file.getvalue()
