"""The native schema: sections beside the recipe, TOML, origins, all faults at once."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Packed, Padded, PooledStream, Recipe, Sharing, Steps, Topology
from evenstep.config import (
    FaultsError,
    Settings,
    StreamSettings,
    TrainerSettings,
    load_file,
    load_recipe,
    load_settings,
    native_data,
    native_yaml,
    settings_from,
)
from evenstep.data import InMemory, Pool
from evenstep.errors import ConfigError
from evenstep.testing import Case, cases
from tests.examples import examples

YAML = """\
layout:
  max_tokens: 8192
  packer: optimal
topology: {dp: 8}
steps: {micro_batches: 4}
log_probs:
  layout: {kind: padded, max_tokens: 16384}
stream:
  seed: 42
  infinite_loop: true
trainer: {per_micro_batch_normalization: true}
"""
TOML = """\
steps.micro_batches = 4

[layout]
max_tokens = 8192
packer = "optimal"

[topology]
dp = 8

[log_probs.layout]
kind = "padded"
max_tokens = 16384

[stream]
seed = 42
infinite_loop = true

[trainer]
per_micro_batch_normalization = true
"""
SETTINGS = Settings(
    recipe=Recipe(
        layout=Packed(max_tokens=8192, packer="optimal"),
        topology=Topology(dp=8),
        steps=Steps(micro_batches=4),
    ),
    log_probs=Recipe(
        layout=Padded(max_tokens=16384), topology=Topology(dp=8), steps=Steps(micro_batches=4)
    ),
    stream=StreamSettings(seed=42, infinite_loop=True),
    trainer=TrainerSettings(per_micro_batch_normalization=True),
)


def file(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def faults_of(data: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(FaultsError) as caught:
        settings_from({"layout": {"max_tokens": 8}} | data)
    return caught.value.faults


@pytest.mark.parametrize(("text", "name"), [(YAML, "run.yaml"), (TOML, "run.toml")])
def test_yaml_and_toml_are_the_same(text: str, name: str, tmp_path: Path) -> None:
    path = file(tmp_path, text, name)
    assert load_settings(path) == SETTINGS
    assert load_recipe(path) == SETTINGS.recipe


@pytest.mark.parametrize(
    ("text", "name", "lines"),
    [(YAML, "run.yaml", (2, 4, 7, 9)), (TOML, "run.toml", (4, 8, 12, 15))],
)
def test_each_value_has_an_origin(
    text: str, name: str, lines: tuple[int, ...], tmp_path: Path
) -> None:
    origins = load_file(
        file(tmp_path, text, name), ["overflow=split", "log_probs.groups=step"]
    ).origins
    budget, ranks, infer, seed = (f"{name}:{line}" for line in lines)
    assert origins["layout.max_tokens"] == budget
    assert origins["topology.dp"] == ranks
    assert origins["log_probs.layout.max_tokens"] == infer
    assert origins["stream.seed"] == seed
    assert origins["log_probs.topology.dp"] == "as in training"
    assert origins["overflow"] == origins["log_probs.groups"] == "--set"
    assert origins["layout.round_to"] == origins["seed"] == "default"


def test_the_terms_of_a_model_come_from_its_name(tmp_path: Path) -> None:
    path = file(tmp_path, "layout: {max_tokens: 8}\ncost:\n  model: llama-3-8b\n")
    assert load_file(path).origins["cost.per_pair"] == "cost.model, run.yaml:3"


def test_log_probs_inherit_and_null_removes() -> None:
    data = {"layout": {"max_tokens": 8, "packer": "optimal"}, "topology": {"dp": 2}}
    settings = settings_from({**data, "log_probs": {"layout": {"packer": None}}})
    assert settings.log_probs == Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    assert settings_from({**data, "log_probs": {}}).log_probs == settings_from(data).recipe
    shuffled = {"layout": {"max_tokens": 8, "packer": "first_fit_shuffle"}, "seed": 3}
    for layout in ({"packer": None}, {"kind": "padded"}):  # the seed is that of the packer
        found = settings_from({**shuffled, "log_probs": {"layout": layout}})
        assert (found.recipe.seed, found.log_probs and found.log_probs.seed) == (3, 0)
    assert settings_from(data).log_probs is None


def test_a_model_for_log_probs_replaces_the_cost_of_training() -> None:
    data = {"layout": {"max_tokens": 8}, "cost": {"per_token": 2, "per_pair": 3}}
    settings = settings_from({**data, "log_probs": {"cost": {"model": "llama-3-8b"}}})
    assert settings.log_probs is not None
    assert settings.log_probs.cost == Cost.named("llama-3-8b")


def test_faults_of_all_sections_are_listed_at_once() -> None:
    faults = faults_of(
        {
            "layuot": {},
            "topology": {"dp": 0},
            "log_probs": {"layout": {"round_to": 0}, "overflow": "splitt"},
            "stream": {"pool": {"samples": 0, "sample": 3}, "seed": -1, "shufle": True},
            "trainer": {"per_micro_batch_normalization": "yes"},
        }
    )
    for start in (
        "layuot is not a known key. Did you mean layout?",
        "topology.dp must be an integer in [1, ",
        "log_probs: layout.round_to must be an integer in [1, ",
        "log_probs: unknown overflow 'splitt'; expected one of: error, alone, truncate, split, "
        "drop. Did you mean split?",
        "stream.pool.samples must be an integer in [1, ",
        "stream.pool.sample is not a known key. Did you mean samples?",
        "stream.seed must be in [0, 2**63), got -1.",
        "stream.shufle is not a known key. Did you mean shuffle?",
        "trainer.per_micro_batch_normalization must be true or false, got 'yes'. Write true.",
    ):
        assert any(fault.startswith(start) for fault in faults), (start, faults)
    assert len(faults) == 9


def test_a_section_holds_keys() -> None:
    for name in ("log_probs", "stream", "trainer"):
        (fault,) = faults_of({name: 3})
        assert fault == f"{name} must hold keys, got 3. Write it as {name}.KEY=VALUE."


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"steps": {"samples": 4}}, "steps.samples and steps.tokens cannot be used with a pool"),
        ({"balance": "lpt"}, "balance='lpt' has no effect with a pool"),
        ({"layout": {"kind": "padded", "max_tokens": 8}}, "unknown pool.strategy 'greedy'"),
    ],
)
def test_a_pool_that_cannot_work_with_the_recipe_is_refused(
    data: dict[str, Any], says: str
) -> None:
    (fault,) = faults_of({**data, "stream": {"pool": {"strategy": "greedy"}}})
    assert fault.startswith("stream.pool: ")
    assert says in fault


def test_all_faults_are_listed_even_if_there_are_many() -> None:
    faults = faults_of({f"key{n}": n for n in range(150)})
    assert len(faults) == 150
    error = FaultsError(faults, "file")
    assert "has 150 faults" in str(error)
    assert str(error).endswith("and 50 more.")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layout = {", "not valid TOML"),
        ("seed = 1\nseed = 2\n", "line 2"),
        ("layout.max_tokens = 8\nseed = '1'\n", "seed must be an integer, got '1'"),
        ("layout.max_tokens = 8\nseed = 2026-01-01\n", "seed must be"),
    ],
)
def test_faults_in_toml_are_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_file(file(tmp_path, text, "run.toml"))
    assert says in str(caught.value)


def test_a_key_inside_a_text_of_several_lines_is_not_a_line(tmp_path: Path) -> None:
    text = 'note = """\nseed = 1\n"""\n[stream]\nseed = 3\n[layout]\nmax_tokens = 8\n'
    with pytest.raises(FaultsError, match="note is not a known key"):
        load_file(file(tmp_path, text, "run.toml"))
    text = "layout.max_tokens = 8\nstream.pool = {samples = 3}\n"
    origins = load_file(file(tmp_path, text, "run.toml")).origins
    assert origins["stream.pool.samples"] == "run.toml:2"


def test_the_settings_are_the_arguments_of_a_stream() -> None:
    data = {"layout": {"max_tokens": 7}, "stream": {"pool": {"samples": 2}, "shuffle": False}}
    settings = settings_from(data)
    source = InMemory([{"input_ids": [0] * n} for n in (5, 3, 4, 2)])
    stream = PooledStream(source, settings.recipe, **settings.stream.options())
    assert stream.pool == Pool(samples=2)
    assert sum(micro.tokens for step in stream for micro in step.micro_batches) == 14


@examples(100)
@given(cases(), cases(), st.booleans())
def test_settings_survive_their_native_form(one: Case, two: Case, both: bool) -> None:
    settings = Settings(recipe=one.recipe, log_probs=two.recipe if both else None)
    if both and set(one.recipe.limits.columns) - set(two.recipe.limits.columns):
        return  # a section adds columns and removes none
    if any(
        recipe.layout.packer and ":" in str(recipe.to_dict()["layout"].get("packer"))
        for recipe in (one.recipe, two.recipe)
    ):
        return  # a function, which no file can name
    assert settings_from(native_data(settings)) == settings


def test_native_yaml_has_origins_as_comments(tmp_path: Path) -> None:
    loaded = load_file(file(tmp_path, YAML))
    text = native_yaml(loaded.settings, loaded.origins, ("converted from\nsomewhere",))
    assert text.startswith("# converted from somewhere\nlayout:\n  kind: packed\n")
    assert "  max_tokens: 8192  # run.yaml:2\n" in text
    assert load_settings(file(tmp_path, text, "again.yaml")) == SETTINGS


@pytest.mark.parametrize("sharing", [None, Sharing(), Sharing(most_ranks=3, max_received=99)])
def test_sharing_is_written_and_read_again(sharing: Sharing | None, tmp_path: Path) -> None:
    recipe = Recipe(layout=Packed(max_tokens=24), topology=Topology(dp=4), sharing=sharing)
    text = native_yaml(Settings(recipe=recipe))
    assert load_settings(file(tmp_path, text)).recipe == recipe


def test_a_list_of_the_wrong_size_or_kind_is_one_fault() -> None:
    layout = {"layout": {"max_tokens": 8}}
    for section, key, value, says in (
        ("optimizer", "betas", [0.9], "optimizer.betas has too few values, got [0.9]. Add the"),
        ("optimizer", "betas", [0.9, "a"], "optimizer.betas must be a number, got 'a'."),
        ("data", "paths", [], "data.paths must name at least one file, folder or glob."),
        ("data", "paths", 3, "data.paths must be a valid string, got 3."),
    ):
        with pytest.raises(FaultsError) as caught:
            settings_from({**layout, section: {key: value}})
        (fault,) = caught.value.faults
        assert fault.startswith(says)
