"""Random files of other systems: what converts loads the same, and every mistake is named."""

import contextlib
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Recipe
from evenstep.config import (
    FaultsError,
    load_file,
    load_settings,
    native_data,
    native_yaml,
    settings_from,
)
from evenstep.errors import EvenstepError
from tests.config.dialect_files import CASES
from tests.examples import examples
from tests.internals import DIALECTS, Key, leaves, read_document, read_tree, unflattened

SIZES = st.sampled_from([1, 2, 3, 4, 8, 64, 128, 512, 4096, 16384, 65536])


def values_of(key: Key) -> st.SearchStrategy[Any]:
    match key.kind:
        case "flag":
            return st.booleans()
        case "word":
            return st.sampled_from(key.words or ("megatron_train", "blockwise"))
        case "whole":
            return SIZES if key.least else st.sampled_from([0, 1, 64, 4096])
        case "number":
            return st.sampled_from([0, 0.1, 1.5])
    return st.sampled_from(["list(range(0,8))", [0, 1], None])


@st.composite
def any_file(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A dialect, and some of its keys with values of the right types."""
    dialect = DIALECTS[draw(st.sampled_from(sorted(DIALECTS)))]
    names = draw(st.lists(st.sampled_from(sorted(dialect.keys)), unique=True, max_size=14))
    return dialect.name, unflattened({name: draw(values_of(dialect.keys[name])) for name in names})


def written(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "file.yaml"
    path.write_text(json.dumps(data))
    return path


@examples(300)
@given(any_file())
def test_files_load_and_convert_to_the_same_settings_or_name_their_faults(
    file: tuple[str, dict[str, Any]],
) -> None:
    dialect, data = file
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), data)
        faults: tuple[str, ...] = ()
        try:
            loaded = load_file(path, dialect=dialect)
        except FaultsError as error:
            faults = error.faults
        if faults:
            assert all(fault[-1] in ".?)" for fault in faults)
            assert len(set(faults)) == len(faults)
            return
        assert set(loaded.origins) == set(leaves(loaded.settings.to_dict()))
        native = Path(folder) / "native.yaml"
        native.write_text(native_yaml(loaded.settings, loaded.origins, loaded.notes))
        assert load_settings(native) == loaded.settings
        assert settings_from(native_data(loaded.settings)) == loaded.settings


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_the_documents_convert_to_the_same_settings(name: str, tmp_path: Path) -> None:
    loaded = CASES[name].load(tmp_path)
    native = tmp_path / "native.yaml"
    native.write_text(native_yaml(loaded.settings, loaded.origins, loaded.notes))
    assert load_settings(native) == loaded.settings


def plain_data(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    path = case.write(folder)
    tree = read_tree(path) if case.suffix == ".yaml" else None
    return copy.deepcopy(read_document(path).data if tree is None else tree.data)


def known_leaves(name: str, data: dict[str, Any]) -> list[str]:
    """The keys of a file that its dialect reads, and that are not another worker's."""
    keys = DIALECTS[CASES[name].dialect].keys
    return [path for path in leaves(data) if path in keys]


def misspelt(word: str, at: int, how: str) -> str:
    at %= len(word)
    if how == "drop":
        return word[:at] + word[at + 1 :]
    if how == "double":
        return word[:at] + word[at] + word[at:]
    at = min(at, len(word) - 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


@examples(300)
@given(
    st.sampled_from(sorted(CASES)),
    st.integers(0, 99),
    st.integers(0, 3),
    st.integers(0, 30),
    st.sampled_from(["drop", "double", "swap"]),
)
def test_a_misspelt_key_is_named(name: str, which: int, level: int, at: int, how: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = plain_data(name, Path(folder))
        keys = known_leaves(name, data)
        path = keys[which % len(keys)].split(".")
        level = min(level, len(path) - 1)
        wrong = misspelt(path[level], at, how)
        parent: Any = data
        for key in path[:level]:
            parent = parent[key]
        if wrong in parent or len(path[level]) < 4:
            return
        if ".".join([*path[:level], wrong]) in DIALECTS[CASES[name].dialect].keys:
            return  # another known key, such as fsdp and fsdp2
        parent[wrong] = parent.pop(path[level])
        with pytest.raises(EvenstepError) as caught:
            load_file(written(Path(folder), data), dialect=CASES[name].dialect)
        assert isinstance(caught.value, FaultsError)
        expected = ".".join([*path[:level], wrong])
        assert any(fault.startswith(f"{expected} ") for fault in caught.value.faults), (
            expected,
            caught.value.faults,
        )


@examples(300)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.sampled_from([{"x": 1}, ["a"], "plenty", -3, 2.5, ""]),
)
def test_values_of_the_wrong_type_are_all_named(name: str, which: list[int], value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = plain_data(name, Path(folder))
        dialect = DIALECTS[CASES[name].dialect]
        keys = [
            key
            for key in known_leaves(name, data)
            if dialect.keys[key].kind in ("flag", "whole") or dialect.keys[key].words
        ]
        chosen = {keys[number % len(keys)] for number in which}
        for path in chosen:
            *parents, last = path.split(".")
            parent: Any = data
            for key in parents:
                parent = parent[key]
            parent[last] = value
        with pytest.raises(FaultsError) as caught:
            load_file(written(Path(folder), data), dialect=dialect.name)
        for path in chosen:
            assert any(
                fault.startswith((f"{path} must be ", f"unknown {path} "))
                for fault in caught.value.faults
            ), (path, caught.value.faults)


@examples(200)
@given(
    st.sampled_from(sorted(DIALECTS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("${a.b}"),
        lambda inner: st.dictionaries(
            st.sampled_from(["policy", "train", "actor_train", "a", "data", "defaults", "schedule",
                             "actor_rollout_ref", "actor", "sequence_packing", "dyn_bsz"]),
            inner, max_size=4,
        ) | st.lists(inner, max_size=2),
        max_leaves=12,
    ),
)  # fmt: skip
def test_any_data_loads_or_is_refused_in_words(dialect: str, data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.yaml"
        path.write_text(json.dumps(data))
        with contextlib.suppress(EvenstepError):
            assert isinstance(load_file(path, dialect=dialect).settings.recipe, Recipe)
