"""A file of one JSON header and some integer arrays, checked before anything in it is believed.

    magic, 16 bytes | sha256 of the rest, 32 bytes | zlib( header size, 8 bytes | header | arrays )

No pickle, no code, no zip. A file whose digest does not match is never parsed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.errors import FileError

MAGIC = b"EVENSTEP PLAN 1\n"
_DIGEST = 32


def encode(header: Mapping[str, Any], arrays: Mapping[str, IntArray]) -> bytes:
    """Header and arrays as canonical bytes: equal contents give equal bytes."""
    shapes = {name: len(array) for name, array in arrays.items()}
    text = json.dumps({"header": header, "arrays": shapes}, sort_keys=True).encode()
    body = b"".join(np.ascontiguousarray(arrays[name], "<i8").tobytes() for name in sorted(shapes))
    return len(text).to_bytes(8, "little") + text + body


def decode(payload: bytes) -> tuple[dict[str, Any], dict[str, IntArray]]:
    """The inverse of `encode`."""
    size = int.from_bytes(payload[:8], "little")
    data = json.loads(payload[8 : 8 + size])
    arrays: dict[str, IntArray] = {}
    at = 8 + size
    for name in sorted(data["arrays"]):
        count = data["arrays"][name]
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} has {count} entries")
        arrays[name] = np.frombuffer(payload, "<i8", count, at).astype(np.int64)
        at += 8 * count
    if at != len(payload):
        raise ValueError(f"{len(payload) - at} bytes are left over")
    return data["header"], arrays


def write(path: str | os.PathLike[str], payload: bytes) -> None:
    """Write the file whole or not at all."""
    body = zlib.compress(payload, 3)
    replace_file(path, MAGIC + hashlib.sha256(body).digest() + body)


def read(path: str | os.PathLike[str]) -> bytes:
    """The payload of a file, after its digest was checked."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}), so there is no plan. "
            f"Check the path."
        ) from None
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data[: len(MAGIC)]):
            raise FileError(f"{path} is cut short, so its plan is lost. Save the plan again.")
        raise FileError(
            f"{path} is not an Evenstep plan of version 1, so it cannot be read. "
            f"Make one with `evenstep plan ... --out FILE`."
        )
    start = len(MAGIC) + _DIGEST
    digest, body = data[len(MAGIC) : start], data[start:]
    if hashlib.sha256(body).digest() != digest:
        raise FileError(
            f"{path} is damaged or cut short (its digest does not match), so nothing in it can "
            f"be trusted. Save the plan again."
        )
    try:
        return zlib.decompress(body)
    except zlib.error as error:
        raise FileError(
            f"{path} holds no plan ({error}), so there is nothing to read. Save the plan again."
        ) from None


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Put `data` at `path` in one move, so that nobody ever sees half of it."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(
            f"{path} cannot be written ({error.strerror or error}), so nothing was saved. "
            f"Choose a folder that exists and is writable."
        ) from None
