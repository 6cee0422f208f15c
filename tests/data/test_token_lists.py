"""Lengths of lists of tokens come from Arrow, without Python objects."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data import MeasuredMapped, ParquetText
from evenstep.errors import InputError
from tests.examples import examples
from tests.internals import is_token_list, list_lengths

TYPES = [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())]


def ignore(done: int, total: int) -> None:
    """No progress."""


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=7), min_size=1, max_size=3),
    st.sampled_from(TYPES),
    st.integers(1, 4),
)
@examples(100)
def test_the_lists_of_all_files_and_row_groups_are_counted(
    files: list[list[list[int]]], kind: Any, group: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.parquet") for number in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            table = pa.table({"ids": pa.array(rows, kind), "text": ["x"] * len(rows)})
            pq.write_table(table, path, row_group_size=group)
        seen: list[tuple[int, int]] = []
        found = ParquetText(paths, field="ids").list_lengths(
            lambda done, total: seen.append((done, total))
        )
        assert found is not None
        assert found.tolist() == [len(tokens) for rows in files for tokens in rows]
        assert all(total == len(found) for _, total in seen)
        assert not seen or seen[-1][0] == len(found)
        assert ParquetText(paths, field="text").list_lengths(ignore) is None


def test_a_sliced_column_and_lists_of_one_size_are_counted() -> None:
    column = pa.chunked_array([pa.array([[1], [2, 3], [4, 5, 6]]), pa.array([[7]])])
    assert list_lengths(column.slice(1, 3), "ids", "a").tolist() == [2, 3, 1]
    fixed = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    assert list_lengths(fixed, "ids", "a").tolist() == [2, 2]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.string()), pa.int64()])
def test_only_lists_of_integers_are_tokens(kind: Any) -> None:
    assert not is_token_list(kind)
    with pytest.raises(InputError, match=r"a.parquet: the column 'ids' holds .*, expected lists"):
        list_lengths(pa.array([], kind), "ids", "a.parquet")


def test_a_row_without_a_list_is_named(tmp_path: Path) -> None:
    path, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table({"ids": [[1]] * 5}), path)
    pq.write_table(pa.table({"ids": [[1], [2], None]}), other, row_group_size=2)
    with pytest.raises(InputError, match=r"b.parquet: row 2 has None as 'ids'"):
        ParquetText([path, other], field="ids").list_lengths(ignore)


def test_a_later_file_with_another_type_is_named(tmp_path: Path) -> None:
    path, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table({"ids": [[1]]}), path)
    pq.write_table(pa.table({"ids": ["text"]}), other)
    with pytest.raises(InputError, match=r"b.parquet: the column 'ids' holds string"):
        ParquetText([path, other], field="ids").list_lengths(ignore)
    pq.write_table(pa.table({"text": ["text"]}), other)
    with pytest.raises(InputError, match=r"b.parquet has no column 'ids'; it has text"):
        ParquetText([path, other], field="ids").list_lengths(ignore)


@pytest.mark.parametrize("field", ["ids", "text"])
def test_lengths_of_lists_in_a_wrapped_file_are_not_read_row_by_row(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"ids": [[1, 2, 3], [4], [5, 6]], "text": ["abc", "d", "ef"]})
    pq.write_table(table, tmp_path / "a.parquet")
    reads: list[int] = []
    read = ParquetText._read

    def counted(self: ParquetText, item: int, *more: Any) -> Any:
        reads.append(item)
        return read(self, item, *more)

    monkeypatch.setattr(ParquetText, "_read", counted)
    source = MeasuredMapped(ParquetText(tmp_path / "a.parquet", field=field))
    assert source.lengths_of(np.arange(3)).tolist() == [3, 1, 2]
    assert len(reads) == (0 if field == "ids" else 3)
