"""Text becomes tokens: any tokenizer as one kind of function, and a row of a file as samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.data.sources.source import Sample
from evenstep.errors import ConfigError, InputError

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Tokenize: TypeAlias = Callable[[str], Tokens]
Transform: TypeAlias = Callable[[Any], Sample | list[Sample]]
"""What an item becomes: one sample, or a list of several."""


def as_tokenize(tokenizer: Any = None) -> Tokenize:
    """A function from text to token ids, out of whatever the ecosystem calls a tokenizer.

    None takes UTF-8 bytes as tokens. An object of `tokenizers`, `tiktoken` or `sentencepiece` is
    asked to `encode`. Anything else is called, and may give ids or, as in `transformers`, a
    mapping with `input_ids`. What comes back can be pickled wherever the tokenizer can.

    >>> as_tokenize()("hé").tolist()
    [104, 195, 169]
    >>> as_tokenize(lambda text: {"input_ids": [ord(c) for c in text]})("ab")
    [97, 98]
    """
    if tokenizer is None:
        return _utf8
    if callable(tokenizer):
        return partial(_called, tokenizer)
    if callable(getattr(tokenizer, "encode", None)):
        return partial(_encoded, tokenizer)
    raise ConfigError(
        f"the tokenizer is a {type(tokenizer).__name__}, which can neither be called nor encode, "
        f"so text cannot become tokens. Pass a function from str to ids, a tokenizer object, or "
        f"None for bytes."
    )


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """How a row of a file becomes samples: by `transform`, or as the tokens of its `field`.

    >>> RowDecoder("text", as_tokenize(None), None).decode({"text": "ab"}, "a.jsonl, line 1")
    {'input_ids': array([97, 98], dtype=int32)}
    """

    field: str
    tokenize: Tokenize
    transform: Transform | None

    def decode(self, row: Any, where: str) -> Sample | list[Sample]:
        """The samples of `row`. What goes wrong in the caller's code is noted with `where`."""
        try:
            if self.transform is not None:
                return self.transform(row)
            text = self._text(row, where)
            return {"input_ids": _whole_numbers(self.tokenize(text), where)}
        except Exception as error:
            error.add_note(f"This happened at {where}.")
            raise

    def _text(self, row: Any, where: str) -> str:
        if not isinstance(row, Mapping):
            raise InputError(
                f"{where}: a {type(row).__name__} has no fields, so there is no text. Write one "
                f"object per row, or pass a transform."
            )
        if self.field not in row:
            has = ", ".join(map(repr, list(row)[:20])) or "none"
            raise InputError(
                f"{where}: there is no field {self.field!r} but {has}, so there is no text. "
                f"Name another field, or pass a transform."
            )
        text = row[self.field]
        if not isinstance(text, str):
            raise InputError(
                f"{where}: field {self.field!r} is a {type(text).__name__}, not text, so it cannot "
                f"be tokenized. Correct the row, or pass a transform."
            )
        return text


def _utf8(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def _called(tokenizer: Any, text: str) -> Tokens:
    found = tokenizer(text)
    tokens: Tokens = found["input_ids"] if isinstance(found, Mapping) else found
    return tokens


def _encoded(tokenizer: Any, text: str) -> Tokens:
    found = tokenizer.encode(text)
    tokens: Tokens = getattr(found, "ids", found)
    return tokens


def _whole_numbers(tokens: Any, where: str) -> NDArray[np.integer[Any]]:
    array = np.asarray(tokens)
    if array.ndim == 1 and not len(array):
        return np.zeros(0, np.int64)  # numpy takes [] for floats
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{where}: the tokenizer gave {array.dtype} of shape {array.shape}, not a row of token "
            f"ids, so there is no sample. Pass a function from one text to its ids."
        )
    return array
