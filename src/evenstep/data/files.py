"""Files of rows: paths and patterns, lines, Jsonl, ParquetText and saved datasets."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import threading
import weakref
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.plan_file import reading
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.text import counted, short_repr
from evenstep.data.source import (
    TARGETS,
    Draw,
    ItemTransform,
    Progress,
    Sample,
    Transform,
    TransformedItems,
    digest_of,
    hides_tokens,
    spread,
)
from evenstep.errors import ConfigError, EvenstepError, FileError, InputError

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
    while not hasattr(files, "paths") and hasattr(files, "dataset"):
        files = files.dataset
    paths = getattr(files, "paths", ())
    if paths and not len(source):
        others = len(paths) - 1
        more = f" and {counted(others, 'more file')}" if others else ""
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


def optional(
    module: str, purpose: str, install: str, kind: type[EvenstepError] = ConfigError
) -> Any:
    """A module of an optional dependency, or an error of this kind that says how to install it."""
    package = module.partition(".")[0]
    try:
        import_module(package)
        return import_module(module)
    except ImportError:
        raise kind(
            f"{purpose} needs {package}, which is not installed. Install it with: pip install "
            f"'{install}'."
        ) from None


def files_digest(paths: Sequence[Path]) -> bytes:
    """A digest of sizes and contents in order; names and dates do not matter.

    Reads 64 blocks of 64 KiB, evenly spread over all files, and at least the first and the last
    block of each. So files of 4 MiB together are covered completely, and an edit inside a larger
    one may go unnoticed unless it changes the size.
    """
    digest = hashlib.blake2b(digest_size=16)
    blocks = max(2, _DIGEST_BLOCKS // len(paths))
    for path in paths:
        with reading(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            starts: Sequence[int] = range(0, size, _DIGEST_BLOCK)
            if len(starts) > blocks:
                starts = spread(size - _DIGEST_BLOCK + 1, blocks)
            digest.update(b" %d " % size)
            for start in starts:
                file.seek(start)
                digest.update(file.read(_DIGEST_BLOCK))
    return digest.digest()


class Shards(ABC):
    """What sources of several files share: their items are one list.

    `shards` holds the first item of every file, and the number of all: files of 3, 0 and 2 items
    -> [0, 3, 3, 5]. A reader that takes whole files takes `shards[k]` to `shards[k + 1]`. Every
    process opens all files on first use and keeps what `_open` returned.
    """

    paths: list[Path]

    @abstractmethod
    def _open(self, path: Path) -> Any:
        """An opened file, whose `len` is the number of its items."""

    def __getstate__(self) -> dict[str, Any]:
        """What was opened or computed on first use is not pickled."""
        kind = type(self)
        computed = [k for k in vars(self) if isinstance(getattr(kind, k, None), cached_property)]
        return {k: v for k, v in vars(self).items() if k not in computed}

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def shards(self) -> IntArray:
        """The first item of each file, and the number of all items."""
        return np.array(self._starts, np.int64)

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(map(len, self._files), initial=0))

    @cached_property
    def _files(self) -> list[Any]:
        return [self._open(path) for path in self.paths]

    def _locate(self, item: int) -> tuple[int, int]:
        """(file of an item, its number there)."""
        starts = self._starts
        if 0 <= item < starts[1]:
            return 0, item
        if not 0 <= item < starts[-1]:
            raise IndexError(f"item {item} of {starts[-1]}")
        shard = bisect_right(starts, item) - 1  # skips empty files
        return shard, item - starts[shard]


# Lines --------------------------------------------------------------------------------------------


class LineFile:
    """The rows of a JSONL file, one per line that is not blank. Line ends are found on first use.

    Pickling keeps this index but not the open file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_file"}

    def __len__(self) -> int:
        return len(self._index[0]) - 1

    def __getitem__(self, item: int) -> Any:
        starts = self._index[0]
        begin, end = int(starts[item]), int(starts[item + 1])  # with the blank lines after it
        line = _read_at(self._file, begin, end - begin)
        if len(line) != end - begin:
            raise self._changed(os.fstat(self._file).st_size)
        try:
            return json.loads(line.decode("utf-8-sig").strip())
        except (ValueError, RecursionError) as error:
            raise InputError(f"not JSON ({error}). Write one JSON value per line.") from None

    def number(self, item: int) -> int:
        """The number of an item's line, from 1: items of lines [a, blank, b] -> 1, 3."""
        return item + 1 + int(np.searchsorted(self._index[1], item, "right"))

    @cached_property
    def _index(self) -> tuple[IntArray, IntArray]:
        """Where each item's line starts, with the size of the file at the end; for each blank line,
        the number of items before it.

        A file of the lines "1", " " and "2" has the starts [0, 4, 5] (5 is its size), blanks [1].
        """
        starts, blanks, size = array("q"), array("q"), 0
        with reading(self.path), self.path.open("rb") as file:
            for line in file:
                if line.isspace():
                    blanks.append(len(starts))
                else:
                    starts.append(size)
                size += len(line)
        starts.append(size)
        return np.array(starts, np.int64), np.array(blanks, np.int64)

    @cached_property
    def _file(self) -> int:
        """The descriptor of the open file. It is not mapped: touching a page of a file that was
        shortened kills the process. Forked processes may share it: reads name their position."""
        with reading(self.path):
            file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, file)
        size = os.fstat(file).st_size
        if self._index[0][-1] != size:  # of this or another process
            raise self._changed(size)
        return file

    def _changed(self, size: int) -> FileError:
        return FileError(
            f"{self.path} has {size} bytes but had {self._index[0][-1]} when it was indexed. Do "
            f"not change the file while it is in use."
        )


