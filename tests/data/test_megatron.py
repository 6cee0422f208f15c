"""Documents and sequences of Megatron's files, whatever their types and order."""

import pickle
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, PlannedStream, Recipe, Steps
from evenstep.data import MeasuredSource, MegatronTokens
from evenstep.errors import ConfigError, FileError
from evenstep.testing import assert_exact_resume
from tests.data.megatron_files import DTYPES, write_pair
from tests.examples import examples

INTEGERS = sorted(code for code, dtype in DTYPES.items() if dtype.kind != "f")


@st.composite
def files(draw: st.DrawFn) -> tuple[list[list[list[int]]], int, list[int]]:
    """Documents of sequences of tokens, the dtype, and the order of sequences in the file."""
    tokens = st.lists(st.integers(0, 127), max_size=5)
    documents = draw(st.lists(st.lists(tokens, max_size=4), max_size=6))
    count = sum(map(len, documents))
    order = draw(st.permutations(range(count)) | st.just(list(range(count))))
    return documents, draw(st.sampled_from(INTEGERS)), list(order)


@given(files())
@examples(200)
def test_documents_and_sequences_are_samples_without_the_empty_ones(
    case: tuple[list[list[list[int]]], int, list[int]],
) -> None:
    documents, code, order = case
    sequences = [each for document in documents for each in document]
    with tempfile.TemporaryDirectory() as folder:
        counts = [len(document) for document in documents]
        path = write_pair(Path(folder, "a.text"), sequences, counts, code, order)
        joined = [[token for each in document for token in each] for document in documents]
        units = {"document": joined, "sequence": sequences}
        for unit, expected in units.items():
            source = MegatronTokens(path, unit=unit)  # type: ignore[arg-type]
            full = [tokens for tokens in expected if tokens]
            assert [source[i]["input_ids"].tolist() for i in range(len(source))] == full
            lengths = source.lengths_of(np.arange(len(source)))
            assert lengths.tolist() == [len(tokens) for tokens in full]
            assert lengths.dtype == np.int64
            for item in range(len(source)):
                assert source[item]["input_ids"].dtype == DTYPES[code]


