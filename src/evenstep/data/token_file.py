"""TokenFile: the tokens of many samples in memory-mapped files.

    header, 4096 bytes | input_ids | further columns | offsets
    header = magic, 16 bytes | sha256 of the rest, 32 bytes | JSON, padded with spaces

Columns are flat little-endian arrays, each starting at a multiple of 64 bytes. Sample i has the
entries `offsets[i]` to `offsets[i + 1]` of every column. The file contains no pickled data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenstep.core.ragged import IntArray, rounded_up
from evenstep.data.files import Paths, files_of
from evenstep.data.source import LOSS_MASKS, Sample, SampleSource, Shards, read_samples
from evenstep.errors import ConfigError, FileError, InputError

MAGIC = b"EVENSTEP TOKS 1\n"
HEADER_SIZE = 4096
TOKENS, OFFSETS = "input_ids", "offsets"
_TEXT = len(MAGIC) + 32
_ALIGNMENT = 64
_BLOCK = 1 << 24


class TokenFile(Shards):
    """Samples of files that a `TokenFileWriter` wrote, concatenated; every item is one sample.

    `paths` is a path, a pattern such as `"data/*.tokens"`, or a list of either. Matches of a
    pattern are sorted; a list keeps its order. All files must have the same columns. `file[i]` is a
    mapping of `input_ids` and the further columns, all read-only views of the mapped files. Every
    process opens the files on first use. Opening takes the same time for any number of samples.

    >>> import tempfile
    >>> from evenstep.data import write_token_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = write_token_file(f"{folder}/a.tokens", [[5, 6, 7], [8]], dtype=np.uint16)
    ...     len(file), file.lengths_of(np.array([1, 0])).tolist(), file[0]
    (2, [1, 3], {'input_ids': array([5, 6, 7], dtype=uint16)})
    """

    def __init__(self, paths: Paths) -> None:
        self.paths = files_of(paths)

    def __reduce__(self) -> tuple[type[Self], tuple[list[Path]]]:
        return type(self), (self.paths,)

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]:
        opened, number = self._opened[0], item
        if not 0 <= item < opened.header.samples:
            shard, number = self._locate(item)
            opened = self._opened[shard]
        start, end = int(opened.offsets[number]), int(opened.offsets[number + 1])
        if not 0 <= start < end <= opened.header.tokens:
            raise damaged(opened.path, f"sample {number} spans tokens {start} to {end}")
        return {name: column[start:end] for name, column in opened.columns.items()}

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items. Reads no others."""
        return self._lengths_by_shard(items, self._opened)

    @property
    def fingerprint(self) -> str:
        """Covers all samples. It was computed when they were written, so nothing is read, and a
        file that was changed in place by other means is not noticed (see `verify`)."""
        digests = [opened.header.fingerprint for opened in self._opened]
        if len(digests) == 1:
            return digests[0]
        return hashlib.blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()

    def verify(self) -> None:
        """Read the whole file and raise a FileError if it differs from what was written.

        Opening checks only sizes and the header.
        """
        for opened in self._opened:
            for name, section in [*opened.columns.items(), (OFFSETS, opened.offsets)]:
                digest, data = hasher(), section.view(np.uint8)
                for at in range(0, len(data), _BLOCK):
                    digest.update(data[at : at + _BLOCK].tobytes())
                if digest.hexdigest() != opened.header.digests[name]:
                    raise damaged(opened.path, f"the digest of {name} does not match")

    def _shard_sizes(self) -> list[int]:
        return [opened.header.samples for opened in self._opened]

    @cached_property
    def _opened(self) -> list[_Opened]:
        files = [_open(path) for path in self.paths]
        first = files[0]
        for file in files:
            if file.columns.keys() != first.columns.keys():
                raise FileError(
                    f"{file.path} has the columns {', '.join(file.columns)}, but {first.path} "
                    f"has {', '.join(first.columns)}. Write both with the same columns."
                )
        return files


