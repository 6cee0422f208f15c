"""Tokens in memory-mapped files: TokenFile, its writer, and MegatronTokens.

A token file holds many samples, with further columns beside their tokens:

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
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenstep.core.plan_file import reading
from evenstep.core.ragged import IntArray, offsets_of, rounded_up
from evenstep.core.text import one_of
from evenstep.data.files import Paths, Shards, files_digest, files_of
from evenstep.data.source import (
    SPANS,
    TARGETS,
    Sample,
    SampleSource,
    check_items,
    digest_of,
    hides_tokens,
    read_samples,
)
from evenstep.errors import ConfigError, FileError, InputError


class MappedTokens(Shards):
    """What sources of mapped files share: lengths that are known without reading tokens."""

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items. Reads no others."""
        check_items(items, len(self))
        at = np.asarray(items, np.int64)
        if len(self._files) == 1:
            return self._files[0].lengths_of(at)  # type: ignore[no-any-return]
        lengths = np.empty(len(at), np.int64)
        shards = np.searchsorted(self.shards, at, "right") - 1
        for shard in np.unique(shards).tolist():
            here = shards == shard
            lengths[here] = self._files[shard].lengths_of(at[here] - self._starts[shard])
        return lengths


def _mapped(path: Path) -> mmap.mmap | bytes:
    with reading(path), path.open("rb") as file:
        # An empty file cannot be mapped.
        empty = os.fstat(file.fileno()).st_size == 0
        return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _damaged(path: Path, fault: str) -> FileError:
    """The error for a file that differs from what was written."""
    return FileError(f"{path} is damaged or incomplete ({fault}). Copy or write it again.")


# Token files --------------------------------------------------------------------------------------

MAGIC = b"EVENSTEP TOKS 1\n"
HEADER_SIZE = 4096
TOKENS, OFFSETS = "input_ids", "offsets"
_TEXT = len(MAGIC) + 32
_ALIGNMENT = 64


class TokenFile(MappedTokens):
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

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]:
        shard, number = self._locate(item)
        file: _TokenColumns = self._files[shard]
        start, end = int(file.offsets[number]), int(file.offsets[number + 1])
        if not 0 <= start < end <= file.header.tokens:
            raise _damaged(file.path, f"sample {number} spans tokens {start} to {end}")
        return {name: column[start:end] for name, column in file.columns.items()}

    @property
    def fingerprint(self) -> str:
        """Covers all samples. It was computed when they were written, so nothing is read, and a
        file that was changed in place by other means is not noticed (see `verify`)."""
        digests = [file.digest.hex() for file in self._files]
        return digests[0] if len(digests) == 1 else digest_of(" ".join(digests)).hex()

    def verify(self) -> None:
        """Read the whole file and raise a FileError if it differs from what was written.

        Opening checks only sizes and the header.
        """
        for file in self._files:
            for name, section in [*file.columns.items(), (OFFSETS, file.offsets)]:
                if digest_of(section.view(np.uint8).data).hex() != file.header.digests[name]:
                    raise _damaged(file.path, f"the digest of {name} does not match")

    def _open(self, path: Path) -> _TokenColumns:
        data = _mapped(path)
        block = data[:HEADER_SIZE]
        header = Header.decode(path, block)
        sections, size = header.sections()
        if len(data) != size:
            raise _damaged(path, f"it has {len(data)} bytes instead of {size}")
        array = np.frombuffer(data, np.uint8)
        columns = {name: array[a:b].view(dtype) for name, (a, b, dtype) in sections.items()}
        offsets = columns.pop(OFFSETS)
        if (offsets[0], offsets[-1]) != (0, header.tokens):
            raise _damaged(path, f"its samples span tokens {offsets[0]} to {offsets[-1]}")
        return _TokenColumns(path, header, digest_of(block), columns, offsets)

    @cached_property
    def _files(self) -> list[_TokenColumns]:
        files = [self._open(path) for path in self.paths]
        first = files[0]
        for file in files:
            if file.columns.keys() != first.columns.keys():
                raise FileError(
                    f"{file.path} has the columns {', '.join(file.columns)}, but {first.path} "
                    f"has {', '.join(first.columns)}. Write both with the same columns."
                )
        return files


@dataclass(frozen=True, slots=True)
class _TokenColumns:
    """An opened token file, and the digest of its header."""

    path: Path
    header: Header
    digest: bytes
    columns: dict[str, NDArray[Any]]
    offsets: NDArray[Any]

    def __len__(self) -> int:
        return self.header.samples

    def lengths_of(self, at: IntArray) -> IntArray:
        """The lengths of samples of this file."""
        lengths: IntArray = (self.offsets[at + 1] - self.offsets[at]).astype(np.int64)
        if len(at) and lengths.min() < 1:
            raise _damaged(self.path, f"sample {at[lengths.argmin()]} has {lengths.min()} tokens")
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
            raise _damaged(path, "its header does not match its digest")
        try:
            values = json.loads(text)
            columns = {str(name): column_type(dtype) for name, dtype in values["columns"]}
            samples, tokens = int(values["samples"]), int(values["tokens"])
            if TOKENS not in columns or OFFSETS in columns or min(samples, tokens) < 0:
                raise ValueError("missing input_ids, reserved name or negative size")
            digests = {name: str(values["digests"][name]) for name in (*columns, OFFSETS)}
            return cls(columns, samples, tokens, digests)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _damaged(path, f"its header is malformed: {error}") from None


