from pathlib import Path

import pytest

from evenstep.config import load_recipe, overridden, recipe_from
from evenstep.core.layout import Packed, Padded
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.topology import Topology
from evenstep.errors import ConfigError, FileError


def test_a_file_decodes_into_the_values_that_python_would_write(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "layout: {kind: padded, max_tokens: 8192, round_to: 64, cut: greedy}\n"
        "topology: {dp: 8, cp: 2}\n"
        "steps: {samples: 128}\n"
        "cost: {per_token: 1e6}\n"
        "limits: {segments: 16, columns: {images: 4}}\n"
        "overflow: split\n"
    )
    recipe = load_recipe(path)
    assert recipe.layout == Padded(max_tokens=8192, round_to=64, cut="greedy")
    assert recipe.topology == Topology(dp=8, cp=2)
    assert recipe.steps == Steps(samples=128)
    assert recipe.cost.per_token == 1e6
    assert recipe.limits.columns == {"images": 4}
    assert recipe.overflow == "split"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"max_tokens": 8}, Packed(max_tokens=8)),
        ({"kind": "packed", "max_tokens": 8}, Packed(max_tokens=8)),
        ({"rows": 2, "pad_to": 8}, Packed(rows=2, pad_to=8)),
        ({"kind": "padded", "samples": 2}, Padded(samples=2)),
    ],
)
def test_the_kind_of_layout_decides_its_class(layout: dict[str, object], expected: object) -> None:
    assert recipe_from({"layout": layout}).layout == expected


def test_a_recipe_survives_its_own_dictionary() -> None:
    recipe = Recipe(layout=Packed(samples=3), topology=Topology(dp=4), seed=7)
    assert recipe_from(recipe.to_dict()) == recipe


def test_numbers_may_be_written_as_powers_of_ten() -> None:
    recipe = load_recipe(overrides=["layout.max_tokens=1e4", "steps.tokens=4e6"])
    assert (recipe.layout.max_tokens, recipe.steps.tokens) == (10_000, 4_000_000)


def test_all_faults_are_reported_at_once_with_their_paths() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from(
            {
                "layout": {"max_tokens": "many", "packer": "best"},
                "topology": {"dp": 0},
                "steps": {"sample": 3},
                "limits": {"columns": {"images": "few"}},
                "cost": 3,
                "balance": "magic",
            }
        )
    message = str(caught.value)
    for path in (
        "layout.max_tokens",
        "layout.packer",
        "topology.dp",
        "steps.sample",
        "limits.columns.images",
        "cost",
        "balance",
    ):
        assert f"{path} is " in message
    assert "7 faults" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        (
            {"layout": {"max_tokens": 0, "round_to": 0, "packer": "best", "size": 3}},
            ["layout.packer", "layout.size", "layout.max_tokens", "layout.round_to"],
        ),
        ({"layout": {"round_to": 0}}, ["layout.max_tokens", "layout.round_to"]),
        ({"topology": {"dp": 0, "cp": 0}}, ["topology.dp", "topology.cp"]),
        ({"topology": {"dp": "x", "cp": 0}}, ["topology.dp", "topology.cp"]),
        ({"limits": {"cost": 0, "columns": {"a": 0, "b": 0}}},
         ["limits.cost", "limits.columns.a", "limits.columns.b"]),
        ({"cost": {"per_token": -1, "per_pair": -1}}, ["cost.per_token", "cost.per_pair"]),
        ({"seed": "x", "lay": 3, "costs": 4, "cost": 5}, ["seed", "lay", "costs", "cost"]),
        ({"seed": -1, "topology": {"vpp": 2}}, ["topology.vpp", "seed"]),
        # What may follow from the first fault alone is not said: vpp needs a pipeline.
        ({"topology": {"pp": 0, "vpp": 2, "tp": 0}}, ["topology.tp", "topology.pp"]),
        ({"cost": 3, "limits": {"columns": {"a": 0}, "cost": 0}},
         ["cost", "limits.columns.a", "limits.cost"]),
    ],
)  # fmt: skip
def test_all_faults_of_one_part_are_reported_at_once(
    data: dict[str, object], paths: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from({"layout": {"max_tokens": 8}} | data)
    message = str(caught.value)
    assert f"{len(paths)} faults" in message
    for path in paths:
        assert f") {path} is " in message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "layout.max_tokens is missing"),
        ({"layout": {"max_tokens": 8}, "lay": 3}, "A recipe knows layout, topology, steps"),
        ({"layout": {"max_tokens": 8, "rows": 3}}, "A packed layout knows kind, max_tokens"),
        ({"layout": {"kind": "ragged"}}, "Use 'padded' or 'packed'"),
        ({"layout": {"kind": ["packed"]}}, "does not exist"),
        ({"layout": 8}, "Write it as layout.KEY=VALUE"),
        ({"layout": {"max_tokens": 8}, "topology": None}, "topology.KEY=VALUE"),
        ({"layout": {"max_tokens": 8}, "topology": {"pd": 3}}, "Topology knows dp, cp, tp"),
        ({"layout": {"max_tokens": 8}, "equal_sizes": "maybe"}, "true or false"),
        ({"layout": {"max_tokens": 8}, "limits": {"cost": float("nan")}}, "finite number"),
        ({"layout": {"max_tokens": 8}, "cost": {"per_token": 1e300}}, "sums would overflow"),
        ({"layout": {"max_tokens": 2**62}}, "between 1 and"),
        ({"layout": {"max_tokens": 8}, "overflow": "alone", "topology": {"pp": 2}}, "'alone'"),
    ],
)
def test_a_fault_says_what_would_be_right(data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from(data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {"layout": {"max_tokens": 8, "packer": "foo"}},
        {"layout": {}},
        {"layout": {"max_tokens": 8}, "topology": 3},
        {"layout": {"max_tokens": 8}, "seed": "x"},
        {"layout": {"max_tokens": 8}, "topology": {1: 2}},
    ],
)
def test_a_fault_says_its_consequence(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r", so .+\. [A-Z].+\.$"):
        recipe_from(data)


