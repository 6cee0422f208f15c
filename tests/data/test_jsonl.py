"""Lines of a JSONL file in any order, without blank ones; errors name the line."""

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, PlannedStream, PooledStream, Recipe, Steps
from evenstep.data import Jsonl, MeasuredMapped, MeasuredSource, SampleSource
from evenstep.errors import ConfigError, FileError, InputError, SampleError
from tests.internals import lines as line_files
from tests.internals import read_samples


def identity(row: Any) -> Any:
    return row


def tokens(source: Any, item: int) -> list[int]:
    found: list[int] = source[item]["input_ids"].tolist()
    return found


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(
    st.lists(st.sampled_from(["", " ", "\r", "\t \r", "1", ' {"a": 2}', "[3]\r", "4 "])),
    st.booleans(),
)
def test_items_are_the_lines_that_are_not_blank(lines: list[str], ended: bool) -> None:
    data = "\n".join(lines) + ("\n" if ended and lines else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(data.encode())
        file = line_files.LineFile(path)
        found = [file[item] for item in range(len(file))]
    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    assert found == [json.loads(line) for _, line in kept]
    assert [file.number(item) for item in range(len(kept))] == [number for number, _ in kept]


def test_a_line_becomes_the_tokens_of_its_text(tmp_path: Path) -> None:
    source = Jsonl(write(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "é"}))
    assert isinstance(source, SampleSource)
    assert not isinstance(source, MeasuredSource)
    assert [tokens(source, item) for item in (1, 0)] == [[195, 169], [97, 98]]


def test_field_and_tokenizer_can_be_set(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"body": "ab"})
    assert tokens(Jsonl(path, field="body", tokenizer=len_of), 0) == [2]


def len_of(text: str) -> list[int]:
    return [len(text)]


def test_a_transform_may_return_several_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"turns": [[1], [2, 3]]})
    source = Jsonl(path, transform=lambda row: [{"input_ids": turn} for turn in row["turns"]])
    assert [sample["input_ids"] for _, sample in read_samples(source, 0)] == [[1], [2, 3]]


def test_a_byte_order_mark_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert [tokens(Jsonl(path), item) for item in (0, 1)] == [[97], [98]]


@pytest.mark.parametrize("text", ["", "\n", " \n\n\t"])
def test_a_file_without_lines_has_no_items(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert len(Jsonl(path)) == 0
    assert Jsonl(path).fingerprint
    assert len(pickle.loads(pickle.dumps(Jsonl(path)))) == 0


@pytest.mark.parametrize("item", [-1, 2])
def test_an_index_out_of_range_is_refused(tmp_path: Path, item: int) -> None:
    with pytest.raises(IndexError):
        Jsonl(write(tmp_path / "a.jsonl", 1, 2), transform=identity)[item]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{'text': 1}", "not JSON"),
        (b'{"text": "a"', "not JSON"),
        (b'{"text": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a row with fields, got list"),
        (b'{"t": "a"}', "no field 'text'; the row has 't'"),
    ],
)
def test_a_bad_line_is_named_and_others_are_read(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    source = Jsonl(path)
    with pytest.raises(InputError, match=f"a.jsonl, line 3: {fault}"):
        source[1]
    with pytest.raises(SampleError, match=r"sample 1 cannot be read .*line 3"):
        read_samples(source, 1)
    assert tokens(source, 2) == [98]


def test_blank_lines_of_any_kind_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n \x0b\x0c\r\n{"text": "b"}')
    assert [tokens(Jsonl(path), item) for item in range(2)] == [[97], [98]]


def test_a_missing_file_is_named_when_it_is_used(tmp_path: Path) -> None:
    source = Jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(FileError, match=r"absent.jsonl cannot be read \(No such file"):
        len(source)
    with pytest.raises(FileError, match="cannot be read"):
        len(Jsonl(tmp_path))


def test_the_fingerprint_covers_contents_and_field_but_not_the_name(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    one = Jsonl(write(tmp_path / "a.jsonl", *rows))
    assert one.fingerprint == Jsonl(write(tmp_path / "b.jsonl", *rows)).fingerprint
    others = [
        Jsonl(write(tmp_path / "c.jsonl", *rows[::-1])),
        Jsonl(write(tmp_path / "d.jsonl", *rows, *rows)),
        Jsonl(one.paths, field="body"),
    ]
    assert len({source.fingerprint for source in [one, *others]}) == 4


def test_pickling_keeps_the_index_but_not_the_open_file(tmp_path: Path) -> None:
    source = Jsonl(write(tmp_path / "a.jsonl", *range(100)), transform=identity)
    assert (len(source), source[0]) == (100, 0)
    assert "_file" in vars(source._files[0])
    copy = pickle.loads(pickle.dumps(source))
    assert set(vars(copy._files[0])) == {"path", "_index"}
    assert [copy[item] for item in range(100)] == list(range(100))
    assert copy.fingerprint == source.fingerprint


def test_a_file_that_changed_since_it_was_indexed_is_refused(tmp_path: Path) -> None:
    source = Jsonl(write(tmp_path / "a.jsonl", 1, 2), transform=identity)
    assert len(source) == 2
    copy = pickle.loads(pickle.dumps(source))
    write(tmp_path / "a.jsonl", 1, 2, 3)
    with pytest.raises(FileError, match="has 6 bytes but had 4 when it was indexed"):
        copy[0]


def test_a_file_that_is_shortened_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": "x" * 100} for _ in range(1000)))
    source: Any = Jsonl(path)
    assert len(source[999]["input_ids"]) == 100
    with path.open("r+b") as file:
        file.truncate(500)
    assert len(source[0]["input_ids"]) == 100
    with pytest.raises(FileError, match=r"has 500 bytes but had .* Do not change the file"):
        source[999]


# Rows of tokens --------------------------------------------------------------------------------


def test_rows_with_input_ids_are_samples_of_a_planned_stream(tmp_path: Path) -> None:
    rows = [{"input_ids": [*range(n)], "loss_mask": [1] * n} for n in (3, 5, 2)]
    source: Any = Jsonl(write(tmp_path / "a.jsonl", *rows))
    assert [{**source[i], "input_ids": tokens(source, i)} for i in range(3)] == rows
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=3))
    (step,) = PlannedStream(source, recipe, shuffle=False)
    assert sorted(step.own_sample_ids.tolist()) == [0, 1, 2]
    assert [len(step.samples[i]["input_ids"]) for i in range(3)] == [3, 5, 2]
    (pooled,) = PooledStream(source, Recipe(layout=Packed(max_tokens=16)))
    assert sorted(pooled.own_sample_ids.tolist()) == [0, 1, 2]


