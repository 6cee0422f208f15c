"""Text -> tokens: any tokenizer as a function, and rows of files as samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.glimpse import glimpse
from evenstep.data.sources.source import LOSS_MASKS, Draw, Sample
from evenstep.data.sources.transform import ItemTransform
from evenstep.errors import ConfigError, InputError

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
    if callable(tokenizer):
        return partial(_called, tokenizer)
    if callable(getattr(tokenizer, "encode", None)):
        return partial(_encoded, tokenizer)
    raise ConfigError(
        f"expected a tokenizer, got {type(tokenizer).__name__}. Pass a function from str to ids, "
        f"an object with an encode method, or None for UTF-8 bytes."
    )


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """Turns a row of a file into samples: by `transform`, or as the tokens of its `field`, which is
    text or, without a tokenizer, a list of token ids. Without a field it is `text`, and a row with
    `input_ids` instead is a sample as it is.

    >>> decoder = RowDecoder(None, as_tokenize(None), ItemTransform(None))
    >>> decoder.decode({"text": "ab"}, "a.jsonl, line 1")
    {'input_ids': array([97, 98], dtype=int32)}
    """

    field: str | None
    tokenize: Tokenize
    transform: ItemTransform

    def decode(self, row: Any, where: str, draw: Draw | None = None) -> Sample | list[Sample]:
        """The samples of `row`. Errors get a note that names `where`."""
        try:
            if self.transform.function is not None:
                return self.transform(row, draw)
            value = self._value(row, where)
            if isinstance(value, str):
                return {"input_ids": _integers(self.tokenize(value), where)}
            tokens = self._listed(value, where, self._field_of(row))
            if self.has_tokens(row):
                return {**row, "input_ids": tokens}
            self._check_masks(row, where)
            return {"input_ids": tokens}
        except Exception as error:
            error.add_note(f"raised for {where}")
            raise

    def has_tokens(self, row: Any) -> bool:
        """Whether a row is a sample as it is, with `input_ids`."""
        plain = self.field is None and self.transform.function is None
        return plain and isinstance(row, Mapping) and "input_ids" in row and "text" not in row

    def _field_of(self, row: Any) -> str:
        return self.field or ("input_ids" if self.has_tokens(row) else "text")

    def _value(self, row: Any, where: str) -> Any:
        if not isinstance(row, Mapping):
            raise InputError(
                f"{where}: expected a row with fields, got {type(row).__name__}. Write one object "
                f"per row, or pass a transform."
            )
        field = self._field_of(row)
        if field not in row:
            has = ", ".join(map(repr, list(row)[:20])) or "none"
            raise InputError(
                f"{where}: no field {field!r}; the row has {has}. {other_field(row)}, or pass a "
                f"transform."
            )
        return row[field]

    def _check_masks(self, row: Mapping[str, Any], where: str) -> None:
        """Raise if a row with a list of token ids says which of them are trained."""
        for name in ("labels", *LOSS_MASKS):
            if name in row:
                raise InputError(
                    f"{where}: the row has {name!r}, but only {self._field_of(row)!r} is read. "
                    f"Pass transform=lambda row: row to keep the row as a sample, or remove "
                    f"{name!r}."
                )

    def _listed(self, value: Any, where: str, field: str) -> NDArray[np.integer[Any]]:
        """Token ids that a row has as a list in `field`."""
        if not isinstance(value, list):
            raise InputError(
                f"{where}: field {field!r} must be a str, got {type(value).__name__}. Correct "
                f"the row, or pass a transform."
            )
        odd = [token for token in value if type(token) is not int]
        if odd:
            raise InputError(
                f"{where}: field {field!r} has {glimpse(odd[0])} in its list, expected token "
                f"ids. Correct the row, or pass a transform."
            )
        if self.tokenize is not _utf8:
            raise InputError(
                f"{where}: field {field!r} is a list of token ids, on which the tokenizer has "
                f"no effect. Remove the tokenizer, or choose another field."
            )
        return np.array(value, np.int64)


def other_field(names: Collection[str]) -> str:
    """What to do about a row that lacks a field, but has fields of these names.

    >>> other_field(["messages", "id"])
    'This looks like chat data: set data.format to chat'
    """
    if "messages" in names:
        return "This looks like chat data: set data.format to chat"
    return "Set field to one of them"


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


def _integers(tokens: Any, where: str) -> NDArray[np.integer[Any]]:
    array = np.asarray(tokens)
    if array.ndim == 1 and not len(array):
        return np.zeros(0, np.int64)  # numpy makes [] floats
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{where}: the tokenizer must return a flat sequence of integer ids, got {array.dtype} "
            f"of shape {array.shape}. Pass a function from one text to its ids."
        )
    return array
