"""Costs named by a model in YAML, in overrides and by `--model`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evenstep import Cost, make_plan
from evenstep.config import load_recipe, overridden, recipe_from
from evenstep.errors import ConfigError
from tests.internals import PRESETS

LAYOUT = {"max_tokens": 8192}
BUDGET = "layout.max_tokens=8192"
MINE = {**PRESETS["llama-3.2-1b"], "num_hidden_layers": 3}


def decoded(**cost: Any) -> Cost:
    return recipe_from({"layout": LAYOUT, "cost": cost}).cost


def refused(**cost: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        decoded(**cost)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """recipes/recipe.yaml and recipes/mine/config.json; the working directory is elsewhere."""
    (tmp_path / "recipes" / "mine").mkdir(parents=True)
    (tmp_path / "recipes" / "mine" / "config.json").write_text(json.dumps(MINE))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "recipes"


def written(folder: Path, cost: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"layout: {{max_tokens: 8192}}\ncost: {cost}\n")
    return path


def test_a_name_gives_the_cost_of_the_model() -> None:
    assert decoded(model="llama-3-8b") == Cost.named("llama-3-8b")


def test_the_cost_of_a_micro_batch_may_stand_beside_the_model() -> None:
    cost, plain = decoded(model="llama-3-8b", per_micro_batch=1e12), Cost.named("llama-3-8b")
    assert (cost.per_token, cost.per_pair) == (plain.per_token, plain.per_pair)
    assert cost.per_micro_batch == 1e12


@pytest.mark.parametrize("key", ["per_token", "per_pair", "per_segment"])
def test_other_terms_beside_the_model_are_refused(key: str) -> None:
    message = f"cost.{key} cannot stand beside cost.model, which sets it. Remove one of them."
    assert refused(model="llama-3-8b", **{key: 1}) == message


def test_all_faults_beside_a_model_are_reported() -> None:
    said = refused(model="llama-9", per_pair=1, per_micro_batch="much", pair=3)
    assert "has 4 faults" in said
    assert "cost.per_pair cannot stand beside" in said
    assert "cost.per_micro_batch must be a number, got 'much'" in said
    assert "cost.pair is not a known key" in said
    assert "cost.model 'llama-9' is not a known name" in said


@pytest.mark.parametrize("model", [None, 3, "", ["llama-3-8b"], {"name": "x"}])
def test_a_model_is_text(model: object) -> None:
    assert refused(model=model).startswith("cost.model must be a name or a path, got")


@pytest.mark.parametrize("model", ["llama-9", "x" * 5000, "a\0b"])
def test_a_wrong_name_lists_the_names_and_the_place(model: str) -> None:
    said = refused(model=model)
    assert "is not a known name, and the working directory has no such file" in said
    assert ", ".join(PRESETS) in said


@pytest.mark.parametrize("model", ["mine", "mine/config.json"])
def test_a_path_in_a_file_is_relative_to_the_file(folder: Path, model: str) -> None:
    path = written(folder, f"{{model: {model}, per_micro_batch: 5}}")
    expected = Cost.of_config(MINE)
    cost = load_recipe(path).cost
    assert (cost.per_token, cost.per_pair) == (expected.per_token, expected.per_pair)
    with pytest.raises(ConfigError, match=re.escape(f"and {folder}/absent has no such file")):
        load_recipe(written(folder, "{model: absent/config.json}"))


def test_a_path_on_the_command_line_is_relative_to_the_working_directory(folder: Path) -> None:
    expected = Cost.of_config(MINE)
    assert load_recipe(overrides=[BUDGET, "cost.model=../recipes/mine"]).cost == expected
    assert load_recipe(overrides=[BUDGET], model="../recipes/mine").cost == expected
    with pytest.raises(ConfigError, match="the working directory has no such file"):
        load_recipe(overrides=[BUDGET], model="mine")


def test_a_fault_of_a_configuration_names_its_file(folder: Path) -> None:
    path = folder / "mine" / "config.json"
    path.write_text('{"model_type": "llama"}')
    message = f"cost.model: {path} has no num_hidden_layers"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe(written(folder, "{model: mine}"))
    path.write_text("no")
    with pytest.raises(ConfigError, match=re.escape(f"cost.model: {path} is not JSON")):
        load_recipe(written(folder, "{model: mine}"))


def test_a_model_replaces_the_cost_that_it_overrides() -> None:
    base = {"cost": {"per_token": 3.0, "per_pair": 2.0, "per_micro_batch": 7.0}}
    assert overridden(base, ["cost.model=qwen3-8b"]) == {"cost": {"model": "qwen3-8b"}}
    both = overridden(base, ["cost.per_micro_batch=9", "cost.model=qwen3-8b"])
    assert both == {"cost": {"model": "qwen3-8b", "per_micro_batch": 9}}


def test_the_model_option_replaces_the_cost_of_a_saved_plan_alone(folder: Path) -> None:
    recipe = load_recipe(overrides=[BUDGET, "cost.per_pair=2", "cost.per_micro_batch=3"])
    saved = make_plan([5, 3], recipe).recipe.to_dict()
    assert load_recipe(base=saved, model="qwen3-8b").cost == Cost.named("qwen3-8b")
    path = written(folder, "{per_pair: 2}")
    with pytest.raises(ConfigError, match=r"--model and cost in .*recipe\.yaml both set the cost"):
        load_recipe(path, model="qwen3-8b")
    path = written(folder, "{per_micro_batch: 2e12}")
    assert load_recipe(path, model="qwen3-8b").cost.per_micro_batch == 2e12


@pytest.mark.parametrize("override", ["cost.per_pair=1", "cost.model=qwen3-4b", "cost={}"])
def test_the_model_option_and_an_override_of_the_cost_are_refused(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"--model and --set {key} both set the cost"):
        load_recipe(overrides=[BUDGET, override], model="qwen3-8b")
    beside = load_recipe(overrides=[BUDGET, "cost.per_micro_batch=4"], model="qwen3-8b")
    assert beside.cost.per_micro_batch == 4


def test_the_recipe_of_a_named_cost_survives_its_own_dictionary() -> None:
    recipe = recipe_from({"layout": LAYOUT, "cost": {"model": "deepseek-v3"}})
    assert recipe_from(recipe.to_dict()) == recipe
