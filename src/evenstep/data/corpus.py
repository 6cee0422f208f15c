"""Corpus: files of text, rows, chats or tokens -> one token file of all, or their lengths."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.plan_file import replace_file
from evenstep.core.ragged import IntArray
from evenstep.core.text import one_of, short_repr, whole_number
from evenstep.data.dataset import Mapped, known_lengths
from evenstep.data.files import (
    Jsonl,
    ParquetText,
    SavedDatasets,
    Tokenize,
    as_tokenize,
    is_saved_dataset,
    matches,
    optional,
    refuse_compressed,
)
from evenstep.data.source import (
    SPANS,
    TARGETS,
    Progress,
    Sample,
    SampleSource,
    SamplesWithoutLoss,
    digest_of,
    length_of,
    read_samples,
)
from evenstep.data.token_file import MegatronTokens, TokenFile, TokenFileWriter
from evenstep.errors import ConfigError, EvenstepError, FileError, InputError, SampleError

# Files and formats --------------------------------------------------------------------------------

Format: TypeAlias = Literal[
    "text", "jsonl", "chat", "pairs", "parquet", "dataset", "tokens", "megatron"
]

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tokens": "tokens",
    ".idx": "megatron",
}
"""By the end of a file's name; others are text. A folder that a Hugging Face dataset was saved to
is a dataset."""

TOKENS: dict[Format, type[TokenFile | MegatronTokens]] = {
    "tokens": TokenFile,
    "megatron": MegatronTokens,
}
"""Formats of tokens, which no tokenizer makes."""

COLUMNS: dict[Format, type[ParquetText | SavedDatasets]] = {
    "parquet": ParquetText,
    "dataset": SavedDatasets,
}
ROWS: dict[Format, type[Jsonl | ParquetText | SavedDatasets]] = {"jsonl": Jsonl, **COLUMNS}
"""Formats of rows, of which those in columns know the lengths of lists without reading them."""


def corpus_files(paths: Iterable[str]) -> list[Path]:
    """All files that the paths name, each once: a folder's in the order of their names.

    A saved Hugging Face dataset is named by its folder, and a Megatron pair by its `.idx` file.
    """
    files: dict[Path, Path] = {}  # by folder without links, and name
    for path in paths:
        new = [file for match in matches(path) for file in _files(match)]
        if not new:
            raise FileError(f"data.paths: {path} has no files. Check the path.")
        for file in new:
            refuse_compressed(file)
            files.setdefault(file.parent.resolve() / file.name, file)
    return list(files.values())


def _files(path: Path) -> list[Path]:
    if is_saved_dataset(path):
        return [path]
    if path.is_dir():  # without hidden files, and without linked folders, which may be cycles
        inner = [each for each in sorted(path.iterdir()) if not each.name.startswith(".")]
        shown = [each for each in inner if not (each.is_symlink() and each.is_dir())]
        return [file for each in shown for file in _files(each)]
    if path.is_symlink() and not path.exists():
        raise FileError(
            f"{path} is a link to a file that does not exist. Remove the link, or restore the file."
        )
    if path.is_file():
        index = path.with_suffix(".idx")
        return [index if path.suffix == ".bin" and index.is_file() else path]
    # Megatron's tools name both files by what they share.
    index = path.with_name(f"{path.name}.idx")
    return [index] if index.is_file() else []


def format_of(files: list[Path]) -> Format:
    """The format of the files by their names; all must have the same.

    >>> format_of([Path("a.jsonl"), Path("b.jsonl")])
    'jsonl'
    """
    kinds: dict[Format, Path] = {}
    for file in files:
        kinds["dataset" if file.is_dir() else FORMATS.get(file.suffix.lower(), "text")] = file
    if len(kinds) > 1:
        named = " and ".join(f"{file.name} ({kind})" for kind, file in kinds.items())
        raise ConfigError(
            f"data.paths mix formats: {named}. Set data.format, or name files of one format."
        )
    return next(iter(kinds))


def statuses(files: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Every file on disk with its size and dates: those of a dataset, both of a Megatron pair."""
    paths: list[Path] = []
    for file in files:
        data = file.with_suffix(".bin") if file.suffix == ".idx" else file
        paths += sorted(file.iterdir()) if file.is_dir() else dict.fromkeys([file, data])
    return [(path, path.stat()) for path in paths if path.exists()]


# Chats --------------------------------------------------------------------------------------------

