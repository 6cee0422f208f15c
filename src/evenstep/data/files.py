"""Files of rows: paths and patterns, lines, Jsonl, ParquetText and saved datasets."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray, offsets_of
from evenstep.data.source import (
    Draw,
    ItemTransform,
    Progress,
    Sample,
    Shards,
    Transform,
    samples_digest,
    spread,
)
from evenstep.data.text import RowDecoder, as_tokenize, other_field
from evenstep.errors import ConfigError, FileError, InputError

# Paths --------------------------------------------------------------------------------------------

PathLike: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = PathLike | Sequence[PathLike]
"""A path, a pattern such as `"data/*.jsonl"` (`**` matches folders), or a list of either."""

_DIGEST_BLOCK, _DIGEST_BLOCKS = 1 << 16, 64
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_COMPRESSED = (".bz2", ".gz", ".lz4", ".xz", ".zip", ".zst")


def files_of(paths: Paths) -> list[Path]:
    """The files that `paths` name: a list in its own order, the matches of a pattern sorted.

    A path that exists is taken as it is, even if it looks like a pattern.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise ConfigError("expected at least one file, got an empty list. Pass paths or a pattern.")
    files: list[Path] = []
    for pattern in several:
        matched = matches(pattern)
        if not matched:
            raise ConfigError(
                f"no file matches {os.fspath(pattern)!r}. Check the pattern and the current folder."
            )
        files += matched
    for path in files:
        refuse_compressed(path)
    return files


def refuse_empty(source: Any) -> None:
    """Raise if a source of files, or a wrapper of one, has no samples: a stream of it would end
    without a step. No samples in memory are no steps."""
    files = source
    while not hasattr(files, "paths"):  # Mapped has a dataset, MeasuredMapped a Mapped
        inner = vars(files) if hasattr(files, "__dict__") else {}
        files = inner.get("dataset", inner.get("_source"))
        if files is None:
            return
    paths = files.paths
    if not paths or len(source):
        return
    count = len(paths) - 1
    more = f" and {count} more {'file' if count == 1 else 'files'}" if count else ""
    raise InputError(f"no samples in {paths[0]}{more}. Check the files.")


def refuse_compressed(path: Path) -> None:
    """Raise if a file is compressed."""
    if path.suffix.lower() in _COMPRESSED:
        raise FileError(
            f"{path}: {path.suffix} files are not supported yet. Decompress it, and name the "
            f"result."
        )


def matches(pattern: PathLike) -> list[Path]:
    """The matches of a pattern, sorted; a path that exists or is no pattern as it is."""
    path, text = Path(pattern), os.fspath(pattern)
    if _URL.match(text):
        raise ConfigError(
            f"{text}: {text.partition(':')[0]}:// paths are not supported yet. Download the files, "
            f"and name the local ones."
        )
    if not glob.has_magic(text) or path.exists():
        return [path]
    # Path.glob takes no absolute patterns.
    return [Path(each) for each in sorted(glob.glob(text, recursive=True))]  # noqa: PTH207


def files_digest(paths: Sequence[Path]) -> bytes:
    """A digest of sizes and contents in order; names and dates do not matter.

    Reads 64 blocks of 64 KiB, evenly spread over all files, and at least the first and the last
    block of each. So files of 4 MiB together are covered completely, and an edit inside a larger
    one may go unnoticed unless it changes the size.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(b" %d " % size)
                for start in _starts(size, max(2, _DIGEST_BLOCKS // len(paths))):
                    file.seek(start)
                    digest.update(file.read(_DIGEST_BLOCK))
        except OSError as error:
            raise FileError(
                f"{path} cannot be read ({error.strerror or error}). Check the path."
            ) from None
    return digest.digest()


def _starts(size: int, blocks: int) -> list[int]:
    """Where so many blocks of a file start; those of the whole file if it is small.

    >>> _starts(3 * 65536 + 1, 8), _starts(1 << 20, 3)
    ([0, 65536, 131072, 196608], [0, 491520, 983040])
    """
    if size <= blocks * _DIGEST_BLOCK:
        return list(range(0, size, _DIGEST_BLOCK))
    starts: list[int] = np.linspace(0, size - _DIGEST_BLOCK, blocks).astype(np.int64).tolist()
    return starts


# Lines --------------------------------------------------------------------------------------------

_BLOCK, _LINE_PART = 1 << 24, 4096
_NEWLINE = 10


class LineFile:
    """The non-blank lines of a file, which is scanned for line ends once, on first use.

    Pickling keeps this index but not the open file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_file"}

    def __len__(self) -> int:
        return len(self._index.starts) - 1

    def __getitem__(self, item: int) -> bytes:
        """A line, with the blank lines after it."""
        starts = self._index.starts
        begin, end = int(starts[item]), int(starts[item + 1])
        line = _read_at(self._file, begin, end - begin)
        if len(line) != end - begin:
            raise self._changed(os.fstat(self._file).st_size, int(starts[-1]))
        return line

    def number(self, item: int) -> int:
        """The number of an item's line, from 1."""
        return self._index.line(item)

    @cached_property
    def _index(self) -> _LineIndex:
        return _scanned(self._file)

    @cached_property
    def _file(self) -> int:
        """The descriptor of the open file. It is not mapped: touching a page of a file that was
        shortened kills the process. Forked processes may share it: reads name their position."""
        try:
            file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, file)
            size = os.fstat(file).st_size
            os.pread(file, 1, 0)  # fails for a folder
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be read ({error.strerror or error}). Check the path."
            ) from None
        index: _LineIndex | None = vars(self).get("_index")  # from this or another process
        if index is not None and index.starts[-1] != size:
            raise self._changed(size, int(index.starts[-1]))
        return file

    def _changed(self, size: int, before: int) -> FileError:
        return FileError(
            f"{self.path} has {size} bytes but had {before} when it was indexed. Do not change the "
            f"file while it is in use."
        )


