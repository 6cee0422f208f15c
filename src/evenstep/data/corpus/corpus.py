"""Corpus: the samples of files, and one token file of all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.core.plan_file import replace_file
from evenstep.core.ragged import IntArray
from evenstep.core.text import one_of, whole_number
from evenstep.data.corpus.chat import ChatEncoder, ChatTransform
from evenstep.data.corpus.counting import (
    Engine,
    Progress,
    counted,
    default_workers,
    unreadable_item,
)
from evenstep.data.corpus.files import corpus_files, format_of, statuses
from evenstep.data.corpus.formats import TOKENIZED, Format
from evenstep.data.corpus.known_counts import known_counts
from evenstep.data.corpus.saved_dataset import SavedDataset
from evenstep.data.corpus.tokenizer import check_folder, load_tokenizer, vocabulary
from evenstep.data.sources.jsonl import Jsonl
from evenstep.data.sources.measure import SamplesWithoutLoss
from evenstep.data.sources.megatron import MegatronTokens
from evenstep.data.sources.parquet import ParquetText
from evenstep.data.sources.source import LOSS_MASKS, Sample, SampleSource, read_samples
from evenstep.data.sources.text import RowDecoder, as_tokenize
from evenstep.data.sources.token_file import TokenFile
from evenstep.data.sources.token_writer import TokenFileWriter
from evenstep.data.sources.transform import ItemTransform, Transform
from evenstep.errors import ConfigError, EvenstepError, FileError, InputError, SampleError

_EVERY = 64  # samples between two reports


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Files, how to read them and how to turn their text into tokens.

    paths      files, folders or globs; several are read one after the other
    format     None: by the names of the files (.jsonl, .parquet, .tokens, Megatron's .bin and .idx;
               others are text); the folder of a saved Hugging Face dataset is a dataset
    field      the field of a row with its text or a list of token ids ("text" by default, or
               "input_ids" if the rows of a JSONL file have no text), or with the messages of a chat
               ("messages"). Labels and loss masks beside "input_ids" are read, except from Parquet
    tokenizer  folder of a Hugging Face tokenizer; None: UTF-8 bytes
    template   file with a chat template (Jinja); None: that of the tokenizer

    A text file is one sample, and so is a row of a JSONL or Parquet file or a dataset, or a
    document of a Megatron file. In a chat, only the tokens of the assistant count in the loss.
    Samples without tokens are left out.

    >>> Corpus(paths=("texts/",)).paths
    ('texts/',)
    """

    paths: str | tuple[str, ...]
    format: Format | None = None
    field: str | None = None
    tokenizer: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        given = (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)
        if not given or not all(given):
            raise ConfigError("data.paths must name at least one file, folder or glob.")
        object.__setattr__(self, "paths", given)
        if self.format is not None:
            one_of("data.format", self.format, Format)
        if self.template is not None and self.format != "chat":
            raise ConfigError("data.template is for chats. Set data.format to chat, or remove it.")
        if self.format is not None:
            self._refuse_idle(self.format)

    def _refuse_idle(self, kind: Format) -> None:
        """Refuse options that have no effect on a format."""
        if kind in ("text", *TOKENIZED) and self.field is not None:
            raise ConfigError(f"data.field has no effect on {kind} files. Remove it.")
        if kind in TOKENIZED and self.tokenizer is not None:
            raise ConfigError(f"data.tokenizer has no effect on {kind} files. Remove it.")

    def _found(self) -> tuple[list[Path], Format]:
        """The files and their format."""
        files = corpus_files((self.paths,) if isinstance(self.paths, str) else self.paths)
        kind = self.format or format_of(files)
        self._refuse_idle(kind)
        return files, kind

    def faults(self) -> list[str]:
        """What the settings name that does not exist, or has no effect on the files that do.

        >>> Corpus(paths="nowhere/*.jsonl", tokenizer="nowhere").faults()[1]
        'data.tokenizer: nowhere is not a folder. Give that of a tokenizer.'
        """
        found = []
        for check in (self._found, lambda: check_folder(self.tokenizer), self._template_text):
            try:
                check()
            except EvenstepError as error:
                found.append(str(error))
        return found

    def token_counts(
        self,
        *,
        workers: int | None = None,
        engine: Engine = "processes",
        progress: Progress | None = None,
    ) -> IntArray:
        """The number of tokens of every sample, 0 for those without, in the order of the files.

        Text is tokenized in `workers` processes (None: as many as there are cores, fewer for small
        files), or on Ray Data. Lengths of tokens are read without the tokens.

            np.save("lengths.npy", Corpus(paths="texts/", tokenizer="models/llama").token_counts())
        """
        one_of("engine", engine, Engine)
        if workers is not None:
            workers = whole_number("workers", workers)
        files, kind = self._found()
        report = progress or (lambda done, total: None)
        known = known_counts(kind, files, self.field or "text", report)
        if known is None:
            if workers is None and engine == "processes":
                workers = default_workers(files)
            with _in_words_of_settings():
                source = self._source(kind, files, masked=False)
                return counted(source, workers, engine, report)
        if engine != "processes" or self.tokenizer is not None:
            idle = "data.tokenizer" if self.tokenizer is not None else f"the engine {engine}"
            raise ConfigError(f"{idle} has no effect on lists of tokens. Remove it.")
        return known

    def stored(self, path: Path, progress: Progress | None = None) -> TokenFile:
        """All samples as one token file at `path`, written unless it already holds them."""
        files, kind = self._found()
        if kind == "tokens" and len(files) == 1:
            return TokenFile(files[0])
        key, beside = self._key(files), path.with_suffix(".json")
        if path.exists() and _text(beside) == key:
            return TokenFile(path)
        with _in_words_of_settings():
            self._write(path, kind, files, progress or (lambda done, total: None))
        replace_file(beside, key.encode())
        return TokenFile(path)

    def _write(self, path: Path, kind: Format, files: list[Path], progress: Progress) -> None:
        source = self._source(kind, files)
        columns: dict[str, Any] = {"loss_mask": np.uint8}
        if kind != "chat":
            first: Sample = next(self._read(source, 0)) if len(source) else {}
            columns = {name: _stored_type(name, first[name]) for name in _trained(first)}
        total, empty, without_loss = len(source), 0, SamplesWithoutLoss()
        with TokenFileWriter(path, dtype=np.int32, columns=columns) as writer:
            for item in range(total):
                for sample in self._read(source, item):
                    for name in _trained(sample) ^ columns.keys():
                        has = "has no" if name in columns else "has"
                        raise InputError(
                            f"data.paths: sample {item} {has} {name!r}, unlike the first one. Give "
                            f"it to every row or to none."
                        )
                    if len(sample["input_ids"]):
                        writer.append(sample)
                        without_loss.add(sample)
                    else:
                        empty += 1
                if item % _EVERY == 0:
                    progress(item, total)
            if empty == total:
                raise InputError("data.paths: no file has a token. Check the files.")
            without_loss.end()

    @staticmethod
    def _read(source: SampleSource, item: int) -> Iterator[Sample]:
        try:
            for _, sample in read_samples(source, item):
                yield sample
        except SampleError as error:
            raise unreadable_item(item, error.__cause__ or error) from None

    def _source(self, kind: Format, files: list[Path], masked: bool = True) -> Any:
        """The samples of the files; those of chats without a loss mask unless `masked`."""
        tokenizer = load_tokenizer(self.tokenizer)
        match kind:
            case "text":
                return TextFiles(files, tokenizer)
            case "tokens":
                return TokenFile(files)
            case "megatron":
                return MegatronTokens(files)
            case "chat":
                encoder = self._encoder(tokenizer)
                chat = ChatTransform(self.field or "messages", encoder, masked)
                return self._rows(format_of(files[:1]), files, None, chat, masked)
        return self._rows(kind, files, tokenizer, None, masked)

    def _rows(
        self,
        kind: Format,
        files: list[Path],
        tokenizer: Any,
        transform: Transform | None,
        masked: bool,
    ) -> Any:
        column = self.field or "text"
        if kind == "dataset":
            tokenize, made = as_tokenize(tokenizer), ItemTransform.of(transform)
            decoder = RowDecoder(column, tokenize, made, counting=not masked)
            return Joined([SavedDataset(file, decoder) for file in files])
        if kind == "parquet":
            return ParquetText(files, field=column, tokenizer=tokenizer, transform=transform)
        source = Jsonl(files, field=self.field, tokenizer=tokenizer, transform=transform)
        return source if masked else source.counting()

    def _encoder(self, tokenizer: Any) -> ChatEncoder:
        return ChatEncoder(tokenizer, self._template_text())

    def _template_text(self) -> str | None:
        template = None if self.template is None else _text(Path(self.template))
        if self.template is not None and template is None:
            raise FileError(f"data.template: {self.template} cannot be read. Check the path.")
        return template

    def vocabulary(self) -> int:
        """One more than the largest token id that the tokenizer gives."""
        return vocabulary(load_tokenizer(self.tokenizer))

    def _key(self, files: list[Path]) -> str:
        """What the token file depends on, as JSON."""
        named = [Path(each) for each in (self.tokenizer, self.template) if each is not None]
        found = statuses([*files, *named])
        seen = [[str(file), status.st_size, status.st_mtime_ns] for file, status in found]
        digest = hashlib.blake2b(json.dumps(seen).encode(), digest_size=16).hexdigest()
        options = {**asdict(self), "paths": list(self.paths)}
        return json.dumps({"options": options, "files": len(files), "digest": digest}, indent=1)


