"""A token file is written sample by sample, and replaces the target atomically."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.data import InMemory, Jsonl, TokenFile, TokenFileWriter, write_token_file
from evenstep.errors import ConfigError, FileError, InputError, SampleError


def rows_of(file: TokenFile) -> list[list[int]]:
    return [file[item]["input_ids"].tolist() for item in range(len(file))]


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_samples_may_be_any_flat_sequence_of_integers(tmp_path: Path, make: Any) -> None:
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


def test_the_file_does_not_exist_before_the_end(tmp_path: Path) -> None:
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
        write_token_file(old.paths[0], interrupted())
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]
    assert rows_of(TokenFile(old.paths[0])) == [[1, 2]]


def test_a_mapped_file_stays_readable_after_its_replacement(tmp_path: Path) -> None:
    old = write_token_file(tmp_path / "a.tokens", [[1, 2]])
    tokens = old[0]["input_ids"]
    new = write_token_file(tmp_path / "a.tokens", [[3]])
    assert (tokens.tolist(), rows_of(new)) == ([1, 2], [[3]])


def test_the_umask_decides_who_may_read_a_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    path = write_token_file(tmp_path / "a.tokens", [[1]]).paths[0]
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        ([], "has no tokens"),
        ([70_000], "has 70000 in 'input_ids', out of range for uint16"),
        ([1, -1], "has -1 in 'input_ids', but token ids begin at 0"),
        ([0.5], "has 'input_ids' of dtype float64"),
        ([[1]], r"has 'input_ids' of dtype int64 and shape \(1, 1\)"),
        ("text", "has 'input_ids' of dtype <U4"),
        (7, r"has 'input_ids' of dtype int64 and shape \(\)"),
        ([2**70], "has 'input_ids' of dtype object"),
        ({"text": "a"}, "has no 'input_ids'"),
        ({"input_ids": [1], "loss_mask": [1]}, "has 'loss_mask', which would be lost"),
        ({"input_ids": [1], "response_mask": [1]}, "has 'response_mask', .*np.uint8"),
        ({"input_ids": [1], "loss_masking_spans": []}, "has 'loss_masking_spans', .*'loss_mask'"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "has an 'attention_mask' that hides"),
        ({"input_ids": [1], "labels": [1]}, "has 'labels', .*columns={'labels': np.int32}"),
    ],
)
def test_a_refused_sample_is_named_and_not_written(tmp_path: Path, sample: Any, fault: str) -> None:
    path = tmp_path / "a.tokens"
    with TokenFileWriter(path, dtype=np.uint16) as writer:
        writer.append([65_535])
        with pytest.raises(InputError, match=f"a.tokens: sample 1 {fault}"):
            writer.append(sample)
        writer.append([2])
    assert rows_of(TokenFile(path)) == [[65_535], [2]]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({}, "has no 'mask'"),
        ({"mask": [1]}, "has 2 tokens but 1 entries in 'mask'"),
        ({"mask": [0, 2]}, "has 2 in 'mask', out of range for bool"),
        ({"mask": [0.0, 1.0]}, "has 'mask' of dtype float64"),
        ({"mask": [0, 1], "weight": [1e300, 0]}, "has a number in 'weight' that is out of range"),
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


def test_keys_that_are_not_columns_are_ignored(tmp_path: Path) -> None:
    file = write_token_file(tmp_path / "a.tokens", [{"input_ids": [1], "text": "a"}])
    assert list(file[0]) == ["input_ids"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"dtype": np.float32}, "dtype of 'input_ids' must be .*float32"),
        ({"dtype": "nonsense"}, "dtype of 'input_ids' must be .*nonsense"),
        ({"columns": {"a": object}}, "dtype of 'a' must be"),
        ({"columns": {"offsets": np.int8}}, "Rename the column"),
        ({"columns": {"input_ids": np.int8}}, "Rename the column"),
        ({"columns": {"a" * 5000: np.int8}}, "do not fit into a header"),
    ],
)
def test_columns_that_cannot_be_stored_are_refused_early(
    tmp_path: Path, options: Any, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        TokenFileWriter(tmp_path / "a.tokens", **options)


def test_a_sample_outside_the_with_block_is_refused(tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "a.tokens")
    with pytest.raises(FileError, match="Append samples inside the `with` block"):
        writer.append([1])
    with writer:
        writer.append([1])
    with pytest.raises(FileError, match="Append samples inside the `with` block"):
        writer.append([2])
    assert rows_of(TokenFile(writer.path)) == [[1]]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"a.tokens cannot be written \(No such file"):
        write_token_file(tmp_path / "absent" / "a.tokens", [[1]])


def test_a_target_that_cannot_be_replaced_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tokens").mkdir()
    with pytest.raises(FileError, match=r"a.tokens cannot be written"):
        write_token_file(tmp_path / "a.tokens", [[1]])
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_leaves_no_file_even_if_the_error_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    writer = TokenFileWriter(path).__enter__()
    writer._sections["input_ids"].file.close()
    with Path("/dev/full").open("wb", 0) as full:
        writer._sections["input_ids"].file = full
        with pytest.raises(FileError, match="No space left on device"):
            writer.append([1])
    with pytest.raises(FileError, match="was not written"):
        writer.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []
