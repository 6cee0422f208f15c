"""Chats -> tokens, with loss on what the assistant says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.errors import ConfigError, InputError

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
        found: str | None = self.template or getattr(self.tokenizer, "chat_template", None)
        return found

    def encode(self, messages: Messages, masked: bool = True) -> dict[str, NDArray[Any]]:
        """The sample of one chat. Unless it is `masked`, the template is applied only once."""
        _check(messages)
        if self.tokenizer is None:
            return _as_bytes(messages)
        if not masked:
            return {"input_ids": np.asarray(self._apply(messages)["input_ids"], np.int64)}
        if _MARK in str(self._template):
            found = self._apply(messages, return_assistant_tokens_mask=True)
            mask = found.get("assistant_masks", found.get("assistant_tokens_mask"))
        else:
            found = self._apply(messages)
            mask = self._added(messages, found["input_ids"])
        return {
            "input_ids": np.asarray(found["input_ids"], np.int64),
            "loss_mask": np.asarray(mask, np.uint8),
        }

    def _apply(self, messages: Messages, **options: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.template, tokenize=True, return_dict=True, **options
        )
        return found

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


def _check(messages: object) -> None:
    listed = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not listed or not all(_is_message(each) for each in messages):  # type: ignore[attr-defined]
        raise InputError(
            "a chat must be a list of messages, each with a role and a content that is text."
        )


def _is_message(value: object) -> bool:
    keys = ("role", "content")
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in keys)


def _as_bytes(messages: Messages) -> dict[str, NDArray[Any]]:
    pieces: list[tuple[bytes, int]] = []
    for message in messages:
        role, own = message["role"], int(message["role"] == "assistant")
        pieces.append((f"<{role}>\n".encode(), 0))
        pieces.append((f"{message['content']}</{role}>\n".encode(), own))
    text = b"".join(piece for piece, _ in pieces)
    return {
        "input_ids": np.frombuffer(text, np.uint8).astype(np.int64),
        "loss_mask": np.repeat(
            np.array([own for _, own in pieces], np.uint8), [len(piece) for piece, _ in pieces]
        ),
    }


@dataclass(frozen=True, slots=True)
class ChatTransform:
    """From a row with messages in `field` to a sample; without a loss mask if it is only counted.

    It is sent to other processes, so it is a class: an inner function cannot be pickled.
    """

    field: str
    encoder: ChatEncoder
    masked: bool = True

    def __call__(self, row: Any) -> dict[str, NDArray[Any]]:
        if not isinstance(row, Mapping) or self.field not in row:
            raise InputError(
                f"a chat must have a field {self.field!r} with its messages. Set data.field."
            )
        return self.encoder.encode(row[self.field], masked=self.masked)
