"""Digests of what samples hold, for fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

_ITEMS = 16


def spread(count: int, most: int = _ITEMS) -> list[int]:
    """Up to `most` of `count` items, evenly spread, with the first and the last.

    >>> spread(100, 4), spread(2)
    ([0, 33, 66, 99], [0, 1])
    """
    found: list[int] = np.linspace(0, count - 1, min(count, most)).astype(np.int64).tolist()
    return found


def samples_digest(read: Callable[[int], Any], items: Iterable[int]) -> bytes:
    """A digest of the samples of these items; b"" if they are random.

    Every item is read twice, because a transform that draws random numbers of its own must not
    make the fingerprint random, too. An item that cannot be read is part of the digest.
    """
    found = [[_content(read, item) for item in items] for _ in range(2)]
    return b"".join(found[0]) if found[0] == found[1] else b""


def _content(read: Callable[[int], Any], item: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    try:
        found = read(item)
    except Exception:
        digest.update(b"unreadable")
        return digest.digest()
    samples = found if isinstance(found, list) else [found]
    digest.update(f" {item} {len(samples)}".encode())
    for sample in samples:
        for part in sample_content(sample):
            digest.update(part)
    return digest.digest()


def sample_content(sample: Any) -> Iterable[bytes]:
    """The tokens of a sample, then its other values by name.

    Tokens are the same in any container. Values that are neither numbers nor text count by their
    type and length only.
    """
    if not isinstance(sample, Mapping):
        yield _bytes(sample)
        return
    yield _bytes(sample.get("input_ids"))
    for name in sorted(map(str, sample)):
        if name != "input_ids" and name in sample:
            yield f" {name} ".encode()
            yield _bytes(sample[name])


def _bytes(value: Any) -> bytes:
    """A value as bytes; numbers in the same way for any container and width."""
    if isinstance(value, str | bytes):
        body = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return b" %d " % len(body) + body
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors on a device
        return _shape(value)
    if array.dtype.kind not in "biuf":
        return _shape(value)
    body = array.astype("<f8" if array.dtype.kind == "f" else "<i8").tobytes()
    return f" {'x'.join(map(str, array.shape)) or '-'} ".encode() + body


def _shape(value: Any) -> bytes:
    if isinstance(value, list | tuple):
        return b" [" + b"".join(map(_bytes, value)) + b"]"
    if isinstance(value, Mapping):
        return b" {" + b"".join(sample_content(value)) + b"}"
    try:
        size: Any = len(value)
    except TypeError:
        size = "-"
    return f" {type(value).__qualname__} {size}".encode()