def _open(path: Path) -> _Opened:
    try:
        with path.open("rb") as file:
            block = file.read(HEADER_SIZE)
            size = os.fstat(file.fileno()).st_size
            header = Header.decode(path, block)
            sections, expected = header.sections()
            if size != expected:
                raise damaged(path, f"it has {size} bytes instead of {expected}")
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}). Check the path."
        ) from None
    columns = {name: data[a:b].view(dtype) for name, (a, b, dtype) in sections.items()}
    offsets = columns.pop(OFFSETS)
    if (offsets[0], offsets[-1]) != (0, header.tokens):
        raise damaged(path, f"its samples span tokens {offsets[0]} to {offsets[-1]}")
    return _Opened(path, header, columns, offsets)


class _Opened(NamedTuple):
    path: Path
    header: Header
    columns: dict[str, NDArray[Any]]
    offsets: NDArray[Any]

    def lengths_of(self, at: IntArray) -> IntArray:
        """The lengths of samples of this file."""
        lengths: IntArray = (self.offsets[at + 1] - self.offsets[at]).astype(np.int64)
        if len(at) and lengths.min() < 1:
            raise damaged(self.path, f"sample {at[lengths.argmin()]} has {lengths.min()} tokens")
        return lengths


@dataclass(frozen=True, slots=True)
class Header:
    """The columns and sizes of a token file, and the digest of each section."""

    columns: dict[str, np.dtype[Any]]
    samples: int
    tokens: int
    digests: dict[str, str]

    def sections(self) -> tuple[dict[str, tuple[int, int, np.dtype[Any]]], int]:
        """Start, end and dtype of each section, and the size of the file.

        >>> sections, size = Header({"input_ids": np.dtype("<u2")}, 2, 5, {}).sections()
        >>> sections["input_ids"], sections["offsets"], size
        ((4096, 4106, dtype('uint16')), (4160, 4184, dtype('int64')), 4184)
        """
        counts = [(name, dtype, self.tokens) for name, dtype in self.columns.items()]
        sections, end = {}, HEADER_SIZE
        for name, dtype, count in [*counts, (OFFSETS, np.dtype("<i8"), self.samples + 1)]:
            start = rounded_up(end, _ALIGNMENT)
            end = start + count * dtype.itemsize
            sections[name] = (start, end, dtype)
        return sections, end

    def encode(self) -> bytes:
        """The header as bytes; longer than `HEADER_SIZE` if the names of columns are too long."""
        values = {
            "columns": [[name, dtype.str] for name, dtype in self.columns.items()],
            "samples": self.samples,
            "tokens": self.tokens,
            "digests": self.digests,
        }
        text = json.dumps(values).encode().ljust(HEADER_SIZE - _TEXT)
        return MAGIC + hashlib.sha256(text).digest() + text

    @classmethod
    def decode(cls, path: Path, block: bytes) -> Header:
        """The inverse of `encode`. The digest is checked before the JSON is parsed."""
        if not block.startswith(MAGIC):
            raise FileError(
                f"{path} is not an Evenstep token file of version 1. Write one with "
                f"write_token_file."
            )
        digest, text = block[len(MAGIC) : _TEXT], block[_TEXT:]
        if len(block) != HEADER_SIZE or hashlib.sha256(text).digest() != digest:
            raise damaged(path, "its header does not match its digest")
        try:
            values = json.loads(text)
            columns = {str(name): column_type(dtype) for name, dtype in values["columns"]}
            samples, tokens = int(values["samples"]), int(values["tokens"])
            if TOKENS not in columns or OFFSETS in columns or min(samples, tokens) < 0:
                raise ValueError("missing input_ids, reserved name or negative size")
            digests = {name: str(values["digests"][name]) for name in (*columns, OFFSETS)}
            return cls(columns, samples, tokens, digests)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise damaged(path, f"its header is malformed: {error}") from None

    @property
    def fingerprint(self) -> str:
        """The same for the same samples in the same order."""
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()


def column_type(dtype: DTypeLike) -> np.dtype[Any]:
    """The little-endian dtype of a stored column; a ValueError unless it is a plain number."""
    stored = np.dtype(dtype).newbyteorder("<")
    if stored.kind not in "biuf" or stored.itemsize > 8:
        raise ValueError(f"{stored} is not a plain number")
    return stored


