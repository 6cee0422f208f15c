"""Rows of Parquet files in any order, across files and row groups."""

import json
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenstep.data import Corpus, MeasuredSource, ParquetText, SampleSource
from evenstep.errors import ConfigError, FileError, InputError, SampleError
from tests.internals import read_samples


def write(path: Path, texts: list[str | None], group: int = 3, **columns: Any) -> Path:
    table = pa.table({"text": pa.array(texts, pa.string()), **columns})
    pq.write_table(table, path, row_group_size=group)
    return path


def words(first: int, count: int) -> list[str | None]:
    return [f"word {n}" for n in range(first, first + count)]


def text_of(sample: Any) -> str:
    return bytes(sample["input_ids"].tolist()).decode()


@pytest.fixture
def source(tmp_path: Path) -> ParquetText:
    """Files of 10, 0 and 25 rows, in groups of 3."""
    paths = [
        write(tmp_path / "a.parquet", words(0, 10)),
        write(tmp_path / "b.parquet", []),
        write(tmp_path / "c.parquet", words(10, 25)),
    ]
    return ParquetText(paths)


def test_rows_of_all_files_are_items_in_any_order(source: ParquetText) -> None:
    assert isinstance(source, SampleSource)
    assert not isinstance(source, MeasuredSource)
    assert len(source) == 35
    order = [n * 11 % 35 for n in range(35)]
    assert [text_of(source[item]) for item in order] == [f"word {item}" for item in order]


