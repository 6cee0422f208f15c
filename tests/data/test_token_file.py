"""A token file returns what was written, opens in constant time, and detects damage."""

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data import MeasuredSource, TokenFile, write_token_file
from evenstep.errors import FileError
from tests.internals import HEADER_SIZE, Header

ROWS = [[5, 6, 7], [8], [9, 10]]


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return write_token_file(tmp_path / "a.tokens", ROWS, dtype=np.uint16)


@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), max_size=12),
    st.sampled_from([np.uint8, np.uint16, np.int32, np.uint32, np.int64, ">i2"]),
    st.sampled_from([{}, {"loss_mask": np.bool_}, {"a": np.float32, "b": np.uint8}]),
)
def test_samples_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], dtype: Any, columns: Any
) -> None:
    samples = [
        {"input_ids": row, **{name: [n % 2 for n in row] for name in columns}} for row in rows
    ]
    path = tmp_path_factory.mktemp("tokens") / "a.tokens"
    file = write_token_file(path, samples, dtype=dtype, columns=columns)
    assert isinstance(file, MeasuredSource)
    assert len(file) == len(rows)
    found = [{name: array.tolist() for name, array in file[n].items()} for n in range(len(rows))]
    assert found == samples
    for name, declared in {"input_ids": dtype, **columns}.items():
        stored = np.dtype(declared).newbyteorder("<")
        assert all(file[n][name].dtype == stored for n in range(len(rows)))
    lengths = file.lengths_of(np.arange(len(rows)))
    assert lengths.tolist() == [len(row) for row in rows]
    assert lengths.dtype == np.int64
    file.verify()


def test_samples_are_read_only_views_of_the_file(file: TokenFile) -> None:
    tokens = file[0]["input_ids"]
    assert not tokens.flags.owndata
    assert tokens.flags.aligned
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    assert np.shares_memory(tokens, file[0]["input_ids"])


def test_the_file_is_opened_on_first_use(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "a.tokens")
    write_token_file(tmp_path / "a.tokens", ROWS)
    assert len(file) == 3


@pytest.mark.parametrize("item", [-1, 3, 2**40])
def test_an_index_out_of_range_is_refused(file: TokenFile, item: int) -> None:
    with pytest.raises(IndexError):
        file[item]
    with pytest.raises(IndexError):
        file.lengths_of(np.array([0, item]))


def test_a_hundred_million_samples_are_opened_without_reading_them(tmp_path: Path) -> None:
    """A sparse file: only what is read needs contents."""
    count = 100_000_000
    digests = {"input_ids": "", "offsets": ""}
    header = Header({"input_ids": np.dtype("<u2")}, count, count, digests)
    sections, size = header.sections()
    path = tmp_path / "a.tokens"
    with path.open("wb") as target:
        target.write(header.encode())
        target.seek(sections["input_ids"][1] - 2)
        target.write(np.array([77], "<u2").tobytes())
        target.seek(size - 16)
        target.write(np.array([count - 1, count], "<i8").tobytes())
    file = TokenFile(path)
    assert len(file) == count
    assert file[count - 1]["input_ids"].tolist() == [77]
    assert file.lengths_of(np.array([count - 1])).tolist() == [1]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"absent.tokens cannot be read \(No such file"):
        len(TokenFile(tmp_path / "absent.tokens"))
    with pytest.raises(FileError, match="cannot be read"):
        len(TokenFile(tmp_path))


@pytest.mark.parametrize("data", [b"", b"EVENSTEP PLAN 1\n" * 300, b"EVEN", b"\0" * 9000])
def test_a_foreign_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.tokens"
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"is not an Evenstep token file.*Write one with"):
        len(TokenFile(path))


@pytest.mark.parametrize("size", [20, 4095, 4096, 4100, -1])
def test_an_incomplete_file_is_refused(file: TokenFile, size: int) -> None:
    file.paths[0].write_bytes(file.paths[0].read_bytes()[:size])
    with pytest.raises(FileError, match=r"is damaged or incomplete \(.*write it again"):
        len(file)