def hasher() -> hashlib.blake2b:
    """The hash function of section digests."""
    return hashlib.blake2b(digest_size=16)


def damaged(path: Path, fault: str) -> FileError:
    """The error for a file that differs from what was written."""
    return FileError(f"{path} is damaged or incomplete ({fault}). Copy or write it again.")


# Writing ------------------------------------------------------------------------------------------

_BUFFER = 1 << 20


class TokenFileWriter:
    """Writes a `TokenFile` sample by sample, in constant memory.

    `dtype` is that of `input_ids`. `columns` maps further columns, with one entry per token, to
    their dtypes. Other keys of a sample are ignored, except that labels and loss masks which are
    not among the columns are an error. The file appears when the `with` block ends. If the block
    raises, an existing file is left unchanged.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/a.tokens"
    ...     with TokenFileWriter(path, dtype=np.uint16, columns={"loss_mask": np.uint8}) as writer:
    ...         writer.append({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    ...     TokenFile(path)[0]["loss_mask"]
    array([0, 1, 1], dtype=uint8)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: DTypeLike = np.int32,
        columns: Mapping[str, DTypeLike] | None = None,
    ) -> None:
        self.path = Path(path)
        dtypes = {TOKENS: dtype, **(columns or {})}
        if len(dtypes) == len(columns or {}) or OFFSETS in dtypes:
            raise ConfigError(
                f"columns must not contain the reserved names {TOKENS!r} and {OFFSETS!r}. Rename "
                f"the column."
            )
        self._columns = {name: _stored(name, dtype) for name, dtype in dtypes.items()}
        most = Header(self._columns, 2**63, 2**63, dict.fromkeys([*dtypes, OFFSETS], "f" * 32))
        if len(most.encode()) > HEADER_SIZE:
            raise ConfigError(
                f"the names of {len(self._columns)} columns do not fit into a header of "
                f"{HEADER_SIZE} bytes. Use fewer columns or shorter names."
            )
        self._sections: dict[str, _Section] = {}
        self._temporary = self.path
        self._samples = self._tokens = 0

    def __enter__(self) -> Self:
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        self._samples = self._tokens = 0
        try:
            main = self._temporary.open("xb", _BUFFER)
            self._sections[TOKENS] = _Section(main)
            main.write(bytes(HEADER_SIZE))
            for name in [*list(self._columns)[1:], OFFSETS]:
                spool = tempfile.TemporaryFile(dir=self.path.parent, buffering=_BUFFER)
                self._sections[name] = _Section(spool)
        except OSError as error:
            raise self._unwritable(error) from None
        self._sections[OFFSETS].write(np.zeros(1, "<i8"))
        return self

    def append(self, sample: Sample) -> None:
        """Write one sample: a mapping with `input_ids` and every further column, or only tokens.

        Nothing is written of a sample that is refused.
        """
        if not self._sections:
            raise FileError(
                f"{self.path} is not open for writing. Append samples inside the `with` block of "
                f"the writer."
            )
        row = sample if isinstance(sample, Mapping) else {TOKENS: sample}
        for name in ("labels", *LOSS_MASKS):
            if name in row and name not in self._columns:
                remedy = f"Pass columns={{{name!r}: np.{'int32' if name == 'labels' else 'uint8'}}}"
                raise self._refused(
                    f"has {name!r}, which would be lost", f"{remedy}, or remove it."
                )
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype in self._columns.items():
            if name not in row:
                raise self._refused(f"has no {name!r}", "Add it to every sample.")
            arrays[name] = self._fitted(name, row[name], dtype)
        length = len(arrays[TOKENS])
        if not length:
            raise self._refused("has no tokens", "Leave it out.")
        for name, array in arrays.items():
            if len(array) != length:
                fault = f"has {length} tokens but {len(array)} entries in {name!r}"
                raise self._refused(fault, "Expected one entry per token.")
        try:
            for name, array in arrays.items():
                self._sections[name].write(array)
            self._sections[OFFSETS].write(np.array([self._tokens + length], "<i8"))
        except OSError as error:
            raise self._unwritable(error) from None
        self._samples += 1
        self._tokens += length

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as fault:
            raise self._unwritable(fault) from None
        finally:
            self._discard()

    def _finish(self) -> None:
        if not self._sections:
            raise FileError(
                f"{self.path} was not written, because writing a sample failed. Write it again."
            )
        digests = {name: section.digest.hexdigest() for name, section in self._sections.items()}
        header = Header(self._columns, self._samples, self._tokens, digests)
        main = self._sections[TOKENS].file
        for name, (start, _, _) in header.sections()[0].items():
            if name != TOKENS:
                main.write(bytes(start - main.tell()))
                self._sections[name].file.seek(0)
                shutil.copyfileobj(self._sections[name].file, main, _BUFFER)
        main.seek(0)
        main.write(header.encode())
        main.close()
        self._temporary.replace(self.path)

    def _discard(self) -> None:
        """Close and remove temporary files."""
        sections, self._sections = self._sections, {}
        for section in sections.values():
            with contextlib.suppress(OSError):  # flushing fails on a full disk
                section.file.close()
        if sections:
            self._temporary.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> FileError:
        self._discard()
        return FileError(
            f"{self.path} cannot be written ({error.strerror or error}). Choose an existing, "
            f"writable folder with enough free space."
        )

    def _refused(self, fault: str, remedy: str) -> InputError:
        return InputError(f"{self.path}: sample {self._samples} {fault}. {remedy}")

    def _fitted(self, name: str, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        """`values` in the dtype of their column. Raises if a value is out of its range."""
        array = np.asarray(values)
        if array.ndim == 1 and not len(array):
            return array.astype(dtype)
        if array.ndim != 1 or array.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
            fault = f"has {name!r} of dtype {array.dtype} and shape {array.shape}"
            raise self._refused(fault, f"Expected one number per token, stored as {dtype}.")
        if dtype.kind != "f":
            low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            for value in (int(array.min()), int(array.max())):
                if not low <= value <= high:
                    fault = f"has {value} in {name!r}, out of range for {dtype}"
                    raise self._refused(fault, "Use a wider dtype, or correct the sample.")
        try:
            with np.errstate(over="raise"):
                return np.ascontiguousarray(array, dtype)
        except FloatingPointError:
            fault = f"has a number in {name!r} that is out of range for {dtype}"
            raise self._refused(fault, "Use a wider dtype, or correct the sample.") from None


def write_token_file(
    path: str | os.PathLike[str],
    samples: Iterable[Sample] | SampleSource,
    *,
    dtype: DTypeLike = np.int32,
    columns: Mapping[str, DTypeLike] | None = None,
) -> TokenFile:
    """Write samples, or all samples of a source, and return the file.

    write_token_file("train.tokens", Jsonl("train.jsonl", tokenizer=tok), dtype=np.uint32)

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(write_token_file(f"{folder}/tokens", [{"input_ids": [1, 2]}, {"input_ids": [3]}]))
    2
    """
    with TokenFileWriter(path, dtype=dtype, columns=columns) as writer:
        if isinstance(samples, SampleSource):
            for item in range(len(samples)):
                for _, sample in read_samples(samples, item):
                    writer.append(sample)
        else:
            for sample in samples:
                writer.append(sample)
    return TokenFile(path)


class _Section:
    """A section that is being written, and its digest so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hasher()

    def write(self, array: NDArray[Any]) -> None:
        """Append a contiguous array."""
        data = array.tobytes()
        self.file.write(data)
        self.digest.update(data)


def _stored(name: str, dtype: DTypeLike) -> np.dtype[Any]:
    try:
        stored = column_type(dtype)
    except (TypeError, ValueError):
        stored = None
    if stored is None or (name == TOKENS and stored.kind not in "iu"):
        numbers = "integers" if name == TOKENS else "integers, floats or bools"
        raise ConfigError(
            f"the dtype of {name!r} must be one of {numbers} of up to 64 bits, got {dtype}. Use "
            f"one such as np.int32."
        )
    return stored
