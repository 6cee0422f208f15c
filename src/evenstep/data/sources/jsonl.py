"""Jsonl: files of one JSON value per line, read in any order."""

from __future__ import annotations

import hashlib
import json
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray, offsets_of
from evenstep.data.sources.content import samples_digest, spread
from evenstep.data.sources.files import Paths, files_digest, files_of
from evenstep.data.sources.lines import LineFile
from evenstep.data.sources.source import Draw, Sample
from evenstep.data.sources.text import RowDecoder, as_tokenize
from evenstep.data.sources.transform import ItemTransform, Transform
from evenstep.errors import InputError


class Jsonl:
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

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        return self._read(item)

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self._decoder.transform.seeded

    def drawn(self, item: int, draw: Draw) -> Sample | list[Sample]:
        """An item with a seeded transform."""
        return self._read(item, draw)

    @property
    def has_tokens(self) -> bool:
        """Whether the first row is a sample as it is, with `input_ids`. Reads it."""
        return len(self) > 0 and self._decoder.has_tokens(self._row(0)[0])

    def counting(self) -> Jsonl:
        """The same rows, of which only tokens are counted: labels and masks may be lost."""
        other = copy(self)
        other._decoder = replace(self._decoder, counting=True)
        return other

    def _read(self, item: int, draw: Draw | None = None) -> Sample | list[Sample]:
        row, where = self._row(item)
        return self._decoder.decode(row, where, draw, self._first_kind)

    def _row(self, item: int) -> tuple[Any, str]:
        """(the row, its file and line)."""
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        which = int(np.searchsorted(self._starts, item, "right")) - 1  # skips empty files
        file, number = self._files[which], item - int(self._starts[which])
        where = f"{file.path}, line {file.number(number)}"
        try:
            row = json.loads(file[number].decode("utf-8-sig").strip())
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: not JSON ({error}). Write one JSON value per line."
            ) from None
        return row, where

    def _first_drawn(self, item: int) -> Sample | list[Sample]:
        """The item as epoch 0 of seed 0 draws it."""
        return self._read(item, Draw(item, 0, 0))

    @cached_property
    def fingerprint(self) -> str:
        """Covers 16 samples as they are read, so also tokenizer, field and transform; number of
        lines, sizes and 64 blocks of 64 KiB of the files (see `files_digest`). Not their names."""
        digest = hashlib.blake2b(f"jsonl {len(self)} ".encode(), digest_size=16)
        digest.update(files_digest(self.paths))
        digest.update(samples_digest(self._first_drawn, spread(len(self))))
        return digest.hexdigest()

    @cached_property
    def _first_kind(self) -> str | None:
        """What is read of the first row; None if it cannot be read."""
        try:
            return self._decoder.kind_of(self._row(0)[0])
        except InputError:
            return None

    @cached_property
    def _starts(self) -> IntArray:
        return offsets_of(np.array([len(file) for file in self._files], np.int64))