def _read_at(file: int, begin: int, size: int) -> bytes:
    """So many bytes from `begin` on; fewer at the end of the file."""
    data = os.pread(file, size, begin)
    while len(data) < size and (more := os.pread(file, size - len(data), begin + len(data))):
        data += more  # the system reads 2 GiB at most
    return data


# Rows ---------------------------------------------------------------------------------------------

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Tokenize: TypeAlias = Callable[[str], Tokens]


def as_tokenize(tokenizer: Any = None) -> Tokenize:
    """A function from text to token ids, for any kind of tokenizer.

    None gives UTF-8 bytes as tokens. A callable is called; it returns ids or, as in
    `transformers`, a mapping with `input_ids`. Of other objects (`tokenizers`, `tiktoken`,
    `sentencepiece`), `encode` is called. The function can be pickled if the tokenizer can.

    >>> as_tokenize()("hé").tolist()
    [104, 195, 169]
    >>> as_tokenize(lambda text: {"input_ids": [ord(c) for c in text]})("ab")
    [97, 98]
    """
    if tokenizer is None:
        return _utf8
    encode = tokenizer if callable(tokenizer) else getattr(tokenizer, "encode", None)
    if callable(encode):
        return partial(_ids, encode)
    raise ConfigError(
        f"expected a tokenizer, got {type(tokenizer).__name__}. Pass a function from str to ids, "
        f"an object with an encode method, or None for UTF-8 bytes."
    )


