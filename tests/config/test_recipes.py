import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Cost, Packed, Padded, Recipe, Steps, Topology
from evenstep.config import load_recipe, overridden, recipe_from
from evenstep.errors import ConfigError, FileError
from tests.internals import PACKER_NAMES


def test_a_file_decodes_into_the_values_that_python_would_write(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "layout: {kind: padded, max_tokens: 8192, round_to: 64, cut: greedy}\n"
        "topology: {dp: 8, cp: 2}\n"
        "steps: {samples: 128}\n"
        "cost: {per_token: 1e6}\n"
        "limits: {cost: 1e12, columns: {images: 4}}\n"
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
    layout = Packed(max_tokens=8, packer="first_fit_shuffle")
    recipe = Recipe(layout=layout, topology=Topology(dp=4), seed=7)
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
        assert re.search(rf"\) (unknown )?{re.escape(path)} ", message)
    assert "7 faults" in message
    assert message.count("\n") == 7  # a line each


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
        # A possible consequence of the first fault is not reported: vpp needs a pipeline.
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
        assert re.search(rf"\) (unknown )?{re.escape(path)} ", message)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "layout.max_tokens is missing"),
        ({"layout": {"max_tokens": 8}, "lay": 3}, "A recipe has layout, topology, steps"),
        ({"layout": {"max_tokens": 8, "row": 3}}, "A packed layout has max_tokens"),
        (
            {"layout": {"kind": "ragged"}},
            "'ragged'; expected one of: padded, packed",
        ),
        ({"layout": {"kind": ["packed"]}}, "unknown layout.kind ['packed']"),
        ({"layout": 8}, "Write it as layout.KEY=VALUE"),
        ({"layout": {"max_tokens": 8}, "topology": None}, "topology.KEY=VALUE"),
        ({"layout": {"max_tokens": 8}, "topology": {"pd": 3}}, "Topology has dp, cp, tp"),
        ({"layout": {"max_tokens": 8}, "equal_sizes": "maybe"}, "true or false"),
        ({"layout": {"max_tokens": 8}, "limits": {"cost": float("nan")}}, "finite number"),
        ({"layout": {"max_tokens": 8}, "cost": {"per_token": 1e300}}, "cost.per_token must be in"),
        ({"layout": {"max_tokens": 2**62}}, "must be an integer in [1, "),
        ({"layout": {"max_tokens": 8}, "overflow": "alone", "topology": {"pp": 2}}, "'alone'"),
    ],
)
def test_a_fault_says_what_was_expected(data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from(data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"layout": {"max_tokens": 8, "packer": "foo"}},
            f"unknown layout.packer 'foo'; expected one of: {', '.join(PACKER_NAMES)}.",
        ),
        (
            {"layout": {}},
            "layout.max_tokens is missing: a packed layout needs layout.max_tokens, "
            "layout.samples or layout.pad_to.",
        ),
        ({"topology": 3}, "topology must hold keys, got 3. Write it as topology.KEY=VALUE."),
        ({"seed": "x"}, "seed must be an integer, got 'x'."),
        ({"seed": 3.5}, "seed must be an integer, got 3.5."),
        ({"seed": -1}, "seed must be in [0, 2**63), got -1."),
        ({"topology": {1: 2}}, "topology.1 is not a known key. Write keys as words."),
        ({"cost": {"per_token": "x"}}, "cost.per_token must be a number, got 'x'."),
    ],
)
def test_a_fault_is_one_plain_sentence(data: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from({"layout": {"max_tokens": 8}} | data)
    assert str(caught.value) == sentence


def test_messages_shorten_long_values(tmp_path: Path) -> None:
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
        (b"layout: {\n", "not valid YAML at line 2"),
        (b"seed: 1\nseed: 2\n", "line 2, column 1 (seed is given twice)"),
        (b"\xff\xfe\x00", "not text"),
        (b"seed: !!timestamp abc\n", "a value does not fit its tag"),
        (b"seed: !!bool maybe\n", "a value does not fit its tag"),
        (b"seed: !!int ''\n", "a value does not fit its tag"),
        (b"a: &a {x: 1}\nb:\n  <<: *a\n", "merges keys with << at line 3, column 3"),
        (b"seed: " + b"9" * 5000, "a number of 5000 digits"),
        (b"3: 4\n", "expected keys that are words"),
        (b"a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
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


BUDGET = "layout.max_tokens"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps.samples=yes", "steps.samples must be an integer, got 'yes'."),
        ("steps.samples=true", "steps.samples must be an integer, got True."),
        ("steps.samples='8'", "steps.samples must be an integer, got '8'. Write 8 without quotes."),
        ("steps.samples=2:30:00", "steps.samples must be an integer, got '2:30:00'."),
        ("steps.samples=2026-01-01", "steps.samples must be an integer, got '2026-01-01'."),
        ("steps.samples=.inf", "steps.samples must be a finite number, got inf."),
        ("steps.samples=1.5", "steps.samples must be an integer, got 1.5."),
        (f"{BUDGET}=010000", f"{BUDGET} must be an integer, got '010000'. Write 10000 or 0o10000."),
        (f"{BUDGET}=0900", f"{BUDGET} must be an integer, got '0900'. Write 900."),
        (f"{BUDGET}=00", f"{BUDGET} must be an integer, got '00'. Write 0."),
        (f"{BUDGET}=0b101", f"{BUDGET} must be an integer, got '0b101'. Write 5."),
        (f"{BUDGET}=-0x10", f"{BUDGET} must be an integer, got '-0x10'."),
        (f"{BUDGET}=1__000", f"{BUDGET} must be an integer, got '1__000'."),
        (f"{BUDGET}=1000_", f"{BUDGET} must be an integer, got '1000_'."),
        ("limits.columns.images=on", "limits.columns.images must be an integer, got 'on'."),
        ("cost.per_token=no", "cost.per_token must be a number, got 'no'."),
        ("cost.per_token=true", "cost.per_token must be a number, got True."),
        ("cost.per_token=1:30.5", "cost.per_token must be a number, got '1:30.5'."),
        ("cost.per_token=010", "cost.per_token must be a number, got '010'. Write 10 or 0o10."),
        ("cost.per_token=.nan", "cost.per_token must be a finite number, got nan."),
        ("limits.cost=-.INF", "limits.cost must be a finite number, got -inf."),
        ("limits.cost=1e999", "limits.cost must be a finite number, got inf."),
        ("equal_sizes=no", "equal_sizes must be true or false, got 'no'. Write false."),
        ("equal_sizes=Off", "equal_sizes must be true or false, got 'Off'. Write false."),
        ("equal_sizes=YES", "equal_sizes must be true or false, got 'YES'. Write true."),
        ("equal_sizes='true'", "equal_sizes must be true or false, got 'true'. Write true."),
        ("equal_sizes=tRue", "equal_sizes must be true or false, got 'tRue'. Write true."),
        ("equal_sizes=1", "equal_sizes must be true or false, got 1. Write true."),
        ("equal_sizes=0", "equal_sizes must be true or false, got 0. Write false."),
        ("equal_sizes=maybe", "equal_sizes must be true or false, got 'maybe'."),
        ("equal_sizes=", "equal_sizes must be true or false, got None."),
        ("topology.sequence_parallel=2",
         "topology.sequence_parallel must be true or false, got 2."),
        ("seed=null", "seed must be an integer, got None."),
        ("overflow=no", "unknown overflow 'no'; expected one of: error, alone, truncate, split, "
         "drop."),
    ],
)  # fmt: skip
def test_values_that_yaml_1_1_would_misread_are_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(overrides=["layout.max_tokens=8192", override])
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10000", 10_000),
        ("+8", 8),
        ("10_000", 10_000),
        ("1_000_000", 1_000_000),
        ("1e4", 10_000),
        ("1_0e3", 10_000),
        ("8192.0", 8192),
        ("0x10", 16),
        ("0o17", 15),
    ],
)
def test_integers_are_those_of_yaml_1_2_and_may_have_underscores(text: str, value: int) -> None:
    found = load_recipe(overrides=[f"{BUDGET}={text}"]).layout.max_tokens
    assert (found, type(found)) == (value, int)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), (".5", 0.5), ("5.", 5.0), ("1_000.5", 1000.5), ("1E-3", 1e-3), ("3", 3.0)],
)
def test_numbers_are_those_of_yaml_1_2_and_may_have_underscores(text: str, value: float) -> None:
    recipe = load_recipe(overrides=[f"{BUDGET}=8", f"cost.per_token={text}"])
    assert (recipe.cost.per_token, type(recipe.cost.per_token)) == (value, float)


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "false", "False", "FALSE"])
def test_only_true_and_false_are_booleans(text: str) -> None:
    recipe = load_recipe(overrides=[f"{BUDGET}=8", f"equal_sizes={text}"])
    assert recipe.equal_sizes is (text.lower() == "true")