def _read_at(file: int, begin: int, size: int) -> bytes:
    """So many bytes from `begin` on; fewer at the end of the file."""
    data = os.pread(file, size, begin)
    while len(data) < size and (more := os.pread(file, size - len(data), begin + len(data))):
        data += more  # the system reads 2 GiB at most
    return data


class _LineIndex(NamedTuple):
    """Where each item's line starts, with the size of the file at the end; for each blank line,
    the number of items before it."""

    starts: IntArray
    blanks: IntArray

    def line(self, item: int) -> int:
        """The line number of an item, from 1: items of lines [a, blank, b] -> 1, 3."""
        return item + 1 + int(np.searchsorted(self.blanks, item, "right"))


def _scanned(file: int) -> _LineIndex:
    """Find the lines, block by block.

    A file of the lines "1", " " and "2" has the starts [0, 4, 5] (5 is its size) and blanks [1].
    """
    starts, blank = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    at, ended = 0, True  # whether a line ends before this block
    while block := _read_at(file, at, _BLOCK):
        view = np.frombuffer(block, np.uint8)
        begins = np.flatnonzero(np.append(ended, view[:-1] == _NEWLINE))
        first = view[begins]
        empty = first == _NEWLINE
        for number in np.flatnonzero((first == 32) | (first == 9) | (first == 13)).tolist():
            empty[number] = _is_blank(file, at + int(begins[number]))
        starts.append(begins + at)
        blank.append(empty)
        at, ended = at + len(block), bool(view[-1] == _NEWLINE)
    empty = np.concatenate(blank)
    items = np.concatenate([*starts, [at]])[np.append(~empty, True)].astype(np.int64)
    return _LineIndex(items, np.cumsum(~empty)[empty])


def _is_blank(file: int, begin: int) -> bool:
    """Whether the line that begins there has white space only."""
    while part := _read_at(file, begin, _LINE_PART):
        line, newline, _ = part.partition(b"\n")
        if line.strip():
            return False
        if newline:
            break
        begin += len(part)
    return True


# Rows ---------------------------------------------------------------------------------------------


class RowSource(Shards):
    """What sources of rows share: a row of a file is decoded into a sample, or several."""

    _decoder: RowDecoder
    _first_kind: str | None = None
    """What is read of the first row, if rows may differ in that."""

    @abstractmethod
    def _row(self, item: int) -> tuple[Any, str]:
        """(the row, its file and line)."""

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        return self._read(item)

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self._decoder.transform.seeded

    def drawn(self, item: int, draw: Draw) -> Sample | list[Sample]:
        """An item with a seeded transform."""
        return self._read(item, draw)

    def _read(self, item: int, draw: Draw | None = None) -> Sample | list[Sample]:
        row, where = self._row(item)
        return self._decoder.decode(row, where, draw, self._first_kind)

    def _samples_digest(self, count: int) -> bytes:
        """A digest of 16 of the first `count` items, as epoch 0 of seed 0 draws them."""
        return samples_digest(lambda item: self._read(item, Draw(item, 0, 0)), spread(count))