def column_type(dtype: DTypeLike) -> np.dtype[Any]:
    """The little-endian dtype of a stored column; a ValueError unless it is a plain number."""
    stored = np.dtype(dtype).newbyteorder("<")
    if stored.kind not in "biuf" or stored.itemsize > 8:
        raise ValueError(f"{stored} is not a plain number")
    return stored


# Writing ------------------------------------------------------------------------------------------

_BUFFER = 1 << 20


class TokenFileWriter:
    """Writes a `TokenFile` sample by sample, in constant memory.

    `dtype` is that of `input_ids`. `columns` maps further columns, with one entry per token, to
    their dtypes. Other keys of a sample are ignored, except that labels and loss masks which are
    not among the columns are an error, and so is padding by an `attention_mask`. The file appears
    when the `with` block ends. If the block raises, an existing file is left unchanged.

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
        if {TOKENS, OFFSETS} & set(columns or {}):
            raise ConfigError(
                f"columns must not contain the reserved names {TOKENS!r} and {OFFSETS!r}. Rename "
                f"the column."
            )
        dtypes = {TOKENS: dtype, **(columns or {})}
        self._columns = {name: _stored(name, dtype) for name, dtype in dtypes.items()}
        most = Header(self._columns, 2**63, 2**63, dict.fromkeys([*dtypes, OFFSETS], "f" * 32))
        if len(most.encode()) > HEADER_SIZE:
            raise ConfigError(
                f"the names of {len(self._columns)} columns do not fit into a header of "
                f"{HEADER_SIZE} bytes. Use fewer columns or shorter names."
            )
        self._lost = [name for name in TARGETS if name not in dtypes]
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
        for name in self._lost:
            if name in row:
                remedy = f"Pass columns={{{name!r}: np.{'int32' if name == 'labels' else 'uint8'}}}"
                if name == SPANS:
                    remedy = "Write these tokens as 0 of a 'loss_mask'"
                raise self._refused(
                    f"has {name!r}, which would be lost", f"{remedy}, or remove it."
                )
        if "attention_mask" not in self._columns and hides_tokens(row):
            fault = "has an 'attention_mask' that hides tokens, which are padding"
            raise self._refused(fault, "Remove them from the sample.")
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
        if kind is None and not self._sections:
            raise FileError(
                f"{self.path} was not written, because writing a sample failed. Write it again."
            )
        try:
            if kind is None:
                self._finish()
        except OSError as fault:
            raise self._unwritable(fault) from None
        finally:
            self._discard()

    def _finish(self) -> None:
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
        if name == TOKENS and array.min() < 0:
            fault = f"has {array.min()} in {name!r}, but token ids begin at 0"
            raise self._refused(fault, "Correct the sample.")
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
    if isinstance(samples, SampleSource):
        source, items = samples, range(len(samples))
        samples = (sample for item in items for _, sample in read_samples(source, item))
    with TokenFileWriter(path, dtype=dtype, columns=columns) as writer:
        for sample in samples:
            writer.append(sample)
    return TokenFile(path)


class _Section:
    """A section that is being written, and its digest so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.blake2b(digest_size=16)

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


# Megatron -----------------------------------------------------------------------------------------

#     .bin = tokens of all sequences
#     .idx = header | lengths, int32 | pointers, int64 | documents, int64
#     header = magic, 9 bytes | version, 8 | dtype code, 1 | sequences, 8 | documents, 8
#
# All numbers are little-endian. `lengths[i]` tokens from byte `pointers[i]` on are sequence i.
# Document i is the sequences `documents[i]` to `documents[i + 1]`; the array has one entry more
# than there are documents, and the header counts its entries.

_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
Unit: TypeAlias = Literal["document", "sequence"]
_ENDS = (".bin", ".idx")