def _utf8(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def _ids(encode: Callable[[str], Any], text: str) -> Tokens:
    encoded = encode(text)
    tokens: Tokens = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    return getattr(tokens, "ids", tokens)  # `tokenizers` gives an Encoding


def other_field(names: Collection[str]) -> str:
    """What to do about a row that lacks a field, but has fields of these names.

    >>> other_field(["messages", "id"])
    'This looks like chat data: set data.format to chat'
    """
    if "messages" in names:
        return "This looks like chat data: set data.format to chat"
    return "Set field to one of them"


class RowSource(Shards, TransformedItems):
    """What sources of rows share: a row of a file becomes a sample, or several.

    That is by `transform`, or as the tokens of its `field`, which is text or, without a tokenizer,
    a list of token ids. Without a field it is `text`, or `input_ids` of a row without text. A row
    with a list of `input_ids` is a sample as it is; labels and loss masks beside another field are
    an error, unless only tokens are counted.
    """

    _default_field: str | None = "text"

    def __init__(
        self,
        paths: Paths,
        *,
        field: str | None = None,
        tokenizer: Any = None,
        transform: Transform | None = None,
    ) -> None:
        self.paths = files_of(paths)
        self.field = field or self._default_field
        self.transform = ItemTransform.of(transform)
        self._tokenize = as_tokenize(tokenizer)
        self._counting = False

    def counting(self) -> Self:
        """The same rows, of which only tokens are counted: labels and masks may be lost."""
        other = copy(self)
        other._counting = True
        return other

    def list_lengths(self, progress: Progress | None = None) -> IntArray | None:
        """The lengths of the token lists in `field`, read without the tokens; None if the first
        file holds anything else, or a transform reads the rows."""
        columns = [] if self.transform.function else list(self._columns())
        return column_lengths(columns, progress) if columns else None

    def _columns(self) -> Iterable[ListColumn]:
        """The column `field` of every file, if files have columns."""
        return ()

    def _row(self, item: int) -> Any:
        shard, number = self._locate(item)
        return self._files[shard][number]

    def _place(self, shard: int, number: int) -> str:
        """What errors call a row."""
        return f"{self.paths[shard]}, row {number}"

    def _read(self, item: int, draw: Draw | None = None) -> Sample | list[Sample]:
        shard, number = self._locate(item)
        try:
            row = self._files[shard][number]
            plain = self.transform.function is None
            return self._decode(row) if plain else self.transform(row, draw)
        except Exception as error:
            place = self._place(shard, number)
            error.add_note(f"raised for {place}")
            if isinstance(error, InputError):
                error.args = (f"{place}: {error}",)
            raise

    def _decode(self, row: Any) -> Sample:
        field = self._checked_field(row)
        value = row[field]
        is_sample = field == "input_ids" and isinstance(value, list)  # as it is
        if not (is_sample or self._counting):
            _check_masks(row, field)
        if not isinstance(value, str):
            tokens = self._token_list(value, field)
            if not self._counting and hides_tokens(row):
                raise InputError(
                    "'attention_mask' hides tokens, which are padding. Remove them from the row, "
                    "or pass a transform."
                )
            return {**row, "input_ids": tokens} if is_sample else {"input_ids": tokens}
        array = np.asarray(self._tokenize(value))
        if array.ndim == 1 and not len(array):
            array = np.zeros(0, np.int64)  # numpy makes [] floats
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(
                f"the tokenizer must return a flat sequence of integer ids, got {array.dtype} of "
                f"shape {array.shape}. Pass a function from one text to its ids."
            )
        return {"input_ids": array}

    def _field_of(self, row: Any) -> str | None:
        """The field that is read of a row; None if the row lacks it, or a transform reads it."""
        if self.transform.function is not None or not isinstance(row, Mapping):
            return None
        field = self.field or ("text" if "text" in row else "input_ids")
        return field if field in row else None

    @cached_property
    def _first_field(self) -> str | None:
        """What is read of the first row, if rows decide that; None if it cannot be read."""
        try:
            return None if self.field else self._field_of(self._row(0))
        except InputError:
            return None

    def _checked_field(self, row: Any) -> str:
        if not isinstance(row, Mapping):
            raise InputError(
                f"expected a row with fields, got {type(row).__name__}. Write one object per row, "
                f"or pass a transform."
            )
        field = self._field_of(row)
        if field is None:
            has = ", ".join(map(repr, list(row)[:20])) or "none"
            raise InputError(
                f"no field {self.field or 'text'!r}; the row has {has}. {other_field(row)}, or "
                f"pass a transform."
            )
        if self._first_field not in (None, field):
            raise InputError(
                f"the row has {field!r}, but the first one has {self._first_field!r}. Keep rows of "
                f"text and rows of tokens in separate files, or pass a transform."
            )
        if self.field is None and self._tokenize is _utf8 and {"text", "input_ids"} <= row.keys():
            raise InputError(
                "the row has both 'text' and 'input_ids'. Set field to one of them, or pass a "
                "transform."
            )
        return field

    def _token_list(self, value: Any, field: str) -> NDArray[np.integer[Any]]:
        fault, remedy = "", "Correct the row, or pass a transform"
        if not isinstance(value, list):
            fault = f"must be a str, got {type(value).__name__}"
        elif odd := [token for token in value if type(token) is not int]:
            fault = f"has {short_repr(odd[0])} in its list, expected token ids"
        elif self._tokenize is not _utf8:
            fault = "is a list of token ids, on which the tokenizer has no effect"
            remedy = "Remove the tokenizer, or choose another field"
        if fault:
            raise InputError(f"field {field!r} {fault}. {remedy}.")
        return np.array(value, np.int64)


def _check_masks(row: Mapping[str, Any], field: str) -> None:
    """Raise if a row says which tokens are trained, and that would be lost."""
    for name in TARGETS:
        value = row.get(name)
        if value is None or (name == "labels" and not isinstance(value, list)):
            continue  # a label of the whole text is not about tokens
        remedy = f"Remove {name!r}"
        if "input_ids" in row:
            remedy = f"Set field to 'input_ids', which is read with {name!r}"
        elif isinstance(row[field], list):
            remedy = f"Rename {field!r} to 'input_ids', or remove {name!r}"
        raise InputError(
            f"the row has {name!r}, but only {field!r} is read. {remedy}, or pass a transform."
        )


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

    _default_field = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self)}

    def _open(self, path: Path) -> LineFile:
        return LineFile(path)

    @property
    def has_tokens(self) -> bool:
        """Whether the first row is a sample as it is, with `input_ids`. Reads it."""
        row: Any = self._row(0) if len(self) else {}
        return self._field_of(row) == "input_ids" and isinstance(row["input_ids"], list)

    def _place(self, shard: int, number: int) -> str:
        return f"{self.paths[shard]}, line {self._files[shard].number(number)}"

    @cached_property
    def fingerprint(self) -> str:
        """Covers 16 samples as they are read, so also tokenizer, field and transform; number of
        lines, sizes and 64 blocks of 64 KiB of the files (see `files_digest`). Not their names."""
        samples = self._samples_digest(len(self))
        return digest_of(f"jsonl {len(self)} ", files_digest(self.paths), samples).hex()