class TextFiles:
    """Every file is one sample: the tokens of its text."""

    def __init__(self, files: list[Path], tokenizer: Any) -> None:
        self._files, self._tokenize = files, as_tokenize(tokenizer)

    @property
    def fingerprint(self) -> str:
        """The names of the files."""
        return ",".join(map(str, self._files))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, item: int, /) -> Sample:
        path = self._files[item]
        text = _text(path)
        if text is None:
            raise FileError(f"{path} is not UTF-8 text. Leave it out, or set data.format.")
        return {"input_ids": np.asarray(self._tokenize(text))}


class Joined:
    """Several sources, one after the other."""

    def __init__(self, sources: list[Any]) -> None:
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    @property
    def fingerprint(self) -> str:
        """Those of the sources."""
        return ",".join(source.fingerprint for source in self._sources)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, item: int, /) -> Any:
        which = int(np.searchsorted(self._ends, item, "right"))
        before = int(self._ends[which - 1]) if which else 0
        return self._sources[which][item - before]


def _trained(sample: Sample) -> set[str]:
    """The names of the labels and loss masks that a sample has."""
    return {name for name in ("labels", *LOSS_MASKS) if name in sample}


def _stored_type(name: str, values: Any) -> np.dtype[Any]:
    """The dtype that labels or a mask are stored in."""
    if not isinstance(values, list):
        return np.asarray(values).dtype
    if name == "labels":
        return np.dtype(np.int64)
    return np.dtype(np.float64 if np.array([0, *values]).dtype.kind == "f" else np.uint8)


@contextmanager
def _in_words_of_settings() -> Iterator[None]:
    """Errors about rows name the settings of a corpus, which has no transform."""
    try:
        yield
    except EvenstepError as error:
        said = str(error).replace("Set field to", "Set data.field to")
        raise type(error)(said.replace(", or pass a transform", "")) from None


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
