"""Write pairs of files in Megatron's format."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.internals import CODES

DTYPES = {code: np.dtype(f"<{name}") for code, name in CODES.items()}


def write_pair(
    prefix: Path,
    sequences: Sequence[Sequence[int]],
    documents: Sequence[int] | None = None,
    code: int = 4,
    order: Sequence[int] | None = None,
    modes: bool = False,
) -> Path:
    """`documents` has the number of sequences of each; `order`, that of sequences in the file."""
    dtype = DTYPES[code]
    lengths = np.array([len(each) for each in sequences], "<i4")
    starts, content = np.zeros(len(sequences), "<i8"), b""
    for number in range(len(sequences)) if order is None else order:
        starts[number] = len(content)
        content += np.array(sequences[number], dtype).tobytes()
    counts = [1] * len(sequences) if documents is None else documents
    ends = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
    parts: list[Any] = [lengths, starts, ends]
    if modes:
        parts.append(np.zeros(len(sequences), "i1"))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    index = header + b"".join(part.tobytes() for part in parts)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(content)
    return prefix