# Parquet ------------------------------------------------------------------------------------------

_GROUPS_KEPT = 4


class ParquetText(RowSource):
    """The rows of one or several Parquet files, concatenated; needs pyarrow.

    `paths` is a path, a pattern such as `"data/*.parquet"`, or a list of either. Matches of a
    pattern are sorted; a list keeps its order. An item is `transform(row)`, one sample or a list of
    several; without a transform, the tokens of `field` (default: `text`). Of other columns only
    labels and masks are read, under the rules of `Jsonl`. A transform may have parameters
    named `sample_id`, `epoch` and `seed` (see `Draw`).

    Footers are read on first use. Parquet is decoded by row group, and the last four groups are
    cached. So reading in order is fast, but reading in shuffled order decodes a group for almost
    every row; write a `TokenFile` first to shuffle.

        ParquetText(["a.parquet", "b.parquet"], field="content", tokenizer=tokenizer)
    """

    def _open(self, path: Path) -> _ParquetFile:
        with reading_parquet(path) as parquet:
            metadata = parquet.read_metadata(path)
            schema = metadata.schema.to_arrow_schema()
        if self.transform.function is None:
            check_column(schema, str(self.field), f"{path}")
        groups = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        offsets = offsets_of(np.array(groups, np.int64))
        return _ParquetFile(path, schema, offsets, self._tables)

    @cached_property
    def _tables(self) -> Callable[[Path, int], Any]:
        """(file, row group) -> its table, from the cache if possible. One thread decodes at a
        time."""
        lock = threading.Lock()
        names = () if self._counting else (*TARGETS, "attention_mask")

        @lru_cache(_GROUPS_KEPT)
        def decoded(path: Path, group: int) -> Any:
            with reading_parquet(path) as parquet, parquet.ParquetFile(path) as opened:
                columns = None
                if self.transform.function is None:
                    known = {*opened.schema_arrow.names}
                    if not is_token_list(opened.schema_arrow.field(self.field).type):
                        known -= {"attention_mask"}
                    columns = [self.field, *(name for name in names if name in known)]
                return opened.read_row_group(group, columns=columns)

        def table(path: Path, group: int) -> Any:
            with lock:
                return decoded(path, group)

        return table

    @cached_property
    def fingerprint(self) -> str:
        """Covers 16 samples of the first row group as they are read, so also tokenizer, field and
        transform; the size and footer (counts, schema, statistics) of every file, and 64 blocks of
        64 KiB (see `files_digest`). Not the names of files."""
        footers = hashlib.blake2b(digest_size=16)
        for rows in self._files:
            with reading_parquet(rows.path), rows.path.open("rb") as file:
                size = file.seek(-8, os.SEEK_END) + 8  # ... footer | its size, 4 bytes | PAR1
                length = int.from_bytes(file.read(4), "little")
                file.seek(size - 8 - length)
                footers.update(f" {size} {len(rows)} ".encode() + file.read(length))
        first = next((file.offsets for file in self._files if len(file)), np.zeros(1, np.int64))
        samples = self._samples_digest(int(first[first > 0][0]) if len(self) else 0)
        about = f"parquet {footers.hexdigest()} "
        return digest_of(about, files_digest(self.paths), samples).hex()

    def _decode(self, row: Any) -> Sample:
        """Without an `attention_mask`, which is 1 for all tokens, and without nulls, which stand in
        columns that only other rows have."""
        sample = super()._decode(row)
        kept = {name for name in sample if sample[name] is not None} - {"attention_mask"}
        return {name: sample[name] for name in sample if name in kept}

    def _columns(self) -> Iterable[ListColumn]:
        name = str(self.field)

        def chunks(path: Path) -> Iterator[Any]:
            with reading_parquet(path) as parquet, parquet.ParquetFile(path) as opened:
                for group in range(opened.num_row_groups):
                    yield opened.read_row_group(group, columns=[name]).column(name)

        for file in self._files:
            kind = file.schema.field(name).type
            yield ListColumn(str(file.path), name, kind, len(file), chunks(file.path))