def test_threads_may_read_concurrently(source: ParquetText) -> None:
    items = [n * 13 % 35 for n in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert [text_of(s) for s in pool.map(source.__getitem__, items)] == [
            f"word {item}" for item in items
        ]


def test_a_few_decoded_groups_are_cached(
    source: ParquetText, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    read: Callable[..., Any] = pq.ParquetFile.read_row_group

    def counted(file: Any, number: int, **options: Any) -> Any:
        assert options["columns"] == ["text"]
        decoded.append(number)
        return read(file, number, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    for item in [0, 3, 0, 6, 1, 4, 7]:
        source[item]
    assert decoded == [0, 1, 2]
    for item in range(10, 35):
        source[item]
    assert decoded == [0, 1, 2, *range(9)]
    for item in (34, 33, 30, 27):  # the last four groups
        source[item]
    assert decoded == [0, 1, 2, *range(9)]


def test_a_transform_gets_the_whole_row_and_may_return_several_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", words(0, 2), turns=[[[1], [2, 3]], [[4]]])

    def turns(row: dict[str, Any]) -> Any:
        return [{"input_ids": turn, "of": row["text"]} for turn in row["turns"]]

    found = read_samples(ParquetText(path, transform=turns), 0)
    assert [sample for _, sample in found] == [
        {"input_ids": [1], "of": "word 0"},
        {"input_ids": [2, 3], "of": "word 0"},
    ]


def test_field_and_tokenizer_can_be_set(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["x"], body=["abc"])
    source = ParquetText(str(path), field="body", tokenizer=lambda text: [len(text)])
    assert text_of(source[0]) == "\3"


@pytest.mark.parametrize("item", [-1, 35])
def test_an_index_out_of_range_is_refused(source: ParquetText, item: int) -> None:
    with pytest.raises(IndexError):
        source[item]


def test_a_row_without_text_names_its_file_and_row(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.parquet", words(0, 4)),
        write(tmp_path / "b.parquet", ["x"] * 4 + [None]),
    ]
    with pytest.raises(
        SampleError, match=r"sample 8 .*b.parquet, row 4: field 'text' must be a str, got None"
    ):
        read_samples(ParquetText(paths), 8)


def test_a_missing_column_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["x"], id=[1])
    with pytest.raises(InputError, match=r"a.parquet has no column 'body'; it has text, id"):
        len(ParquetText(path, field="body"))


def test_a_missing_or_foreign_file_is_named_when_it_is_used(tmp_path: Path) -> None:
    source = ParquetText(tmp_path / "absent.parquet")
    with pytest.raises(FileError, match=r"absent.parquet is not readable Parquet"):
        len(source)
    foreign = tmp_path / "foreign.parquet"
    foreign.write_bytes(b"text" * 100)
    with pytest.raises(FileError, match=r"foreign.parquet is not readable Parquet"):
        len(ParquetText(foreign))
    with pytest.raises(ConfigError, match="at least one file"):
        ParquetText([])


def test_a_file_with_damaged_pages_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", words(0, 5))
    source = ParquetText(path)
    assert len(source) == 5
    path.write_bytes(b"")
    with pytest.raises(FileError, match=r"a.parquet is not readable Parquet"):
        source[0]


def test_without_pyarrow_the_error_says_how_to_install_it(
    source: ParquetText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FileError, match=r"pip install 'evenstep\[parquet\]'"):
        len(source)


def test_the_fingerprint_covers_contents_and_field_but_not_names(tmp_path: Path) -> None:
    one = ParquetText(write(tmp_path / "a.parquet", words(0, 5), body=["x"] * 5))
    same = ParquetText(write(tmp_path / "b.parquet", words(0, 5), body=["x"] * 5))
    assert one.fingerprint == same.fingerprint
    others = [
        ParquetText(write(tmp_path / "c.parquet", words(1, 5), body=["x"] * 5)),
        ParquetText(write(tmp_path / "d.parquet", words(0, 6), body=["x"] * 6)),
        ParquetText([*one.paths, *same.paths]),
        ParquetText(one.paths, field="body"),
    ]
    assert len({source.fingerprint for source in [one, *others]}) == 5


def test_pickling_does_not_include_decoded_groups(source: ParquetText) -> None:
    before = len(pickle.dumps(source))
    assert text_of(source[20]) == "word 20"
    assert len(pickle.dumps(source)) == before
    copy = pickle.loads(pickle.dumps(source))
    assert text_of(copy[20]) == "word 20"
    assert copy.fingerprint == source.fingerprint


IDS, LABELS = [[1, 2, 3], [4, 5]], [[-100, 2, 3], [-100, 5]]


@pytest.mark.parametrize("name", ["labels", "loss_mask", "response_mask"])
def test_labels_and_masks_beside_tokens_are_read(tmp_path: Path, name: str) -> None:
    columns = {"input_ids": IDS, name: LABELS, "kind": ["a", "b"]}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=1)
    source = ParquetText(path, field="input_ids")
    for item in range(2):
        row: Any = source[item]
        assert row.keys() == {"input_ids", name}
        assert (row["input_ids"].tolist(), row[name]) == (IDS[item], LABELS[item])
    row = source.counting()[1]
    assert row.keys() == {"input_ids"}


def test_columns_that_say_nothing_change_no_sample(tmp_path: Path) -> None:
    columns = {
        "attention_mask": [[1] * len(ids) for ids in IDS],
        "loss_mask": pa.nulls(2, pa.list_(pa.int64())),
        "labels": [LABELS[0], None],
    }
    pq.write_table(pa.table({"input_ids": IDS, **columns}), tmp_path / "a.parquet")
    source = ParquetText(tmp_path / "a.parquet", field="input_ids")
    assert [{*sample} for sample in (source[0], source[1])] == [
        {"input_ids", "labels"},
        {"input_ids"},
    ]


def test_labels_and_masks_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["ab", "cd"], "labels": LABELS}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="row 0: the row has 'labels', but only 'text' is read"):
        ParquetText(tmp_path / "a.parquet")[0]
    counted: Any = ParquetText(tmp_path / "a.parquet").counting()[1]
    assert len(counted["input_ids"]) == 2
    write(tmp_path / "classes.parquet", ["ab"], labels=[3])  # of the whole text
    assert text_of(ParquetText(tmp_path / "classes.parquet")[0]) == "ab"


def test_a_corpus_keeps_labels_of_parquet_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": IDS, "labels": LABELS}), tmp_path / "a.parquet")
    corpus = Corpus(paths=str(tmp_path / "a.parquet"), field="input_ids")
    path = tmp_path / "stored.tokens"
    assert [corpus.stored(path)[n]["labels"].tolist() for n in range(2)] == LABELS
    beside = path.with_suffix(".json")  # of a release that lost them
    key = json.loads(beside.read_text())
    del key["options"]["labels"]
    beside.write_text(json.dumps(key, indent=1))
    written = path.stat().st_mtime_ns
    corpus.stored(path)
    assert path.stat().st_mtime_ns > written