class Jsonl(RowSource):
    """The non-blank lines of one or several JSONL files, concatenated.

    `paths` is a path, a pattern such as `"data/*.jsonl"`, or a list of either. Matches of a
    pattern are sorted; a list keeps its order. An item is `transform(row)`, one sample or a list of
    several; without a transform, the tokens of `field` (default: `text`, or `input_ids` if the rows
    have no text). Rows with a list of `input_ids` are samples as they are, also for a
    `PlannedStream`. A transform may have parameters named `sample_id`, `epoch` and `seed` (see
    `Draw`), so that what it draws is exact on resume. Files are scanned for line ends once, on
    first use. Pickling keeps this index but not the open files.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.jsonl").write_text('{"text": "ab"}\\n\\n{"text": "c"}\\n')
    ...     source = Jsonl(f"{folder}/*.jsonl")
    ...     len(source), source[1]["input_ids"].tolist()
    (2, [99])
    """

    def __init__(
        self,
        paths: Paths,
        *,
        field: str | None = None,
        tokenizer: Any = None,
        transform: Transform | None = None,
    ) -> None:
        self.paths = files_of(paths)
        self._files = [LineFile(path) for path in self.paths]
        self._decoder = RowDecoder(field, as_tokenize(tokenizer), ItemTransform.of(transform))

    @property
    def has_tokens(self) -> bool:
        """Whether the first row is a sample as it is, with `input_ids`. Reads it."""
        return len(self) > 0 and self._decoder.has_tokens(self._row(0)[0])

    def counting(self) -> Jsonl:
        """The same rows, of which only tokens are counted: labels and masks may be lost."""
        other = copy(self)
        other._decoder = replace(self._decoder, counting=True)
        return other

    def _row(self, item: int) -> tuple[Any, str]:
        shard, number = self._locate(item)
        file = self._files[shard]
        where = f"{file.path}, line {file.number(number)}"
        try:
            row = json.loads(file[number].decode("utf-8-sig").strip())
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: not JSON ({error}). Write one JSON value per line."
            ) from None
        return row, where

    @cached_property
    def fingerprint(self) -> str:
        """Covers 16 samples as they are read, so also tokenizer, field and transform; number of
        lines, sizes and 64 blocks of 64 KiB of the files (see `files_digest`). Not their names."""
        digest = hashlib.blake2b(f"jsonl {len(self)} ".encode(), digest_size=16)
        digest.update(files_digest(self.paths))
        digest.update(self._samples_digest(len(self)))
        return digest.hexdigest()

    @cached_property
    def _first_kind(self) -> str | None:  # type: ignore[override]
        """What is read of the first row; None if it cannot be read."""
        try:
            return self._decoder.kind_of(self._row(0)[0])
        except InputError:
            return None

    def _shard_sizes(self) -> list[int]:
        return [len(file) for file in self._files]


# Parquet ------------------------------------------------------------------------------------------

_GROUPS_KEPT = 4