@dataclass(frozen=True, slots=True)
class _ParquetFile:
    """A file: its schema, where its row groups start and the last one ends, and their tables."""

    path: Path
    schema: Any
    offsets: IntArray
    tables: Callable[[Path, int], Any]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        group = int(np.searchsorted(self.offsets, number, "right")) - 1  # skips empty groups
        rows = self.tables(self.path, group).slice(number - int(self.offsets[group]), 1)
        row: dict[str, Any] = rows.to_pylist()[0]
        return row


@contextmanager
def reading_parquet(path: Path) -> Iterator[Any]:
    """Yield pyarrow.parquet, and turn its errors into a FileError."""
    parquet = optional("pyarrow.parquet", f"reading {path}", "evenstep[parquet]", FileError)
    from pyarrow import ArrowException

    try:
        yield parquet
    except (OSError, ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise FileError(
            f"{path} is not readable Parquet ({reason}). Check the path, or write the file again."
        ) from None


# Lengths of columns of token lists ----------------------------------------------------------------

_ROWS_AT_ONCE = 10_000  # of a dataset at a time


class ListColumn(NamedTuple):
    """A column of one file or dataset: its Arrow type, and its rows chunk by chunk."""

    where: str
    name: str
    kind: Any
    rows: int
    chunks: Iterator[Any]


def is_token_list(kind: Any) -> bool:
    """Whether an Arrow type is a list of integers."""
    from pyarrow import types

    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(listed and types.is_integer(kind.value_type))


def list_lengths(column: Any, name: str, where: str, first: int = 0) -> IntArray:
    """The lengths of the lists of an Arrow column; `first` is the number of its first row."""
    from pyarrow import compute

    _check_token_lists(column.type, name, where)
    counts = compute.list_value_length(column)
    if counts.null_count:
        at = first + int(compute.index(compute.is_null(counts), True).as_py())
        raise InputError(
            f"{where}: row {at} has None as {name!r}, expected a list of token ids. Remove the "
            f"row, or correct it."
        )
    return np.asarray(counts.to_numpy(), np.int64)


def column_lengths(columns: Sequence[ListColumn], progress: Progress | None) -> IntArray | None:
    """The lengths of the token lists of columns of several files or datasets; None if the first
    one holds anything else."""
    if not is_token_list(columns[0].kind):
        return None
    lengths = [np.zeros(0, np.int64)]
    done, total = 0, sum(column.rows for column in columns)
    for where, name, _, _, chunks in columns:
        before = done
        for chunk in chunks:
            lengths.append(list_lengths(chunk, name, where, done - before))
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    return np.concatenate(lengths)


def dataset_column(dataset: Any, name: str, where: str) -> ListColumn:
    """A column of a Hugging Face dataset, which errors name `where`."""
    schema = dataset.features.arrow_schema
    check_column(schema, name, where)
    tables = dataset.select_columns([name]).with_format("arrow").iter(_ROWS_AT_ONCE)
    chunks = (table[name] for table in tables)
    return ListColumn(where, name, schema.field(name).type, len(dataset), chunks)


def check_column(schema: Any, name: str, where: str) -> None:
    """Raise unless an Arrow schema has the column."""
    if name not in schema.names:
        raise InputError(
            f"{where} has no column {name!r}; it has {', '.join(schema.names[:20])}. "
            f"{other_field(schema.names)}, or pass a transform."
        )


def _check_token_lists(kind: Any, name: str, where: str) -> None:
    if not is_token_list(kind):
        raise InputError(
            f"{where}: the column {name!r} holds {kind}, expected lists of integers. Choose "
            f"another column."
        )


# Saved datasets of Hugging Face -------------------------------------------------------------------


class SavedDatasets(RowSource):
    """Rows of datasets that were saved to folders, decoded into samples."""

    def _open(self, path: Path) -> Any:
        """The dataset in a folder, memory-mapped. Rows are plain Python objects."""
        datasets = optional("datasets", f"reading {path}", "evenstep[datasets]")
        if (path / "dataset_dict.json").is_file():
            names = sorted(each.name for each in path.iterdir() if is_saved_dataset(each))
            raise FileError(
                f"{path} holds several datasets: {', '.join(names)}. Name one, such as "
                f"{path / names[0] if names else path}."
            )
        try:
            return datasets.load_from_disk(str(path)).with_format(None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise FileError(
                f"{path} is not a saved Hugging Face dataset ({reason}). Save one with "
                f"save_to_disk."
            ) from None

    @property
    def fingerprint(self) -> str:
        """Those of the datasets."""
        return ",".join(str(dataset._fingerprint) for dataset in self._files)

    def _columns(self) -> Iterable[ListColumn]:
        for path, dataset in zip(self.paths, self._files, strict=True):
            yield dataset_column(dataset, str(self.field), str(path))


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder holds a saved dataset, or several by name."""
    one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return one or (path / "dataset_dict.json").is_file()