@pytest.mark.parametrize("text", ["", "~", "null", "Null", "NULL"])
def test_null_is_accepted_for_optional_keys(text: str) -> None:
    recipe = load_recipe(overrides=[f"{BUDGET}=8", f"layout.pad_to={text}", "limits.cost=~"])
    assert recipe == Recipe(layout=Packed(max_tokens=8))


def test_column_names_that_yaml_1_1_would_convert_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("layout: {max_tokens: 8}\nlimits: {columns: {on: 1, no: 2, 2026-01-01: 3}}\n")
    assert load_recipe(path).limits.columns == {"on": 1, "no": 2, "2026-01-01": 3}


def test_all_misread_values_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "layout: {max_tokens: 010000}\n"
        "steps: {samples: yes}\n"
        "topology: {dp: on, sequence_parallel: off}\n"
        "limits: {cost: .inf, columns: {images: true}}\n"
        "equal_sizes: no\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert (
        f"{path} has 7 faults:\n  (1) layout.max_tokens must be an integer, got '010000'."
        in message
    )
    for name in ("steps.samples", "topology.dp", "limits.cost", "limits.columns.images"):
        assert f") {name} must be " in message
    assert ") topology.sequence_parallel must be true or false, got 'off'. Write false." in message
    assert ") equal_sizes must be true or false, got 'no'. Write false." in message
    assert message.count("\n") == 7