def test_rows_of_text_still_have_no_known_lengths(tmp_path: Path) -> None:
    both = {"text": "ab", "input_ids": [1, 2, 3]}
    path = write(tmp_path / "a.jsonl", both)
    with pytest.raises(InputError, match=r"line 1: the row has both .*\. Set field to one of them"):
        Jsonl(path)[0]
    source: Any = Jsonl(path, field="text")
    assert tokens(source, 0) == [97, 98]
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=3))
    with pytest.raises(ConfigError, match="expected a source with known lengths, got Jsonl"):
        PlannedStream(source, recipe)


def test_the_field_input_ids_may_be_named(tmp_path: Path) -> None:
    rows = [{"text": "ab", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}] * 2
    source: Any = Jsonl(write(tmp_path / "a.jsonl", *rows), field="input_ids")
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2))
    (step,) = PlannedStream(source, recipe)
    assert [step.samples[item]["loss_mask"] for item in range(2)] == [[0, 1, 1]] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_rows_of_text_and_rows_of_tokens_are_not_mixed(tmp_path: Path, first: int) -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"text": "ab"}]
    source: Any = Jsonl(write(tmp_path / "a.jsonl", rows[first], rows[1 - first]))
    assert tokens(source, 0) == [[1, 2, 3], [97, 98]][first]
    with pytest.raises(InputError, match=r"line 2: the row has .*, but the first one has"):
        source[1]


def test_a_tokenizer_for_rows_with_input_ids_is_refused(tmp_path: Path) -> None:
    source: Any = Jsonl(write(tmp_path / "a.jsonl", {"input_ids": [1]}), tokenizer=len_of)
    with pytest.raises(InputError, match="'input_ids' is a list of token ids, on which the token"):
        source[0]


# Files that cannot be read ---------------------------------------------------------------------


@pytest.mark.parametrize("texts", [("",), ("\n", "")])
@pytest.mark.parametrize("kind", ["pooled", "planned"])
def test_a_stream_of_only_empty_files_is_an_error(
    tmp_path: Path, texts: tuple[str, ...], kind: str
) -> None:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.jsonl").write_text(text)
    recipe = Recipe(layout=Packed(max_tokens=8))
    stream: Any = {"pooled": PooledStream, "planned": PlannedStream}[kind]
    source, more = Jsonl(f"{tmp_path}/*.jsonl"), " and 1 more file" * (len(texts) - 1)
    for wrapped in (source, MeasuredMapped(source)):
        with pytest.raises(InputError, match=rf"no samples in .*0\.jsonl{more}\. Check the files"):
            list(stream(wrapped, recipe))


@pytest.mark.parametrize("path", ["https://host/a.jsonl", "s3://bucket/*.jsonl", "hf://a/b.jsonl"])
def test_paths_of_other_machines_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r":// paths are not supported yet\. Download"):
        Jsonl(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.ZST", "a.json.xz"])
def test_compressed_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    for path in (f"{tmp_path}/{name}", f"{tmp_path}/a.*"):
        with pytest.raises(FileError, match=r"files are not supported yet\. Decompress"):
            Jsonl(path)