def test_a_file_with_trailing_bytes_is_refused(file: TokenFile) -> None:
    file.paths[0].write_bytes(file.paths[0].read_bytes() + b"\0")
    with pytest.raises(FileError, match="it has 4193 bytes instead of 4192"):
        len(TokenFile(file.paths[0]))


@pytest.mark.parametrize("at", [16, 47, 48, 60, HEADER_SIZE - 1])
def test_a_header_with_one_wrong_byte_is_refused(file: TokenFile, at: int) -> None:
    spoil(file.paths[0], at)
    with pytest.raises(FileError, match="its header does not match its digest"):
        len(file)


@pytest.mark.parametrize(
    ("dtype", "samples"), [("|O", 3), ("<M8[s]", 3), ("<u2", -1), ("nonsense", 3)]
)
def test_a_malformed_header_is_refused(file: TokenFile, dtype: str, samples: int) -> None:
    """The digest of the header is valid."""

    class Claimed:
        str = dtype

    header = Header({"input_ids": Claimed()}, samples, 6, {})  # type: ignore[dict-item]
    file.paths[0].write_bytes(header.encode() + bytes(200))
    with pytest.raises(FileError, match="its header is malformed"):
        len(file)


def test_a_header_without_the_digest_of_a_section_is_refused(file: TokenFile) -> None:
    header = Header({"input_ids": np.dtype("<u2")}, 3, 6, {"input_ids": "f" * 32})
    file.paths[0].write_bytes(header.encode() + bytes(200))
    with pytest.raises(FileError, match="its header is malformed"):
        len(file)


def test_offsets_that_do_not_span_the_tokens_are_detected_on_opening(file: TokenFile) -> None:
    spoil(file.paths[0], -8)
    with pytest.raises(FileError, match="its samples span tokens 0 to"):
        len(file)


def test_decreasing_offsets_are_detected_on_reading(file: TokenFile) -> None:
    spoil(file.paths[0], -24)
    assert len(file) == 3
    with pytest.raises(FileError, match=r"sample 1 spans tokens \d+ to 4"):
        file[1]
    with pytest.raises(FileError, match=r"sample 1 has -\d+ tokens"):
        file.lengths_of(np.arange(3))


@pytest.mark.parametrize(("at", "name"), [(HEADER_SIZE, "input_ids"), (-24, "offsets")])
def test_verify_detects_any_wrong_byte(file: TokenFile, at: int, name: str) -> None:
    spoil(file.paths[0], at)
    with pytest.raises(FileError, match=f"the digest of {name} does not match"):
        file.verify()


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_the_fingerprint_covers_tokens_boundaries_order_and_columns(tmp_path: Path) -> None:
    def fingerprint(rows: list[Any], **options: Any) -> str:
        return write_token_file(tmp_path / "b.tokens", rows, **options).fingerprint

    assert fingerprint(ROWS) == fingerprint(ROWS)
    masked = [{"input_ids": row, "mask": [0] * len(row)} for row in ROWS]
    unmasked = [{"input_ids": row, "mask": [1] * len(row)} for row in ROWS]
    others = [
        fingerprint(ROWS),
        fingerprint(ROWS[::-1]),
        fingerprint([[5, 6], [7, 8], [9, 10]]),
        fingerprint([[5, 6, 7], [8], [9, 11]]),
        fingerprint(masked, columns={"mask": np.uint8}),
        fingerprint(unmasked, columns={"mask": np.uint8}),
    ]
    assert len(set(others)) == len(others)


def test_pickling_does_not_include_the_data(tmp_path: Path) -> None:
    file = write_token_file(tmp_path / "a.tokens", [range(10_000)])
    assert len(file[0]["input_ids"]) == 10_000
    data = pickle.dumps(file)
    assert len(data) < 1000
    assert pickle.loads(data)[0]["input_ids"].tolist() == list(range(10_000))


def read(file: TokenFile, item: int) -> list[int]:
    return [int(token) for token in file[item]["input_ids"]]


def test_a_spawned_process_opens_the_file_itself(file: TokenFile) -> None:
    assert len(file) == 3
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.starmap(read, [(file, 2), (file, 0)]) == [[9, 10], [5, 6, 7]]