Messages: TypeAlias = Sequence[Mapping[str, Any]]

_MARK = "{% generation %}"


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Turns the messages of a chat into `input_ids` and a `loss_mask`.

    With a Hugging Face tokenizer, its chat template is applied, or `template`. If the template
    marks what the assistant generates, these tokens count in the loss. Otherwise those that an
    assistant's message adds to the text before it do. Without a tokenizer, tokens are bytes and
    each message is `<role>\\n`, its content and `</role>\\n`. A message of the assistant with a
    `weight` of 0 does not count.

    `tools`, the functions that the assistant may call, and other options of `encode` are passed to
    the chat template.

    >>> chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    >>> sample = ChatEncoder().encode(chat)
    >>> bytes(sample["input_ids"][sample["loss_mask"] == 1].tolist())
    b'2</assistant>\\n'
    """

    tokenizer: Any = None
    template: str | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is None and self.template is not None:
            raise ConfigError("data.template needs data.tokenizer. Set it, or remove the template.")
        if self.tokenizer is not None and self._template is None:
            raise ConfigError(
                "the tokenizer has no chat template. Set data.template to a file with one."
            )

    @property
    def _template(self) -> str | None:
        template: str | None = self.template or getattr(self.tokenizer, "chat_template", None)
        return template

    def encode(
        self, messages: Messages, masked: bool = True, **options: Any
    ) -> dict[str, NDArray[Any]]:
        """The sample of one chat. Unless it is `masked`, the template is applied only once."""
        chat: object = messages
        if not (isinstance(chat, Sequence) and chat and all(map(_is_message, chat))):
            raise InputError(
                "a chat must be a list of messages, each with a role and a content that is text."
            )
        # Some templates write about tools if there are none, as in TRL.
        given = {name: each for name, each in options.items() if name != "tools" or each}
        names = list(given)
        if any(message.get("tool_calls") for message in messages):
            names.append("tool_calls")
        for name in names:
            if name not in str(self._template):
                raise InputError(
                    f"a chat has {name!r}, but no chat template that reads it. Set data.tokenizer "
                    f"or data.template to one that does, or remove it from the row."
                )
        trained = _trained_messages(messages)
        if self.tokenizer is None:
            return _as_bytes(messages, trained)
        if not masked:
            return {"input_ids": np.asarray(self._apply(messages, **given)["input_ids"], np.int64)}
        marked = _MARK in str(self._template)
        marks = {"return_assistant_tokens_mask": True} if marked else {}
        encoded = self._apply(messages, **marks, **given)
        ids = np.asarray(encoded["input_ids"], np.int64)
        mask = np.zeros(len(ids), np.uint8)
        if marked:
            found = encoded.get("assistant_masks", encoded.get("assistant_tokens_mask"))
            mask = np.array(found, np.uint8)
        for number, message in enumerate(messages):
            counts = trained[number]
            if message["role"] == "assistant" and marked == (not counts):
                mask[self._span(messages, number, ids.tolist(), **given)] = counts
        return {"input_ids": ids, "loss_mask": mask}

    def _apply(self, messages: Messages, **options: Any) -> Mapping[str, Any]:
        encoded: Mapping[str, Any] = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.template, tokenize=True, return_dict=True, **options
        )
        return encoded

    def _span(self, messages: Messages, number: int, whole: Sequence[int], **options: Any) -> slice:
        """The tokens that a message of the assistant adds to `whole`, those of the chat."""
        prompt, answered = messages[:number], messages[: number + 1]
        before = self._apply(prompt, add_generation_prompt=True, **options)["input_ids"]
        after = self._apply(answered, **options)["input_ids"]
        whole_so_far = list(whole[: len(after)])
        if list(after[: len(before)]) != list(before) or whole_so_far != list(after):
            remedy = "Mark them in the template with {% generation %} and {% endgeneration %}."
            if _MARK in str(self._template):
                remedy = f"Remove its weight, 0, from message {number}, or the message."
            raise InputError(
                f"the chat template changes earlier messages when later ones are added, so the "
                f"assistant's tokens are unknown. {remedy}"
            )
        return slice(len(before), len(after))


def _is_message(value: object) -> bool:
    keys = ("role", "content")
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in keys)


def _trained_messages(messages: Messages) -> list[bool]:
    """Whether each message counts in the loss: one of the assistant, unless its weight is 0."""
    trained = []
    for message in messages:
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise InputError(
                f"the 'weight' of a message must be 0 or 1, got {short_repr(weight)}. Messages of "
                f"weight 0 do not count in the loss; weigh samples by repeating them."
            )
        trained.append(message["role"] == "assistant" and weight != 0)
    return trained


def _as_bytes(messages: Messages, trained: Sequence[bool]) -> dict[str, NDArray[Any]]:
    texts: list[bytes] = []
    for message in messages:
        role = message["role"]
        texts += [f"<{role}>\n".encode(), f"{message['content']}</{role}>\n".encode()]
    counts = np.zeros(len(texts), np.uint8)  # per text
    counts[1::2] = trained
    return {
        "input_ids": np.frombuffer(b"".join(texts), np.uint8).astype(np.int64),
        "loss_mask": np.repeat(counts, [len(text) for text in texts]),
    }


def encode_row(encoder: ChatEncoder, field: str, masked: bool, row: Any) -> dict[str, NDArray[Any]]:
    """The sample of a row with the messages of a chat in `field`; see `ChatEncoder.encode`."""
    if not isinstance(row, Mapping) or field not in row:
        raise InputError(f"a chat must have a field {field!r} with its messages. Set data.field.")
    return encoder.encode(row[field], masked, **_options_of(row))


def _options_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row has for the chat template: tools, a list or a list as JSON, since columns need one
    schema for all rows, and others by name."""
    tools = row.get("tools")
    with suppress(ValueError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if tools is not None and not (isinstance(tools, list) and all(map(_is_tool, tools))):
        raise InputError("'tools' of a chat must be a list of JSON schemas, or JSON of one.")
    others = row.get("chat_template_kwargs")
    if not isinstance(others, Mapping | None):
        raise InputError("'chat_template_kwargs' of a chat must be values by name.")
    return {"tools": tools, **(others or {})}


def _is_tool(value: object) -> bool:
    return isinstance(value, Mapping)


def encode_columns(
    transform: Callable[[Any], Any], chats: Collection[str], row: Mapping[str, Any]
) -> Any:
    """`transform` of a row of columns, whose `chats`, tools and other options have the keys of all
    rows: without null ones."""
    names = {"tools", "chat_template_kwargs", *chats} & row.keys()
    return transform({**row, **{name: _without_nulls(row[name]) for name in names}})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


# Pairs --------------------------------------------------------------------------------------------


def encode_pair(encoder: ChatEncoder, masked: bool, row: Any) -> list[dict[str, NDArray[Any]]]:
    """The samples of a row with `chosen` and `rejected`, in this order.

    Each is a whole chat, or an answer to the `prompt` of the row; an answer or a prompt may be
    text. Only what differs between both chats counts in the loss, from the first message on.
    """
    if not isinstance(row, Mapping) or not {"chosen", "rejected"} <= row.keys():
        raise InputError("a pair must have the fields 'chosen' and 'rejected'.")
    chosen, rejected = (_chat_of(row, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise InputError("the chosen and the rejected answer are the same. Remove the pair.")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    options = _options_of(row)
    samples = [encoder.encode(chat, masked, **options) for chat in (chosen, rejected)]
    if not all(len(sample["input_ids"]) for sample in samples):  # left out, it would part others
        raise InputError("the chosen or the rejected chat has no tokens. Remove the pair.")
    if masked and any(message["role"] == "assistant" for message in chosen[:shared]):
        before = len(encoder.encode(chosen[:shared], False, **options)["input_ids"])
        for sample in samples:
            sample["loss_mask"][:before] = 0
    for name, sample in zip(("chosen", "rejected"), samples, strict=True):
        if masked and not sample["loss_mask"].any():
            raise InputError(
                f"no token of the {name} chat counts in the loss: after the messages that both "
                f"chats begin with, the assistant says nothing in it. Add an answer, or remove the "
                f"pair."
            )
    return samples


def _chat_of(row: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The messages of one answer of a pair, those of the prompt included."""
    answer, prompt = row[name], row.get("prompt")
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not (isinstance(answer, list) and answer and all(map(_is_message, answer))):
        raise InputError(f"{name!r} of a pair must be text, or a list of messages.")
    if answer[0]["role"] != "assistant":
        return answer  # a whole chat
    if not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
        raise InputError(f"{name!r} of a pair is an answer, but its row has no 'prompt'. Add it.")
    return [*prompt, *answer]


# Numbers of tokens --------------------------------------------------------------------------------

Engine: TypeAlias = Literal["processes", "ray"]
Counts: TypeAlias = Iterator[tuple[IntArray, IntArray]]
"""Items and their numbers of tokens, part by part."""

_TASK_ITEMS = 512  # items that one task counts
_PER_WORKER = 16  # tasks, so that none waits long for the last
_BYTES_PER_WORKER = 1 << 22  # of files that are worth one more process


def default_workers(files: Iterable[Path]) -> int:
    """As many processes as this one has cores, and at most one per 4 MiB of files."""
    size = sum(status.st_size for _, status in statuses(files))
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(free or 1, 1 + size // _BYTES_PER_WORKER)


def task_size(total: int, workers: int) -> int:
    """Items per task.

    >>> task_size(100, 2), task_size(10**6, 8)
    (3, 512)
    """
    return min(_TASK_ITEMS, max(1, total // (workers * _PER_WORKER)))


def read_item(source: SampleSource, item: int) -> list[Sample]:
    """The samples of an item. An error names its file and line."""
    try:
        return [sample for _, sample in read_samples(source, item)]
    except SampleError as error:
        cause = error.__cause__ or error
        said = (
            str(cause) if isinstance(cause, EvenstepError) else f"{type(cause).__name__}: {cause}"
        )
        notes = [note.removeprefix("raised for ") for note in getattr(cause, "__notes__", ())]
        where = notes[0] if notes else f"sample {item}"  # sources leave the place in a note
        raise InputError(said if where in said else f"{where}: {said}") from None


def _counts(source: SampleSource, items: IntArray) -> IntArray:
    return np.array(
        [sum(map(length_of, read_item(source, item))) for item in items.tolist()], np.int64
    )


def _count_here(source: SampleSource, workers: int) -> Counts:
    """In order, by this process or several."""
    total, size = len(source), task_size(len(source), workers)
    tasks = [np.arange(start, min(start + size, total)) for start in range(0, total, size)]
    if min(workers, len(tasks)) <= 1:
        yield from ((items, _counts(source, items)) for items in tasks)
        return
    # Processes that are forked would inherit locks of the tokenizer's threads.
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)), get_context("spawn"), _start_process, (source,)
    )
    # Processes that start while there is another main module do not import the user's script,
    # which would run it again: a source has nothing of it.
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        counts = pool.map(_counts_in_process, tasks)  # the processes start here
        sys.modules["__main__"] = main
        yield from zip(tasks, counts, strict=True)
    except BrokenProcessPool:
        raise InputError(
            "a process that counts tokens was killed, perhaps for its memory. Use fewer workers."
        ) from None
    finally:
        sys.modules["__main__"] = main
        pool.shutdown(cancel_futures=True)


_SOURCES: list[SampleSource] = []  # the one that a process counts


def _start_process(source: SampleSource) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends it through the first process
    _SOURCES.append(source)


def _counts_in_process(items: IntArray) -> IntArray:
    return _counts(_SOURCES[0], items)


# Ray Data -----------------------------------------------------------------------------------------

# Items are numbers, which every actor looks up in its own copy of the source. So the files must
# have the same paths on all nodes.


def _count_on_ray(source: SampleSource, workers: int | None) -> Counts:
    """In any order. `workers` is the largest number of actors; None: the cluster's CPUs."""
    optional("ray.data", "the engine ray", "ray[data]")
    import ray

    with _connected(ray):
        most = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        size = task_size(len(source), most)
        items = ray.data.range(len(source), override_num_blocks=-(-len(source) // size))
        parts = items.map_batches(
            _Counter,
            fn_constructor_args=(source,),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
        )
        for part in parts.iter_batches(batch_size=None, batch_format="numpy"):
            faults = [fault for fault in part["fault"].tolist() if fault]
            if faults:
                raise InputError(faults[0])
            yield part["id"], part["tokens"]


class _Counter:
    """Counts the tokens of blocks of items, in an actor.

    The first fault of a block travels as text, because Ray wraps what an actor raises.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source

    def __call__(self, block: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        items, fault = block["id"], ""
        tokens = np.zeros(len(items), np.int64)
        try:
            tokens = _counts(self._source, items)
        except EvenstepError as error:
            fault = str(error)
        return {"id": items, "tokens": tokens, "fault": np.array([fault] * len(items))}


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine. Ray's own progress is not shown."""
    started, context = not ray.is_initialized(), ray.data.DataContext.get_current()
    logger, bars = logging.getLogger("ray.data"), context.enable_progress_bars
    level = logger.level
    if started:
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    logger.setLevel(logging.ERROR)
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)
        if started:
            ray.shutdown()


# The corpus ---------------------------------------------------------------------------------------

_REPORT_EVERY = 64  # samples between two reports


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Files, how to read them and how to turn their text into tokens.

    paths      files, folders or globs; several are read one after the other
    format     None: by the names of the files (.jsonl, .parquet, .tokens, Megatron's .bin and .idx;
               others are text); the folder of a saved Hugging Face dataset is a dataset
    field      the field of a row with its text or a list of token ids ("text" by default, or
               "input_ids" if the rows of a JSONL file have no text), or with the messages of a chat
               ("messages"). Labels and loss masks beside "input_ids" are read
    tokenizer  folder of a Hugging Face tokenizer; None: UTF-8 bytes
    template   file with a chat template (Jinja); None: that of the tokenizer
    validation files, folders or globs of held-out samples, in the same format; or the share of the
               rows, files or documents of `paths` that is held out, such as 0.05

    A text file is one sample, and so is a row of a JSONL or Parquet file or a dataset, or a
    document of a Megatron file. In a chat, only the tokens of the assistant count in the loss. A
    row of pairs is two samples, the chosen chat and the rejected one (`docs/trainer.md`). Samples
    without tokens are left out.

    >>> Corpus(paths=("texts/",)).paths
    ('texts/',)
    """

    paths: str | tuple[str, ...]
    format: Format | None = None
    field: str | None = None
    tokenizer: str | None = None
    template: str | None = None
    validation: str | tuple[str, ...] | float | None = None

    def __post_init__(self) -> None:
        paths = (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)
        if not paths or not all(paths):
            raise ConfigError("data.paths must name at least one file, folder or glob.")
        object.__setattr__(self, "paths", paths)
        if self.format is not None:
            one_of("data.format", self.format, Format)
        if self.template is not None and self.format not in ("chat", "pairs"):
            raise ConfigError("data.template is for chats. Set data.format to chat, or remove it.")
        if isinstance(self.validation, int | float):
            if not 0 < self.validation < 1:
                raise ConfigError(
                    f"data.validation must be a share between 0 and 1 or files, got "
                    f"{self.validation}."
                )
        elif self.validation is not None:
            held_out = self.validation
            held_out = (held_out,) if isinstance(held_out, str) else tuple(held_out)
            object.__setattr__(self, "validation", held_out)
        if self.format is not None:
            self._refuse_idle(self.format)

    def _refuse_idle(self, kind: Format) -> None:
        """Refuse options that have no effect on a format."""
        if (kind in ("text", "pairs") or kind in TOKENS) and self.field is not None:
            raise ConfigError(f"data.field has no effect on {kind} files. Remove it.")
        if kind in TOKENS and self.tokenizer is not None:
            raise ConfigError(f"data.tokenizer has no effect on {kind} files. Remove it.")

    def _files_and_format(self) -> tuple[list[Path], Format]:
        """The files and their format."""
        files = corpus_files(self.paths)
        kind = self.format or format_of(files)
        self._refuse_idle(kind)
        return files, kind

    def faults(self) -> list[str]:
        """What the settings name that does not exist, or has no effect on the files that do.

        >>> Corpus(paths="nowhere/*.jsonl", tokenizer="nowhere").faults()[1]
        'data.tokenizer: nowhere is not a folder. Give that of a tokenizer.'
        """
        faults = []
        for check in (
            self._files_and_format,
            self._check_tokenizer,
            self._template_text,
            self._held_out_files,
        ):
            try:
                check()
            except EvenstepError as error:
                faults.append(str(error))
        return list(dict.fromkeys(faults))

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
        files, kind = self._files_and_format()
        report = progress or (lambda done, total: None)
        with _in_words_of_settings():
            known = self._known_counts(kind, files, report)
            if known is None:
                source = self._source(kind, files, masked=False)
                if engine == "ray" and len(source):
                    parts = _count_on_ray(source, workers)
                else:
                    parts = _count_here(source, workers or default_workers(files))
                counts, done = np.zeros(len(source), np.int64), 0
                for items, tokens in parts:
                    counts[items] = tokens
                    done += len(items)
                    report(done, len(source))
                return counts
        if engine != "processes" or self.tokenizer is not None:
            idle = "data.tokenizer" if self.tokenizer is not None else f"the engine {engine}"
            raise ConfigError(f"{idle} has no effect on lists of tokens. Remove it.")
        return known

    def _known_counts(self, kind: Format, files: list[Path], report: Progress) -> IntArray | None:
        """The number of tokens of every sample of these files; None if they hold text."""
        if kind in TOKENS:
            return known_lengths(TOKENS[kind](files))
        return known_lengths(ROWS[kind](files, field=self.field), report) if kind in ROWS else None

    def stored(self, path: Path, progress: Progress | None = None) -> TokenFile:
        """All samples but those held out as one token file at `path`, written unless it already
        holds them."""
        files, kind = self._files_and_format()
        split = isinstance(self.validation, float)
        if kind == "tokens" and len(files) == 1 and not split:
            return TokenFile(files[0])
        return self._stored(path, progress, held_out=False if split else None)

    def stored_held_out(self, path: Path, progress: Progress | None = None) -> TokenFile | None:
        """The samples that are held out, as one token file; None if none are.

        Its column `source` has the number of the entry of `paths`, or of `validation`, that each
        sample is from.
        """
        if self.validation is None:
            return None
        if isinstance(self.validation, float):
            return self._stored(path, progress, held_out=True)
        return self._held_out_files()._stored(path, progress, held_out=True)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources of samples that are held out."""
        entries = self._held_out_files().paths
        names = [Path(entry).name for entry in entries]
        return tuple(names if len({*names}) == len(names) else entries)

    def _held_out_files(self) -> Corpus:
        """The corpus that held-out samples are read from."""
        if self.validation is None or isinstance(self.validation, float):
            return self
        corpus = replace(self, paths=self.validation, validation=None)
        try:
            files, _ = corpus._files_and_format()
        except EvenstepError as error:
            raise type(error)(str(error).replace("data.paths", "data.validation")) from None
        trained = {file.resolve() for file in corpus_files(self.paths)}
        for file in files:
            if file.resolve() in trained:
                raise ConfigError(
                    f"data.validation: {file} is also a file of data.paths, so it would be trained "
                    f"on. Move it elsewhere, or name the other files in data.paths."
                )
        return corpus

    def _stored(self, path: Path, progress: Progress | None, held_out: bool | None) -> TokenFile:
        files, kind = self._files_and_format()
        key, beside = self._key(files, kind), path.with_suffix(".json")
        if not (path.exists() and _text(beside) == key):
            beside.unlink(missing_ok=True)  # a file of other samples may not be taken for its own
            with _in_words_of_settings():
                self._write(path, kind, files, progress or (lambda done, total: None), held_out)
            replace_file(beside, key.encode())
        return TokenFile(path)

    def _items(self, total: int, held_out: bool | None) -> IntArray:
        """The items to store: those held out, the others, or all."""
        if not isinstance(self.validation, float):
            return np.arange(total)
        count = max(1, round(self.validation * total))
        if count >= total:
            raise InputError(
                f"data.validation is {self.validation}, which leaves none of {total} rows to "
                f"train on. Lower it, or set it to files."
            )
        chosen = np.random.default_rng(0).permutation(total)[:count]
        return np.sort(chosen) if held_out else np.setdiff1d(np.arange(total), chosen)

    def _sources_of(self, items: IntArray, source: SampleSource, files: list[Path]) -> IntArray:
        """The number of the entry of `paths` that each item is from."""
        entries = {file: at for at, path in enumerate(self.paths) for file in corpus_files([path])}
        starts = getattr(source, "shards", np.arange(len(files) + 1))
        return np.array([entries[file] for file in files])[
            np.searchsorted(starts, items, "right") - 1
        ]

    def _write(
        self,
        path: Path,
        kind: Format,
        files: list[Path],
        progress: Progress,
        held_out: bool | None,
    ) -> None:
        source = self._source(kind, files)
        total, empty, without_loss = len(source), 0, SamplesWithoutLoss()
        items = self._items(total, held_out)
        sources = self._sources_of(items, source, files) if held_out else np.zeros_like(items)
        columns: dict[str, Any] = {"loss_mask": np.uint8}
        if kind not in ("chat", "pairs"):
            first: Sample = next(iter(read_item(source, 0)), {}) if total else {}
            columns = {name: _stored_type(name, first[name]) for name in _trained(first)}
        stored = {**columns, "source": np.uint16} if held_out else columns
        with TokenFileWriter(path, dtype=np.int32, columns=stored) as writer:
            for item, number in zip(items.tolist(), sources.tolist(), strict=True):
                for sample in read_item(source, item):
                    for name in _trained(sample) ^ columns.keys():
                        has = "has no" if name in columns else "has"
                        raise InputError(
                            f"data.paths: sample {item} {has} {name!r}, unlike the first one. Give "
                            f"it to every row or to none."
                        )
                    if length := len(sample["input_ids"]):
                        try:
                            writer.append({**sample, "source": np.full(length, number)})
                        except InputError as error:  # its number among those that are stored
                            raise InputError(f"data.paths: sample {item}: {error}") from None
                        without_loss.add(sample)
                    else:
                        empty += 1
                if item % _REPORT_EVERY == 0:
                    progress(item, total)
            if empty == len(items):
                raise InputError("data.paths: no file has a token. Check the files.")
            without_loss.end()

    def _source(self, kind: Format, files: list[Path], masked: bool = True) -> SampleSource:
        """The samples of the files; those of chats without a loss mask unless `masked`."""
        if kind in TOKENS:
            return TOKENS[kind](files)
        tokenizer = self._load_tokenizer()
        if kind == "text":
            return Mapped(files, transform=partial(_read_text, as_tokenize(tokenizer)))
        if kind in ("chat", "pairs"):
            encoder = ChatEncoder(tokenizer, self._template_text())
            chats: tuple[str, ...] = ("prompt", "chosen", "rejected")
            transform: partial[Any] = partial(encode_pair, encoder, masked)
            if kind == "chat":
                chats = (self.field or "messages",)
                transform = partial(encode_row, encoder, *chats, masked)
            stored = format_of(files[:1])
            if stored in COLUMNS:
                transform = partial(encode_columns, transform, chats)
            return ROWS.get(stored, Jsonl)(files, transform=transform)
        rows = ROWS[kind](files, field=self.field, tokenizer=tokenizer)
        return rows if masked else rows.counting()

    def _check_tokenizer(self) -> None:
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise FileError(
                f"data.tokenizer: {self.tokenizer} is not a folder. Give that of a tokenizer."
            )

    def _load_tokenizer(self) -> Any:
        """The tokenizer; None for UTF-8 bytes. Nothing is downloaded and no code is run."""
        self._check_tokenizer()
        if self.tokenizer is None:
            return None
        loader = optional("transformers", "data.tokenizer", "evenstep[hf]").AutoTokenizer
        try:
            return loader.from_pretrained(self.tokenizer, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise FileError(
                f"data.tokenizer: {self.tokenizer} holds no tokenizer ({reason})."
            ) from None

    def vocabulary(self) -> int:
        """One more than the largest token id that the tokenizer gives."""
        tokenizer = self._load_tokenizer()
        return 256 if tokenizer is None else len(tokenizer)

    def _template_text(self) -> str | None:
        template = None if self.template is None else _text(Path(self.template))
        if self.template is not None and template is None:
            raise FileError(f"data.template: {self.template} cannot be read. Check the path.")
        return template

    def _key(self, files: list[Path], kind: Format) -> str:
        """What the token file depends on, as JSON."""
        named = [Path(each) for each in (self.tokenizer, self.template) if each is not None]
        seen = [
            [str(file), status.st_size, status.st_mtime_ns]
            for file, status in statuses([*files, *named])
        ]
        options = {**asdict(self), "paths": list(self.paths)}
        # What token files of earlier releases lack:
        if kind in ("chat", "pairs"):
            options |= {"tools": True, "weights": True}
        if kind == "parquet" and self.field == "input_ids":
            options["labels"] = True
        if not isinstance(self.validation, float):
            options.pop("validation")  # has no effect on what is stored
        digest = digest_of(json.dumps(seen)).hex()
        return json.dumps({"options": options, "files": len(files), "digest": digest}, indent=1)


def _read_text(tokenize: Tokenize, path: Path) -> Sample:
    text = _text(path)
    if text is None:
        raise FileError(f"{path} is not UTF-8 text. Leave it out, or set data.format.")
    return {"input_ids": np.asarray(tokenize(text))}


def _trained(sample: Sample) -> set[str]:
    """The names of the labels and loss masks that a sample has."""
    return {name for name in TARGETS if name in sample and name != SPANS}


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
        return path.read_text("utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError):
        return None