@given(files(), files())
@examples(60)
def test_the_fingerprint_tells_files_apart(
    one: tuple[list[list[list[int]]], int, list[int]],
    other: tuple[list[list[list[int]]], int, list[int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for number, (documents, code, _) in enumerate((one, other)):
            sequences = [each for document in documents for each in document]
            counts = [len(document) for document in documents]
            path = write_pair(Path(folder, str(number)), sequences, counts, code)
            found.append(MegatronTokens(path))
            assert MegatronTokens(path).fingerprint == found[-1].fingerprint
        samples = [[each[i]["input_ids"].tolist() for i in range(len(each))] for each in found]
        if samples[0] != samples[1]:
            assert found[0].fingerprint != found[1].fingerprint


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Three documents: [1, 2, 3], [4, 5] and [6]; the first has two sequences."""
    return write_pair(tmp_path / "wiki.v1", [[1], [2, 3], [4, 5], [6]], [2, 1, 1])


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_either_file_names_the_pair(pair: Path, suffix: str) -> None:
    source = MegatronTokens(f"{pair}{suffix}")
    assert isinstance(source, MeasuredSource)
    assert [source[i]["input_ids"].tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6]]
    assert source.lengths_of(np.array([2, 0, 0])).tolist() == [1, 3, 3]
    assert len(MegatronTokens(f"{pair}{suffix}", unit="sequence")) == 4


def test_several_pairs_follow_each_other(pair: Path) -> None:
    other = write_pair(pair.with_name("other"), [[7], [], [8, 9]])
    write_pair(pair.with_name("nothing"), [])
    source = MegatronTokens([pair, other.with_name("nothing"), other])
    tokens = [source[i]["input_ids"].tolist() for i in range(len(source))]
    assert tokens == [[1, 2, 3], [4, 5], [6], [7], [8, 9]]
    assert source.lengths_of(np.array([4, 0, 3, 4])).tolist() == [2, 3, 1, 2]
    found = MegatronTokens(pair.with_name("*"))  # both files of each, sorted by name
    assert [found[i]["input_ids"].tolist() for i in range(5)] == [*tokens[3:], *tokens[:3]]
    assert MegatronTokens([other, pair]).fingerprint != source.fingerprint
    again = pickle.loads(pickle.dumps(source))
    assert (again.fingerprint, len(again)) == (source.fingerprint, 5)


def test_tokens_are_read_only_views_and_the_source_can_be_pickled(pair: Path) -> None:
    source = MegatronTokens(pair)
    tokens = source[0]["input_ids"]
    assert not tokens.flags.writeable
    assert not tokens.flags.owndata
    again = pickle.loads(pickle.dumps(source))
    assert again[0]["input_ids"].tolist() == [1, 2, 3]
    assert (again.fingerprint, again.unit) == (source.fingerprint, "document")


@pytest.mark.parametrize("item", [-1, 3])
def test_an_index_out_of_range_is_refused(pair: Path, item: int) -> None:
    source = MegatronTokens(pair)
    with pytest.raises(IndexError):
        source[item]
    with pytest.raises(IndexError):
        source.lengths_of(np.array([item]))


def test_a_stream_of_documents_resumes_exactly(tmp_path: Path) -> None:
    sequences = [list(range(1, 2 + n % 7)) for n in range(40)]
    source = MegatronTokens(write_pair(tmp_path / "a", sequences, [2] * 20))
    recipe = Recipe(layout=Packed(max_tokens=32), steps=Steps(samples=4))
    assert_exact_resume(lambda: PlannedStream(source, recipe, seed=1))


def change(offset: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda index: index[:offset] + content + index[offset + len(content) :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda index: b"", "not an index of Megatron"),
        (lambda index: b"TNTIDX\0\0" + index[8:], "not an index of Megatron"),
        (lambda index: index[:20], "damaged"),
        (lambda index: index[:-1], "damaged"),
        (lambda index: index + b"0", "damaged"),
        (lambda index: index + bytes(4), "has a mode per sequence"),
        (change(9, struct.pack("<Q", 2)), "has version 2 and dtype 4"),
        (change(17, b"\x09"), "has version 1 and dtype 9"),
        (change(17, b"\x07"), "index of float32 values"),
        (change(18, struct.pack("<Q", 5)), "bytes instead of"),
        (change(34, struct.pack("<i", -1)), "a sequence has -1 tokens"),
        (change(34 + 48, struct.pack("<q", 1)), "do not span 4 sequences"),
        (change(34 + 48 + 24, struct.pack("<q", 5)), "do not span 4 sequences"),
        (change(34 + 48 + 8, struct.pack("<q", 4)), "not in order"),
    ],
)
def test_a_damaged_index_is_refused(
    damage: Callable[[bytes], bytes], says: str, pair: Path
) -> None:
    index = pair.with_name("wiki.v1.idx")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(FileError, match=says):
        len(MegatronTokens(pair))


@pytest.mark.parametrize("pointer", [-4, 2**40])
def test_a_pointer_out_of_the_file_is_refused(pair: Path, pointer: int) -> None:
    index = pair.with_name("wiki.v1.idx")
    index.write_bytes(change(34 + 16 + 24, struct.pack("<q", pointer))(index.read_bytes()))
    assert MegatronTokens(pair)[0]["input_ids"].tolist() == [1, 2, 3]
    with pytest.raises(FileError, match=r"wiki.v1.bin is damaged"):
        MegatronTokens(pair)[2]


def test_a_truncated_data_file_is_refused(pair: Path) -> None:
    data = pair.with_name("wiki.v1.bin")
    data.write_bytes(data.read_bytes()[:-1])
    assert MegatronTokens(pair)[1]["input_ids"].tolist() == [4, 5]
    with pytest.raises(FileError, match="a sample spans bytes 20 to 24 of 23"):
        MegatronTokens(pair)[2]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(pair: Path, suffix: str) -> None:
    pair.with_name(f"wiki.v1{suffix}").unlink()
    with pytest.raises(FileError, match=rf"wiki.v1{suffix} cannot be read"):
        len(MegatronTokens(pair))


def test_an_unknown_unit_is_refused(pair: Path) -> None:
    with pytest.raises(ConfigError, match="unknown unit 'page'"):
        MegatronTokens(pair, unit="page")  # type: ignore[arg-type]
