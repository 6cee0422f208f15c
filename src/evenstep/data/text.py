"""Text and chats -> tokens: any tokenizer as a function, and rows of files as samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.text import short_repr
from evenstep.data.source import LOSS_MASKS, Draw, ItemTransform, Sample
from evenstep.errors import ConfigError, FileError, InputError

# Tokenizers ---------------------------------------------------------------------------------------

BYTES = 256


def check_folder(folder: str | None) -> None:
    """Raise unless the folder exists; None needs none."""
    if folder is not None and not Path(folder).is_dir():
        raise FileError(f"data.tokenizer: {folder} is not a folder. Give that of a tokenizer.")


def load_tokenizer(folder: str | None) -> Any:
    """The Hugging Face tokenizer in a folder; None for None, which means UTF-8 bytes.

    Nothing is downloaded and no code of the folder is run.
    """
    if folder is None:
        return None
    check_folder(folder)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            'data.tokenizer needs transformers. Install it with pip install "evenstep[hf]".'
        ) from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise FileError(f"data.tokenizer: {folder} holds no tokenizer ({reason}).") from None


def vocabulary(tokenizer: Any) -> int:
    """One more than the largest token id.

    >>> vocabulary(None)
    256
    """
    return BYTES if tokenizer is None else len(tokenizer)


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


@dataclass(frozen=True, slots=True)
class RowDecoder:
    """Turns a row of a file into samples: by `transform`, or as the tokens of its `field`, which is
    text or, without a tokenizer, a list of token ids. Without a field it is `text`, or `input_ids`
    of a row without text. A row with a list of `input_ids` is a sample as it is; labels and loss
    masks beside another field are an error, unless only tokens are counted.

    >>> decoder = RowDecoder(None, as_tokenize(None), ItemTransform(None))
    >>> decoder.decode({"text": "ab"}, "a.jsonl, line 1")
    {'input_ids': array([97, 98], dtype=int32)}
    """

    field: str | None
    tokenize: Tokenize
    transform: ItemTransform
    counting: bool = False

    def decode(
        self, row: Any, where: str, draw: Draw | None = None, first_field: str | None = None
    ) -> Sample | list[Sample]:
        """The samples of `row`. Errors get a note that names `where`.

        `first_field` is the field that is read of the first row, if rows decide that.
        """
        try:
            if self.transform.function is not None:
                return self.transform(row, draw)
            field = self._checked_field(row, where, first_field)
            value, complete = row[field], self.has_tokens(row)
            if not (complete or self.counting):
                self._check_masks(row, field, where)
            if isinstance(value, str):
                return {"input_ids": _integers(self.tokenize(value), where)}
            tokens = self._listed(value, field, where)
            return {**row, "input_ids": tokens} if complete else {"input_ids": tokens}
        except Exception as error:
            error.add_note(f"raised for {where}")
            raise

    def has_tokens(self, row: Any) -> bool:
        """Whether a row is a sample as it is, with a list of `input_ids`."""
        return self.field_of(row) == "input_ids" and isinstance(row["input_ids"], list)

    def field_of(self, row: Any) -> str | None:
        """The field that is read of a row; None if the row lacks it, or a transform reads it."""
        if self.transform.function is not None or not isinstance(row, Mapping):
            return None
        field = self.field or ("text" if "text" in row else "input_ids")
        return field if field in row else None

    def _checked_field(self, row: Any, where: str, first_field: str | None) -> str:
        if not isinstance(row, Mapping):
            raise InputError(
                f"{where}: expected a row with fields, got {type(row).__name__}. Write one object "
                f"per row, or pass a transform."
            )
        field = self.field_of(row)
        if field is None:
            has = ", ".join(map(repr, list(row)[:20])) or "none"
            raise InputError(
                f"{where}: no field {self.field or 'text'!r}; the row has {has}. "
                f"{other_field(row)}, or pass a transform."
            )
        if self.field is None and first_field not in (None, field):
            raise InputError(
                f"{where}: the row has {field!r}, but the first one has {first_field!r}. Keep rows "
                f"of text and rows of tokens in separate files, or pass a transform."
            )
        if self.field is None and self.tokenize is _utf8 and {"text", "input_ids"} <= row.keys():
            raise InputError(
                f"{where}: the row has both 'text' and 'input_ids'. Set field to one of them, or "
                f"pass a transform."
            )
        return field

    def _check_masks(self, row: Mapping[str, Any], field: str, where: str) -> None:
        """Raise if a row says which tokens are trained, and that would be lost."""
        for name in ("labels", *LOSS_MASKS):
            value = row.get(name)
            if value is None or (name == "labels" and not isinstance(value, list)):
                continue  # a label of the whole text is not about tokens
            remedy = f"Remove {name!r}"
            if "input_ids" in row:
                remedy = f"Set field to 'input_ids', which is read with {name!r}"
            elif isinstance(row[field], list):
                remedy = f"Rename {field!r} to 'input_ids', or remove {name!r}"
            raise InputError(
                f"{where}: the row has {name!r}, but only {field!r} is read. {remedy}, or pass a "
                f"transform."
            )

    def _listed(self, value: Any, field: str, where: str) -> NDArray[np.integer[Any]]:
        """Token ids that a row has as a list in `field`."""
        if not isinstance(value, list):
            raise InputError(
                f"{where}: field {field!r} must be a str, got {type(value).__name__}. Correct "
                f"the row, or pass a transform."
            )
        odd = [token for token in value if type(token) is not int]
        if odd:
            raise InputError(
                f"{where}: field {field!r} has {short_repr(odd[0])} in its list, expected token "
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


def _ids(encode: Callable[[str], Any], text: str) -> Tokens:
    encoded = encode(text)
    tokens: Tokens = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    return getattr(tokens, "ids", tokens)  # `tokenizers` gives an Encoding


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


# Chats --------------------------------------------------------------------------------------------

Messages: TypeAlias = Sequence[Mapping[str, Any]]

_MARK = "{% generation %}"


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Turns the messages of a chat into `input_ids` and a `loss_mask`.

    With a Hugging Face tokenizer, its chat template is applied, or `template`. If the template
    marks what the assistant generates, these tokens count in the loss. Otherwise those that an
    assistant's message adds to the text before it do. Without a tokenizer, tokens are bytes and
    each message is `<role>\\n`, its content and `</role>\\n`.

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

    def encode(self, messages: Messages, masked: bool = True) -> dict[str, NDArray[Any]]:
        """The sample of one chat. Unless it is `masked`, the template is applied only once."""
        _check_chat(messages)
        if self.tokenizer is None:
            return _as_bytes(messages)
        if not masked:
            return {"input_ids": np.asarray(self._apply(messages)["input_ids"], np.int64)}
        if _MARK in str(self._template):
            encoded = self._apply(messages, return_assistant_tokens_mask=True)
            mask = encoded.get("assistant_masks", encoded.get("assistant_tokens_mask"))
        else:
            encoded = self._apply(messages)
            mask = self._added(messages, encoded["input_ids"])
        return {
            "input_ids": np.asarray(encoded["input_ids"], np.int64),
            "loss_mask": np.asarray(mask, np.uint8),
        }

    def _apply(self, messages: Messages, **options: Any) -> Mapping[str, Any]:
        encoded: Mapping[str, Any] = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.template, tokenize=True, return_dict=True, **options
        )
        return encoded

    def _added(self, messages: Messages, whole: Sequence[int]) -> NDArray[np.uint8]:
        """1 for the tokens that each message of the assistant adds."""
        mask = np.zeros(len(whole), np.uint8)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._apply(messages[:number], add_generation_prompt=True)["input_ids"]
            after = self._apply(messages[: number + 1])["input_ids"]
            whole_so_far = list(whole[: len(after)])
            if list(after[: len(before)]) != list(before) or whole_so_far != list(after):
                raise InputError(
                    "the chat template changes earlier messages when later ones are added, so the "
                    "assistant's tokens are unknown. Mark them in the template with "
                    "{% generation %} and {% endgeneration %}."
                )
            mask[len(before) : len(after)] = 1
        return mask


def _check_chat(messages: object) -> None:
    if not isinstance(messages, Sequence) or not messages or not all(map(_is_message, messages)):
        raise InputError(
            "a chat must be a list of messages, each with a role and a content that is text."
        )


def _is_message(value: object) -> bool:
    keys = ("role", "content")
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in keys)


def _as_bytes(messages: Messages) -> dict[str, NDArray[Any]]:
    texts: list[bytes] = []
    trained: list[int] = []  # per text: 1 if it counts in the loss
    for message in messages:
        role = message["role"]
        texts += [f"<{role}>\n".encode(), f"{message['content']}</{role}>\n".encode()]
        trained += [0, int(role == "assistant")]
    return {
        "input_ids": np.frombuffer(b"".join(texts), np.uint8).astype(np.int64),
        "loss_mask": np.repeat(np.array(trained, np.uint8), [len(text) for text in texts]),
    }


def encode_row(encoder: ChatEncoder, field: str, masked: bool, row: Any) -> dict[str, NDArray[Any]]:
    """The sample of a row with the messages of a chat in `field`; see `ChatEncoder.encode`."""
    if not isinstance(row, Mapping) or field not in row:
        raise InputError(f"a chat must have a field {field!r} with its messages. Set data.field.")
    return encoder.encode(row[field], masked)