class MegatronTokens(MappedTokens):
    """Samples of files that Megatron's `preprocess_data.py` wrote, concatenated.

    `paths` is a path, a pattern such as `"data/*.idx"`, or a list of either; a path is the name of
    either file of a pair, or what both names share. A sample is a document, or a sequence with
    `unit="sequence"`; they differ if documents were split into sentences. Those without tokens are
    left out. `source[i]` has `input_ids`, a read-only view of the mapped file. Every process opens
    the files on first use and reads the indices once.

        MegatronTokens("data/wiki_text_document")
    """

    def __init__(self, paths: Paths, *, unit: Unit = "document") -> None:
        one_of("unit", unit, Unit)
        files = files_of(paths)
        names = [path.with_suffix("") if path.suffix in _ENDS else path for path in files]
        self.paths = list(dict.fromkeys(names))
        self.unit = unit

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]:
        shard, number = self._locate(item)
        return {"input_ids": self._files[shard].tokens(number)}

    @cached_property
    def fingerprint(self) -> str:
        """Covers number and sizes of samples and files, and 64 blocks of 64 KiB of the files (see
        `files_digest`). Not their names."""
        contents = files_digest([file for path in self.paths for file in _pair(path)])
        return digest_of(f"megatron {self.unit} {self.shards.tolist()} ", contents).hex()

    def _open(self, path: Path) -> _Sequences:
        data_path, index_path = _pair(path)
        index, data = _mapped(index_path), _mapped(data_path)
        dtype, sizes, pointers, documents = _index_columns(index_path, index)
        spans, lengths = None, sizes
        # Documents [0, 1, 2, 3] of 3 sequences are one sequence each.
        if self.unit == "document" and not np.array_equal(documents, np.arange(len(sizes) + 1)):
            if len(documents) < 1 or documents[0] != 0 or documents[-1] != len(sizes):
                raise _damaged(index_path, f"its documents do not span {len(sizes)} sequences")
            if (np.diff(documents) < 0).any():
                raise _damaged(index_path, "its documents are not in order")
            spans = documents[:-1], documents[1:]
            lengths = np.diff(offsets_of(sizes.astype(np.int64))[documents])
        if not (lengths > 0).all():
            kept = np.flatnonzero(lengths)
            spans = (kept, kept + 1) if spans is None else (spans[0][kept], spans[1][kept])
            lengths = lengths[kept]
        return _Sequences(data_path, data, dtype, sizes, pointers, spans, lengths)


@dataclass(frozen=True, slots=True)
class _Sequences:
    """An opened pair of files.

    spans    the first sequence of each sample, and the one after its last; None if sample i is
             sequence i
    lengths  of the samples
    """

    path: Path
    data: mmap.mmap | bytes
    dtype: np.dtype[Any]
    sizes: NDArray[np.int32]
    pointers: NDArray[np.int64]
    spans: tuple[IntArray, IntArray] | None
    lengths: NDArray[Any]

    def __len__(self) -> int:
        return len(self.lengths)

    def lengths_of(self, at: IntArray) -> IntArray:
        """The lengths of samples of this file."""
        return self.lengths[at].astype(np.int64)

    def tokens(self, number: int) -> NDArray[Any]:
        """The tokens of a sample; a view if its sequences follow each other in the file."""
        first, end = number, number + 1
        if self.spans is not None:
            first, end = (int(bound[number]) for bound in self.spans)
        sizes = self.sizes[first:end].astype(np.int64) * self.dtype.itemsize
        starts = self.pointers[first:end]
        if (starts[1:] == starts[:-1] + sizes[:-1]).all():
            return self._view(int(starts[0]), int(sizes.sum()))
        parts = zip(starts.tolist(), sizes.tolist(), strict=True)
        return np.concatenate([self._view(start, size) for start, size in parts])

    def _view(self, start: int, size: int) -> NDArray[Any]:
        if not 0 <= start <= start + size <= len(self.data):
            raise _damaged(
                self.path, f"a sample spans bytes {start} to {start + size} of {len(self.data)}"
            )
        return np.frombuffer(self.data, self.dtype, size // self.dtype.itemsize, start)


def _index_columns(path: Path, index: mmap.mmap | bytes) -> tuple[np.dtype[Any], Any, Any, Any]:
    """The dtype of tokens, and the arrays lengths, pointers and documents of an index."""
    if index[: len(_INDEX_MAGIC)] != _INDEX_MAGIC:
        raise FileError(
            f"{path} is not an index of Megatron's memory-mapped format. Write one with "
            f"preprocess_data.py."
        )
    size = _INDEX_HEADER.size
    if len(index) < size:
        raise _damaged(path, f"it has {len(index)} bytes")
    _, version, code, sequences, documents = _INDEX_HEADER.unpack(index[:size])
    if version != 1 or code not in CODES:
        raise FileError(f"{path} has version {version} and dtype {code}, which are unknown.")
    dtype = np.dtype(f"<{CODES[code]}")
    if dtype.kind == "f":
        raise FileError(f"{path} is an index of {dtype} values, expected integer tokens.")
    expected = size + 12 * sequences + 8 * documents
    if len(index) == expected + sequences and sequences:
        raise FileError(f"{path} has a mode per sequence. Only text is read; write it without.")
    if len(index) != expected:
        raise _damaged(path, f"it has {len(index)} bytes instead of {expected}")
    lengths = np.frombuffer(index, "<i4", sequences, size)
    pointers = np.frombuffer(index, "<i8", sequences, size + 4 * sequences)
    ends = np.frombuffer(index, "<i8", documents, size + 12 * sequences)
    if sequences and lengths.min() < 0:
        raise _damaged(path, f"a sequence has {lengths.min()} tokens")
    return dtype, lengths, pointers, ends


def _pair(path: Path) -> tuple[Path, Path]:
    """The names of both files, which share `path`."""
    return path.with_name(f"{path.name}.bin"), path.with_name(f"{path.name}.idx")