class ParquetText(RowSource):
    """The rows of one or several Parquet files, concatenated; needs pyarrow.

    `paths` is a path, a pattern such as `"data/*.parquet"`, or a list of either. Matches of a
    pattern are sorted; a list keeps its order. An item is `transform(row)`, one sample or a list of
    several; without a transform, the tokens of `field`, and no other column is read. A transform
    may have parameters named `sample_id`, `epoch` and `seed` (see `Draw`).

    Footers are read on first use. Parquet is decoded by row group, and the last four groups are
    cached. So reading in order is fast, but reading in shuffled order decodes a group for almost
    every row; write a `TokenFile` first to shuffle.

        ParquetText(["a.parquet", "b.parquet"], field="content", tokenizer=tokenizer)
    """

    def __init__(
        self,
        paths: Paths,
        *,
        field: str = "text",
        tokenizer: Any = None,
        transform: Transform | None = None,
    ) -> None:
        self.paths = files_of(paths)
        self._decoder = RowDecoder(field, as_tokenize(tokenizer), ItemTransform.of(transform))
        self._reset()

    def _reset(self) -> None:
        self._decoded: OrderedDict[int, Any] = OrderedDict()  # group -> table, newest last
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_decoder": self._decoder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def _row(self, item: int) -> tuple[Any, str]:
        file, number = self._locate(item)
        offsets = self._index.offsets
        group = int(np.searchsorted(offsets, item, "right")) - 1  # skips empty groups
        row = self._table(group).slice(item - int(offsets[group]), 1).to_pylist()[0]
        return row, f"{self.paths[file]}, row {number}"

    def _shard_sizes(self) -> list[int]:
        ends = [*self._index.first[1:], len(self._index.file)]
        sizes: list[int] = np.diff(self._index.offsets[[0, *ends]]).tolist()
        return sizes

    @cached_property
    def fingerprint(self) -> str:
        """Covers 16 samples of the first row group as they are read, so also tokenizer, field and
        transform; the size and footer (counts, schema, statistics) of every file, and 64 blocks of
        64 KiB (see `files_digest`). Not the names of files."""
        index = self._index
        digest = hashlib.blake2b(f"parquet {index.digest} ".encode(), digest_size=16)
        digest.update(files_digest(self.paths))
        group = int(index.offsets[index.offsets > 0][0]) if len(self) else 0
        digest.update(self._samples_digest(group))
        return digest.hexdigest()

    @cached_property
    def _index(self) -> _GroupIndex:
        digest = hashlib.blake2b(digest_size=16)
        counts: list[int] = []
        files: list[int] = []
        first: list[int] = []
        for number, path in enumerate(self.paths):
            metadata, about = self._footer(path)
            digest.update(about)
            first.append(len(counts))
            counts += [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            files += [number] * metadata.num_row_groups
        offsets = offsets_of(np.array(counts, np.int64))
        return _GroupIndex(offsets, np.array(files, np.int64), first, digest.hexdigest())

    def _footer(self, path: Path) -> tuple[Any, bytes]:
        """The metadata of a file, and its size and footer as bytes for the fingerprint."""
        with reading(path) as parquet:
            metadata = parquet.read_metadata(path)
            with path.open("rb") as file:
                size = file.seek(-8, os.SEEK_END) + 8  # ... footer | its size, 4 bytes | PAR1
                length = int.from_bytes(file.read(4), "little")
                file.seek(size - 8 - length)
                about = f" {size} {metadata.num_rows} ".encode() + file.read(length)
            names = metadata.schema.to_arrow_schema().names
        if self._decoder.transform.function is None and self._decoder.field not in names:
            raise InputError(
                f"{path} has no column {self._decoder.field!r}; it has {', '.join(names[:20])}. "
                f"{other_field(names)}, or pass a transform."
            )
        return metadata, about

    def _table(self, group: int) -> Any:
        """A decoded row group, from the cache if possible. One thread decodes at a time."""
        with self._lock:
            if group not in self._decoded:
                file = int(self._index.file[group])
                transformed = self._decoder.transform.function is not None
                columns = None if transformed else [self._decoder.field]
                number = group - self._index.first[file]
                path = self.paths[file]
                with reading(path) as parquet, parquet.ParquetFile(path) as opened:
                    self._decoded[group] = opened.read_row_group(number, columns=columns)
                while len(self._decoded) > _GROUPS_KEPT:
                    self._decoded.popitem(last=False)
            self._decoded.move_to_end(group)
            return self._decoded[group]


class _GroupIndex(NamedTuple):
    """Row groups of all files: where their rows start, and their file; each file's first group."""

    offsets: IntArray
    file: IntArray
    first: list[int]
    digest: str


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Yield pyarrow.parquet, and turn its errors into a FileError."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise FileError(
            f"reading {path} needs pyarrow, which is not installed. Install it with: "
            f"pip install 'evenstep[parquet]'."
        ) from None
    try:
        yield parquet
    except (OSError, ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise FileError(
            f"{path} is not readable Parquet ({reason}). Check the path, or write the file again."
        ) from None


# Lengths of columns of token lists ----------------------------------------------------------------

_ROWS_AT_ONCE = 10_000  # of a dataset at a time


def is_token_list(kind: Any) -> bool:
    """Whether an Arrow type is a list of integers."""
    from pyarrow import types

    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(listed and types.is_integer(kind.value_type))


def list_lengths(column: Any, name: str, where: str, first: int = 0) -> IntArray:
    """The lengths of the lists of an Arrow column; `first` is the number of its first row."""
    from pyarrow import compute

    if not is_token_list(column.type):
        raise _not_lists(column.type, name, where)
    counts = compute.list_value_length(column)
    if counts.null_count:
        at = first + int(compute.index(compute.is_null(counts), True).as_py())
        raise InputError(
            f"{where}: row {at} has None as {name!r}, expected a list of token ids. Remove the "
            f"row, or correct it."
        )
    return np.asarray(counts.to_numpy(), np.int64)


def parquet_list_lengths(paths: Sequence[Path], name: str, progress: Progress) -> IntArray | None:
    """The lengths of the token lists of a column of Parquet files, one row group after the other.

    None if the column of the first file holds anything else.
    """
    return _column_lengths([_parquet_column(path, name) for path in paths], name, progress)


def dataset_list_lengths(
    datasets: Mapping[str, Any], name: str, progress: Progress
) -> IntArray | None:
    """The same for a column of Hugging Face datasets, which errors name by their keys."""
    columns = [_dataset_column(dataset, name, where) for where, dataset in datasets.items()]
    return _column_lengths(columns, name, progress)


class _ListColumn(NamedTuple):
    """A column of one file or dataset: its Arrow type, and its rows part by part."""

    where: str
    kind: Any
    rows: int
    parts: Callable[[], Iterator[Any]]


def _column_lengths(
    columns: Sequence[_ListColumn], name: str, progress: Progress
) -> IntArray | None:
    if not is_token_list(columns[0].kind):
        return None
    lengths = [np.zeros(0, np.int64)]
    done, total = 0, sum(column.rows for column in columns)
    for column in columns:
        before = done
        if not is_token_list(column.kind):
            raise _not_lists(column.kind, name, column.where)
        for part in column.parts():
            lengths.append(list_lengths(part, name, column.where, done - before))
            done += len(part)
            progress(done, total)
    return np.concatenate(lengths)


def _parquet_column(path: Path, name: str) -> _ListColumn:
    with reading(path) as parquet:
        kind = _type_in_schema(parquet.read_schema(path), name, str(path))
        rows = int(parquet.read_metadata(path).num_rows)

    def groups() -> Iterator[Any]:
        with reading(path) as parquet, parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=[name]).column(name)

    return _ListColumn(str(path), kind, rows, groups)


