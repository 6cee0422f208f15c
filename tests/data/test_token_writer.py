"""A token file is written sample by sample, and appears whole or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.data.sources.jsonl import Jsonl
from evenstep.data.sources.memory import InMemory
from evenstep.data.sources.token_file import TokenFile
from evenstep.data.sources.token_writer import TokenFileWriter, write_token_file
from evenstep.errors import ConfigError, FileError, InputError, SampleError


def rows_of(file: TokenFile) -> list[list[int]]:
    return [file[item]["input_ids"].tolist() for item in range(len(file))]


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_samples_may_be_any_row_of_numbers(tmp_path: Path, make: Any) -> None:
    file = write_token_file(tmp_path / "a.tokens", [make([1, 2]), {"input_ids": make([3])}])
    assert rows_of(file) == [[1, 2], [3]]


def test_the_samples_of_a_source_are_written_in_order(tmp_path: Path) -> None:
    source = InMemory([{"input_ids": [1]}, [{"input_ids": [2]}, {"input_ids": [3, 4]}]])
    assert rows_of(write_token_file(tmp_path / "a.tokens", source)) == [[1], [2], [3, 4]]


def test_a_source_with_a_bad_sample_leaves_no_file(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": "a"}) + "\nnonsense\n")
    with pytest.raises(SampleError, match="sample 1 cannot be read"):
        write_token_file(tmp_path / "a.tokens", Jsonl(lines))
    assert list(tmp_path.iterdir()) == [lines]


def test_nothing_is_there_before_the_end(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a.tokens") as writer:
        writer.append([1])
        assert not (tmp_path / "a.tokens").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]


def test_an_exception_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    old = write_token_file(tmp_path / "a.tokens", [[1, 2]])

    def interrupted() -> Iterator[list[int]]:
        yield [3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_file(old.path, interrupted())
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]
    assert rows_of(TokenFile(old.path)) == [[1, 2]]


def test_a_map_of_the_old_file_outlives_its_replacement(tmp_path: Path) -> None:
    old = write_token_file(tmp_path / "a.tokens", [[1, 2]])
    tokens = old[0]["input_ids"]
    new = write_token_file(tmp_path / "a.tokens", [[3]])
    assert (tokens.tolist(), rows_of(new)) == ([1, 2], [[3]])


def test_a_file_is_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    path = write_token_file(tmp_path / "a.tokens", [[1]]).path
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        ([], "has no tokens"),
        ([70_000], "has 70000 in 'input_ids', which uint16 cannot hold"),
        ([1, -1], "has -1 in 'input_ids', which uint16 cannot hold"),
        ([0.5], "has float64 of shape"),
        ([[1]], r"has int64 of shape \(1, 1\)"),
        ("text", "has <U4 of shape"),
        (7, r"has int64 of shape \(\)"),
        ([2**70], "has object of shape"),
        ({"text": "a"}, "has no 'input_ids'"),
    ],
)
def test_a_sample_that_cannot_be_written_is_named_and_leaves_no_trace(
    tmp_path: Path, sample: Any, fault: str
) -> None:
    path = tmp_path / "a.tokens"
    with TokenFileWriter(path, dtype=np.uint16) as writer:
        writer.append([65_535])
        with pytest.raises(InputError, match=f"sample 1 {fault}.*, so it cannot be written"):
            writer.append(sample)
        writer.append([2])
    assert rows_of(TokenFile(path)) == [[65_535], [2]]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({}, "has no 'mask'"),
        ({"mask": [1]}, "has 2 tokens but 1 entries in 'mask'"),
        ({"mask": [0, 2]}, "has 2 in 'mask', which bool cannot hold"),
        ({"mask": [0.0, 1.0]}, "has float64"),
        ({"mask": [0, 1], "weight": [1e300, 0]}, "has a number in 'weight' that float32 cannot"),
    ],
)
def test_a_column_that_does_not_fit_is_named(tmp_path: Path, values: Any, fault: str) -> None:
    columns = {"mask": np.bool_, "weight": np.float32}
    with (
        pytest.raises(InputError, match=f"sample 0 {fault}"),
        TokenFileWriter(tmp_path / "a.tokens", columns=columns) as writer,
    ):
        writer.append({"input_ids": [1, 2], "weight": [1, 0.5], **values})
    assert list(tmp_path.iterdir()) == []


def test_keys_that_are_no_columns_are_left_out(tmp_path: Path) -> None:
    file = write_token_file(tmp_path / "a.tokens", [{"input_ids": [1], "text": "a"}])
    assert list(file[0]) == ["input_ids"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"dtype": np.float32}, "'input_ids' is declared as .*float32"),
        ({"dtype": "nonsense"}, "'input_ids' is declared as nonsense"),
        ({"columns": {"a": object}}, "'a' is declared as"),
        ({"columns": {"offsets": np.int8}}, "Rename the column"),
        ({"columns": {"input_ids": np.int8}}, "Rename the column"),
        ({"columns": {"a" * 5000: np.int8}}, "names too long for a header"),
    ],
)
def test_columns_that_cannot_be_stored_are_refused_at_once(
    tmp_path: Path, options: Any, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        TokenFileWriter(tmp_path / "a.tokens", **options)


def test_a_sample_outside_the_with_block_is_refused(tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "a.tokens")
    with pytest.raises(FileError, match="Append inside the `with` block"):
        writer.append([1])
    with writer:
        writer.append([1])
    with pytest.raises(FileError, match="Append inside the `with` block"):
        writer.append([2])
    assert rows_of(TokenFile(writer.path)) == [[1]]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"a.tokens cannot be written \(No such file"):
        write_token_file(tmp_path / "absent" / "a.tokens", [[1]])


def test_a_target_that_cannot_be_replaced_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tokens").mkdir()
    with pytest.raises(FileError, match=r"a.tokens cannot be written"):
        write_token_file(tmp_path / "a.tokens", [[1]])
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_leaves_nothing_even_if_the_fault_is_swallowed(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    writer = TokenFileWriter(path).__enter__()
    writer._sections["input_ids"].file.close()
    with Path("/dev/full").open("wb", 0) as full:
        writer._sections["input_ids"].file = full
        with pytest.raises(FileError, match="No space left on device"):
            writer.append([1])
    with pytest.raises(FileError, match="was given up"):
        writer.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []
