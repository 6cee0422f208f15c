"""The file format of plans: a JSON header and integer arrays, with a digest.

    magic, 16 bytes | sha256 of the rest, 32 bytes | zlib( header size, 8 bytes | header | arrays )

No pickle, no code, no zip. A file whose digest does not match is never parsed, and a file is never
expanded beyond the sizes that its header declares.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.errors import FileError

PathLike: TypeAlias = str | os.PathLike[str]

MAGIC = b"EVENSTEP PLAN 2\n"
_DIGEST = 32
_LEVEL = 3
_MOST_HEADER = 2**26
# At this level zlib compresses zeros by a factor of 229; a file that claims more is not a plan.
_LARGE, _MOST_RATIO = 2**30, 256


def encode(header: Mapping[str, Any], arrays: Mapping[str, IntArray]) -> bytes:
    """Header and arrays as canonical bytes: equal contents give equal bytes."""
    shapes = {name: len(array) for name, array in arrays.items()}
    text = json.dumps({"header": header, "arrays": shapes}, sort_keys=True).encode()
    body = b"".join(np.ascontiguousarray(arrays[name], "<i8").tobytes() for name in sorted(shapes))
    return len(text).to_bytes(8, "little") + text + body


def pack(payload: bytes) -> bytes:
    """The bytes of a file that holds what `encode` gave."""
    body = zlib.compress(payload, _LEVEL)
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, name: PathLike) -> tuple[dict[str, Any], dict[str, IntArray]]:
    """Header and arrays of a file's bytes, after a check of the digest; `name` is for errors."""
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data[: len(MAGIC)]):
            raise FileError(f"{name} is truncated. Save the plan again.")
        if data.startswith(MAGIC[:-2]):
            version = data[len(MAGIC) - 2 :].split(b"\n")[0][:8].decode("ascii", "replace")
            raise FileError(
                f"{name} is an Evenstep plan of version {version}; this release reads version 2. "
                f"Make it again with `evenstep plan ... --out FILE`."
            )
        raise FileError(
            f"{name} is not an Evenstep plan. Make one with `evenstep plan ... --out FILE`."
        )
    start = len(MAGIC) + _DIGEST
    digest, body = data[len(MAGIC) : start], data[start:]
    if hashlib.sha256(body).digest() != digest:
        raise FileError(
            f"{name} is damaged or truncated (its digest does not match). Save the plan again."
        )
    try:
        return _decode(body)
    except (zlib.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{name} holds no valid plan ({error}). Save the plan again.") from None


def _decode(body: bytes) -> tuple[dict[str, Any], dict[str, IntArray]]:
    """The inverse of `encode`, from compressed bytes; expanded no further than declared."""
    # The first 8 bytes say how long the header is, and the header how much follows it.
    size = int.from_bytes(_expand(body, 8), "little")
    if size > _MOST_HEADER:
        raise ValueError(f"a header of {size} bytes")
    at = 8 + size
    data = json.loads(_expand(body, at)[8:], parse_int=_integer)
    counts = data["arrays"]
    for name, count in counts.items() if isinstance(counts, dict) else [("arrays", counts)]:
        if type(count) is not int or not 0 <= count < 2**60:
            raise ValueError(f"{name} cannot have {str(count)[:40]} entries")
    end = at + 8 * sum(counts.values())
    if end - at > max(_LARGE, _MOST_RATIO * len(body)):
        raise ValueError(f"{len(body)} bytes would expand to {end - at}")
    payload = _expand(body, end + 1)
    if len(payload) != end:
        which = "longer" if len(payload) > end else "shorter"
        raise ValueError(f"it is {which} than its header declares")
    arrays: dict[str, IntArray] = {}
    for name in sorted(counts):  # arrays follow in the order of their names
        arrays[name] = np.frombuffer(payload, "<i8", counts[name], at).astype(np.int64)
        at += 8 * counts[name]
    return data["header"], arrays


def _expand(body: bytes, most: int) -> bytes:
    """The first decompressed bytes, at most `most`."""
    return zlib.decompressobj().decompress(body, most)


def _integer(digits: str) -> int:
    if len(digits) > 20:  # nothing in a plan has more than 64 bits
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


@contextmanager
def reading(path: PathLike, remedy: str = "Check the path.") -> Iterator[None]:
    """Turn errors of the system into a `FileError` about this file."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror or error}). {remedy}") from None


def read(path: PathLike) -> bytes:
    """The bytes of a file."""
    with reading(path):
        return Path(path).read_bytes()


def replace_file(path: PathLike, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    replace_files({Path(path): data})


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Write each file atomically, and replace none before all of them are written.

    Each is written next to its target under a short name, because the target's own name may have
    the maximum length. A symbolic link stays, and its target is replaced.
    """
    prepared: dict[Path, Path] = {}
    placed: list[str] = []
    at = Path()
    try:
        # Write all of them next to their targets.
        for at, data in contents.items():
            target = _target(at)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".evenstep.")
            prepared[at] = Path(temporary)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            # `mkstemp` makes files private; give them the permissions that `open` would.
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
        # Then replace one after the other, which hardly fails any more.
        for at in contents:
            prepared[at].replace(_target(at))
            placed.append(str(at))
    except OSError as error:
        saved = f"only {' and '.join(placed)} was saved" if placed else "nothing was saved"
        raise FileError(
            f"{at} cannot be written ({error.strerror or error}); {saved}. Choose a folder that "
            f"exists and is writable."
        ) from None
    finally:
        for temporary_path in prepared.values():
            temporary_path.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """The file that `path` links to. Raises if it is a pipe, a device or a folder."""
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise FileError(f"{path} cannot be written: it is not a regular file. Choose another path.")
    return target
