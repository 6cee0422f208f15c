"""Any tokenizer becomes a function from text to ids, and any fault names its row."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from evenstep.data.sources.text import RowDecoder, as_tokenize
from evenstep.errors import ConfigError, InputError


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


@given(st.text())
def test_without_a_tokenizer_tokens_are_the_bytes_of_the_text(text: str) -> None:
    assert bytes(np.asarray(as_tokenize()(text)).tolist()) == text.encode()


def test_a_tokenizers_tokenizer_is_asked_to_encode() -> None:
    tokenize = as_tokenize(word_level())
    assert list(tokenize("two one three")) == [2, 1, 0]
    assert list(pickle.loads(pickle.dumps(tokenize))("two")) == [2]


def test_a_transformers_tokenizer_is_called() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level(), unk_token="[UNK]")
    tokenize = as_tokenize(tokenizer)
    assert list(tokenize("two one three")) == [2, 1, 0]
    assert list(pickle.loads(pickle.dumps(tokenize))("two")) == [2]


def test_an_encoder_that_gives_plain_ids_will_do() -> None:
    class Encoding:  # as in tiktoken and sentencepiece
        def encode(self, text: str) -> list[int]:
            return [len(text)]

    assert as_tokenize(Encoding())("abc") == [3]


def test_any_function_from_text_to_ids_will_do() -> None:
    assert as_tokenize(lambda text: [ord(c) for c in text])("ab") == [97, 98]


def test_what_cannot_tokenize_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="the tokenizer is a int, which can neither be called"):
        as_tokenize(7)


def decoded(row: Any, tokenizer: Any = None, transform: Any = None) -> Any:
    return RowDecoder("text", as_tokenize(tokenizer), transform).decode(row, "a.jsonl, line 4")


def test_a_row_becomes_the_tokens_of_its_field() -> None:
    assert decoded({"text": "ab", "id": 1})["input_ids"].tolist() == [97, 98]


def test_an_empty_text_is_a_sample_of_no_tokens() -> None:
    for tokenizer in (None, lambda text: list(text)):
        tokens = decoded({"text": ""}, tokenizer)["input_ids"]
        assert len(tokens) == 0
        assert tokens.dtype.kind == "i"


def test_a_transform_decides_what_a_row_becomes() -> None:
    assert decoded(5, transform=lambda row: [row, row + 1]) == [5, 6]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([1], "a list has no fields"),
        ({"body": "a"}, "there is no field 'text' but 'body'"),
        ({"text": None}, "field 'text' is a NoneType, not text"),
    ],
)
def test_a_row_without_text_names_its_place(row: Any, fault: str) -> None:
    with pytest.raises(InputError, match=f"a.jsonl, line 4: {fault}"):
        decoded(row)


@pytest.mark.parametrize("ids", [["to", "kens"], [[1, 2]], [0.5]])
def test_a_tokenizer_that_gives_no_ids_is_named_with_the_row(ids: Any) -> None:
    with pytest.raises(InputError, match=r"a.jsonl, line 4: the tokenizer gave"):
        decoded({"text": "x"}, lambda text: ids)


def test_a_fault_in_the_callers_code_stays_itself_and_notes_the_row() -> None:
    def transform(row: Any) -> Any:
        return row["absent"]

    with pytest.raises(KeyError) as caught:
        decoded({"text": "x"}, transform=transform)
    assert caught.value.__notes__ == ["This happened at a.jsonl, line 4."]
