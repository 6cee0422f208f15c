"""Several files as one source; fingerprints that know what files hold, not where they are."""

from __future__ import annotations

import json
import os
import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, PooledStream, Recipe
from evenstep.data import InMemory, Jsonl, Mapped, ParquetText, TokenFile, write_token_file
from evenstep.errors import ConfigError, CursorError, FileError
from tests.examples import examples
from tests.internals import files_digest, files_of, samples_digest


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def parquet(path: Path, texts: list[str]) -> Path:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=2)
    return path


def tokens(path: Path, texts: list[str]) -> Path:
    write_token_file(path, [list(text.encode()) for text in texts])
    return path


KINDS: dict[str, tuple[Any, Any]] = {
    "jsonl": (jsonl, Jsonl),
    "parquet": (parquet, ParquetText),
    "tokens": (tokens, TokenFile),
}


def texts_of(source: Any) -> list[str]:
    return [bytes(source[k]["input_ids"].tolist()).decode() for k in range(len(source))]


@pytest.mark.parametrize("kind", KINDS)
def test_lists_and_patterns_are_one_source(tmp_path: Path, kind: str) -> None:
    write, read = KINDS[kind]
    parts = {"b": ["c", "dd"], "a": ["x", "yy", "z"], "c": ["e"]}
    for name, texts in parts.items():
        write(tmp_path / f"{name}.{kind}", texts)
    by_name = ["x", "yy", "z", "c", "dd", "e"]
    everything = read(f"{tmp_path}/*.{kind}")
    assert texts_of(everything) == by_name
    assert texts_of(pickle.loads(pickle.dumps(everything))) == by_name
    given = [tmp_path / f"c.{kind}", f"{tmp_path}/[ab].{kind}"]
    assert texts_of(read(given)) == ["e", *by_name[:-1]]
    assert read(given).fingerprint != everything.fingerprint
    with pytest.raises(ConfigError, match=r"no file matches '.*absent\*'"):
        read(f"{tmp_path}/absent*")
    with pytest.raises(ConfigError, match="at least one file, got an empty list"):
        read([])
    for item in (-1, 6):
        with pytest.raises(IndexError):
            everything[item]


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a[1].jsonl", ["x"])
    assert files_of(str(path)) == [path]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    deeper = jsonl(tmp_path / "deep" / "er" / "b.jsonl", ["y"])
    assert files_of(f"{tmp_path}/**/b.jsonl") == [deeper]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=9), st.data())
@examples(30)
def test_token_files_have_the_lengths_of_all_their_samples(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    bounds = [0, *cuts, len(rows)]
    paths = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        paths.append(folder / f"{number}")
        write_token_file(paths[-1], rows[begin:end])
    source = TokenFile(paths)
    assert [source[k]["input_ids"].tolist() for k in range(len(source))] == rows
    order = data.draw(st.permutations(range(len(rows))))
    assert source.lengths_of(np.array(order, int)).tolist() == [len(rows[k]) for k in order]


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a", [[1]])
    write_token_file(tmp_path / "b", [{"input_ids": [1], "mask": [1]}], columns={"mask": "u1"})
    with pytest.raises(
        FileError, match=r"b has the columns input_ids, mask, but .*a has input_ids"
    ):
        len(TokenFile([tmp_path / "a", tmp_path / "b"]))


# Fingerprints -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_does_not_depend_on_path_or_date(tmp_path: Path, kind: str) -> None:
    write, read = KINDS[kind]
    texts = [f"line {n}" for n in range(50)]
    here = read(write(tmp_path / f"a.{kind}", texts))
    (tmp_path / "other").mkdir()
    there = write(tmp_path / "other" / f"b.{kind}", texts)
    os.utime(there, (1, 1))
    assert read(there).fingerprint == here.fingerprint
    edited = write(tmp_path / f"c.{kind}", [*texts[:31], "LINE 31", *texts[32:]])
    assert edited.stat().st_size == there.stat().st_size
    assert read(edited).fingerprint != here.fingerprint


def upper(text: str) -> list[int]:
    return list(text.upper().encode())


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_another_tokenizer_or_transform_is_noticed(tmp_path: Path, kind: str) -> None:
    write, read = KINDS[kind]
    path = write(tmp_path / "a", ["ab", "cd"])
    found = {
        read(path).fingerprint,
        read(path, tokenizer=upper).fingerprint,
        read(path, transform=lambda row: {"input_ids": [len(row["text"])]}).fingerprint,
        read(path, transform=lambda row: {"input_ids": [0], "text": row["text"]}).fingerprint,
    }
    assert len(found) == 4
    assert read(path, tokenizer=upper).fingerprint in found
    recipe = Recipe(layout=Packed(max_tokens=8))
    state = next(iter(PooledStream(read(path), recipe))).cursor.to_dict()
    PooledStream(read(path), recipe).load_state_dict(state)
    with pytest.raises(CursorError, match=r"data was 2 items, .* and is 2 items, "):
        PooledStream(read(path, tokenizer=upper), recipe).load_state_dict(state)
    named = [
        PooledStream(read(path, tokenizer=t), recipe, fingerprint="mine") for t in (None, upper)
    ]
    named[1].load_state_dict(next(iter(named[0])).cursor.to_dict())


def test_edits_of_a_small_file_are_always_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    data = bytearray(random.Random(0).randbytes(300_000))
    path.write_bytes(data)
    before = files_digest([path])
    for at in (0, 70_000, 299_999):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert files_digest([path]) != before
    path.write_bytes(data)
    assert files_digest([path]) == before


def test_what_a_transform_draws_by_itself_is_not_in_the_fingerprint() -> None:
    def noisy(row: Any) -> Any:
        return {"input_ids": [random.randrange(10**9) for _ in row]}

    rows = ["abc"] * 20
    assert Mapped(rows, transform=noisy).fingerprint == Mapped(rows, transform=noisy).fingerprint
    assert Mapped(rows, transform=len).fingerprint != Mapped(rows, transform=noisy).fingerprint
    assert samples_digest(rows.__getitem__, [3]) != samples_digest(rows.__getitem__, [4])


def test_values_of_samples_are_covered() -> None:
    def one(**values: Any) -> str:
        return InMemory([{"input_ids": [1, 2], **values}]).fingerprint

    values: list[Any] = [
        {},
        {"loss_mask": [0, 1]},
        {"loss_mask": [1, 1]},
        {"labels": [0, 1]},
        {"text": "a"},
        {"text": "b"},
        {"scores": [0.5]},
        {"scores": [0.25]},
        {"turns": [[1, 2], [3]]},
        {"turns": [[1], [2, 3]]},
        {"about": {"name": "x"}},
        {"about": {"name": "y"}},
    ]
    assert len({one(**each) for each in values}) == len(values)
    assert one(loss_mask=np.array([0, 1], np.uint8)) == one(loss_mask=[False, True])


def test_unreadable_samples_do_not_prevent_a_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nnot json\n')
    assert Jsonl(path).fingerprint == Jsonl(path).fingerprint