@pytest.mark.parametrize(
    "tag", ["!!bool yes", "!!int 010", "!!int 0b1", "!!float 1:30", "!!int 1.5"]
)
def test_tags_follow_the_same_rules(tag: str) -> None:
    with pytest.raises(ConfigError, match="a value does not fit its tag"):
        load_recipe(overrides=[f"{BUDGET}={tag}"])


@pytest.mark.parametrize(
    "data",
    [
        {"seed": np.int64(3), "equal_sizes": np.True_, "cost": {"per_token": np.float32(2)}},
        {"seed": 3.0, "equal_sizes": True, "cost": {"per_token": 2}},
    ],
)
def test_numpy_numbers_and_whole_floats_are_accepted(data: dict[str, Any]) -> None:
    expected = Recipe(
        layout=Packed(max_tokens=8, packer="first_fit_shuffle"),
        seed=3,
        equal_sizes=True,
        cost=Cost(per_token=2.0),
    )
    layout = {"max_tokens": 8, "packer": "first_fit_shuffle"}
    assert recipe_from({"layout": layout, **data}) == expected


def test_a_numpy_boolean_is_not_a_number() -> None:
    with pytest.raises(ConfigError, match="seed must be an integer"):
        recipe_from({"layout": {"max_tokens": 8}, "seed": np.True_})