def _dataset_column(dataset: Any, name: str, where: str) -> _ListColumn:
    kind = _type_in_schema(dataset.features.arrow_schema, name, where)

    def parts() -> Iterator[Any]:
        column = dataset.select_columns([name]).with_format("arrow")
        for begin in range(0, len(dataset), _ROWS_AT_ONCE):
            yield column[begin : begin + _ROWS_AT_ONCE][name]

    return _ListColumn(where, kind, len(dataset), parts)


def _not_lists(kind: Any, name: str, where: str) -> InputError:
    return InputError(
        f"{where}: the column {name!r} holds {kind}, expected lists of integers. Choose another "
        f"column."
    )


def _type_in_schema(schema: Any, name: str, where: str) -> Any:
    if name not in schema.names:
        raise InputError(
            f"{where} has no column {name!r}; it has {', '.join(schema.names[:20])}. "
            f"{other_field(schema.names)}."
        )
    return schema.field(name).type


# Saved datasets of Hugging Face -------------------------------------------------------------------


class SavedDatasets(RowSource):
    """Rows of saved datasets, decoded into samples. Every process opens them on first use."""

    def __init__(self, paths: list[Path], decoder: RowDecoder) -> None:
        self.paths, self._decoder = paths, decoder

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_decoder": self._decoder}

    @property
    def fingerprint(self) -> str:
        """Those of the datasets."""
        return ",".join(str(dataset._fingerprint) for dataset in self._datasets)

    def _row(self, item: int) -> tuple[Any, str]:
        shard, number = self._locate(item)
        return self._datasets[shard][number], f"{self.paths[shard]}, row {number}"

    def _shard_sizes(self) -> list[int]:
        return [len(dataset) for dataset in self._datasets]

    @cached_property
    def _datasets(self) -> list[Any]:
        return [load_saved_dataset(path) for path in self.paths]


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder holds a saved dataset, or several by name."""
    one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def load_saved_dataset(path: Path) -> Any:
    """The dataset in a folder, memory-mapped. Rows are plain Python objects."""
    try:
        from datasets import load_from_disk
    except ImportError:
        raise ConfigError(
            f"reading {path} needs datasets, which is not installed. Install it with: "
            f"pip install 'evenstep[datasets]'."
        ) from None
    if (path / "dataset_dict.json").is_file():
        names = sorted(each.name for each in path.iterdir() if is_saved_dataset(each))
        raise FileError(
            f"{path} holds several datasets: {', '.join(names)}. Name one, such as "
            f"{path / names[0] if names else path}."
        )
    try:
        return load_from_disk(str(path)).with_format(None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise FileError(
            f"{path} is not a saved Hugging Face dataset ({reason}). Save one with save_to_disk."
        ) from None
