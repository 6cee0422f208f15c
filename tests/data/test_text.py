"""Any tokenizer becomes a function from text to ids, and errors name the row."""

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from evenstep.data import Jsonl
from evenstep.errors import ConfigError, InputError
from tests.internals import as_tokenize


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


@given(st.text())
def test_without_a_tokenizer_tokens_are_the_bytes_of_the_text(text: str) -> None:
    assert bytes(np.asarray(as_tokenize()(text)).tolist()) == text.encode()


def test_encode_of_a_tokenizers_tokenizer_is_called() -> None:
    tokenize = as_tokenize(word_level())
    assert list(tokenize("two one three")) == [2, 1, 0]
    assert list(pickle.loads(pickle.dumps(tokenize))("two")) == [2]


def test_a_transformers_tokenizer_is_called() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level(), unk_token="[UNK]")
    tokenize = as_tokenize(tokenizer)
    assert list(tokenize("two one three")) == [2, 1, 0]
    assert list(pickle.loads(pickle.dumps(tokenize))("two")) == [2]


def test_encode_may_return_plain_ids() -> None:
    class Encoding:  # as in tiktoken and sentencepiece
        def encode(self, text: str) -> list[int]:
            return [len(text)]

    assert as_tokenize(Encoding())("abc") == [3]


def test_any_function_from_text_to_ids_is_accepted() -> None:
    assert as_tokenize(lambda text: [ord(c) for c in text])("ab") == [97, 98]


def test_anything_but_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a tokenizer, got int"):
        as_tokenize(7)


def decoded(row: Any, tokenizer: Any = None, transform: Any = None) -> Any:
    """What becomes of the row in line 4 of a.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_text("\n\n\n" + json.dumps(row))
        return Jsonl(path, field="text", tokenizer=tokenizer, transform=transform)[0]


def test_a_row_becomes_the_tokens_of_its_field() -> None:
    assert decoded({"text": "ab", "id": 1})["input_ids"].tolist() == [97, 98]
    assert list(decoded({"text": "ab", "labels": "good", "loss_mask": None})) == ["input_ids"]


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
        ([1], "expected a row with fields, got list"),
        ({"body": "a"}, "no field 'text'; the row has 'body'"),
        ({"text": None}, "field 'text' must be a str, got NoneType"),
        ({"text": [5, 6], "loss_mask": [0, 1]}, "the row has 'loss_mask', but only 'text'"),
        ({"text": [5, 6], "labels": [5, 6]}, "the row has 'labels'.*Rename 'text' to 'input_ids'"),
        ({"text": "ab", "labels": [-100, 98]}, "the row has 'labels'.* Remove 'labels', or pass a"),
        ({"text": "ab", "loss_mask": [0, 1]}, "the row has 'loss_mask'.* Remove 'loss_mask'"),
        ({"text": "ab", "sample_mask": 0}, "the row has 'sample_mask'"),
        (
            {"text": "ab", "input_ids": [1, 2], "loss_mask": [0, 1]},
            "the row has 'loss_mask', but only 'text' is read. Set field to 'input_ids'",
        ),
    ],
)
def test_an_error_in_a_row_names_the_file_and_line(row: Any, fault: str) -> None:
    with pytest.raises(InputError, match=f"a.jsonl, line 4: {fault}"):
        decoded(row)


@pytest.mark.parametrize("ids", [["to", "kens"], [[1, 2]], [0.5]])
def test_a_tokenizer_that_does_not_return_ids_is_refused_with_the_row(ids: Any) -> None:
    with pytest.raises(InputError, match=r"a.jsonl, line 4: the tokenizer must return"):
        decoded({"text": "x"}, lambda text: ids)


def test_an_error_in_the_callers_code_gets_a_note_with_the_row() -> None:
    def transform(row: Any) -> Any:
        return row["absent"]

    with pytest.raises(KeyError) as caught:
        decoded({"text": "x"}, transform=transform)
    assert [note[-15:] for note in caught.value.__notes__] == ["a.jsonl, line 4"]