def test_messages_cut_what_is_long(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    path.write_text("\n".join([*lines, "layout: {max_tokens: *a8}", "seed: *a8", "cost: *a8"]))
    for overrides in ([], ["seed.a=1"], ["x" * 9999], [f"{'x' * 9999}=1"], [f"seed={'x' * 9999}"]):
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, overrides)
        assert len(str(caught.value)) < 4000


def test_overrides_leave_the_original_alone() -> None:
    data = {"topology": {"dp": 2}}
    assert overridden(data, ["topology.dp=8", "limits.columns.images=4"]) == {
        "topology": {"dp": 8},
        "limits": {"columns": {"images": 4}},
    }
    assert data == {"topology": {"dp": 2}}


def test_the_last_override_of_a_key_wins() -> None:
    assert overridden({}, ["seed=1", "seed=2"]) == {"seed": 2}


def test_another_kind_of_layout_keeps_only_the_keys_it_knows() -> None:
    data = {"layout": {"kind": "padded", "max_tokens": 8, "cut": "greedy"}}
    changed = overridden(data, ["layout.packer=optimal", "layout.kind=packed"])
    assert changed["layout"] == {"kind": "packed", "max_tokens": 8, "packer": "optimal"}


@pytest.mark.parametrize("override", ["seed", "=3", "layout..max=3", ".a=3", "seed={", "seed.a=1"])
def test_an_override_that_sets_nothing_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        overridden({"seed": 3}, [override])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"- 1\n", "list data"),
        (b"layout: {\n", "not YAML at line 2"),
        (b"seed: 1\nseed: 2\n", "line 2, column 1 (seed is given twice)"),
        (b"\xff\xfe\x00", "not text"),
        (b"seed: !!timestamp abc\n", "a value does not fit its tag"),
        (b"seed: !!bool maybe\n", "a value does not fit its tag"),
        (b"seed: !!int ''\n", "a value does not fit its tag"),
        (b"a: &a {x: 1}\nb:\n  <<: *a\n", "merges keys with << at line 3, column 3"),
        (b"seed: " + b"9" * 5000, "a number of 5000 digits"),
        (b"3: 4\n", "keys are needed"),
        (b"a: !!python/object/apply:os.getcwd []\n", "not YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_leaves_everything_to_overrides(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# nothing yet\n")
    assert load_recipe(path, ["layout.max_tokens=8"]) == Recipe(layout=Packed(max_tokens=8))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"absent\.yaml cannot be read"):
        load_recipe(tmp_path / "absent.yaml")
