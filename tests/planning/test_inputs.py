"""Arguments that a user may get wrong: one clear error each, or taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import (
    Cost,
    Limits,
    Packed,
    Padded,
    PlannedStream,
    PooledStream,
    Recipe,
    Topology,
    World,
    make_plan,
)
from evenstep.data import Feed, InMemory
from evenstep.errors import ConfigError, EvenstepError, InputError
from evenstep.tensors import cross_entropy
from evenstep.train import RolloutBatch, Runner, compute_log_probs
from tests.examples import examples
from tests.train.steps import model_of

LAYOUT = Packed(max_tokens=16)
RECIPE = Recipe(layout=LAYOUT)
PATCHES = Recipe(layout=LAYOUT, limits=Limits(columns={"patches": 9}))
DICT: Any = {"input_ids": [[1, 2]]}
SAMPLES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
BATCH = RolloutBatch(
    {"input_ids": torch.ones((2, 3), dtype=torch.int64)}, lengths=[3, 2], padding_side="right"
)


def planned(lengths: Any, recipe: Any = RECIPE, **options: Any) -> Any:
    return make_plan(lengths, recipe, **options)


def runner(**options: Any) -> Runner:
    return Runner(**{"model": torch.nn.Linear(2, 2), "loss": cross_entropy(), **options})


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "runner cost": (lambda: runner(cost="llama-3-8b"), "cost must be .*Cost.named"),
    "runner collective": (lambda: runner(collective="nccl"), "collective must be .*Distributed"),
    "runner normalization": (lambda: runner(normalization="token"), "normalization must be an obj"),
    "runner class": (lambda: runner(model=torch.nn.Linear), "model must be a torch.nn.Module, got"),
    "group kinds": (lambda: planned([2, 2], groups=["a", 1]), "integers or texts"),
    "log-probs of lists": (
        lambda: compute_log_probs(torch.nn.Linear(2, 2), [[1, 2]], Recipe(layout=LAYOUT)),
        "samples must be mappings with input_ids, got a list",
    ),
    "a layout as recipe": (
        lambda: planned([3, 2], LAYOUT),
        r"recipe must be a Recipe, got Packed. Write Recipe\(layout=Packed\(...\)\)",
    ),
    "a padded layout as recipe": (
        lambda: PlannedStream(SAMPLES, Padded(samples=2)),  # type: ignore[arg-type]
        r"Write Recipe\(layout=Padded\(...\)\)",
    ),
    "a layout for a pool": (
        lambda: PooledStream(SAMPLES, LAYOUT),  # type: ignore[arg-type]
        r"Write Recipe\(layout=Packed",
    ),
    "a layout for a feed": (lambda: Feed(LAYOUT), "recipe must be a Recipe"),  # type: ignore[arg-type]
    "a dict as recipe": (
        lambda: planned([3], {"layout": LAYOUT}),
        r"got dict. Write Recipe\(layout=...\)",
    ),
    "a layout for rollouts": (
        lambda: BATCH.plan(LAYOUT),  # type: ignore[arg-type]
        "recipe must be a Recipe",
    ),
    "a dict of tensors to score": (
        lambda: compute_log_probs(model_of(), DICT, RECIPE),
        r"got dict. Pass a list of .* RolloutBatch\(",
    ),
    "a tensor to score": (
        lambda: compute_log_probs(model_of(), torch.ones((2, 3)), RECIPE),
        "got Tensor. Pass a list of",
    ),
    "a layout to score with": (
        lambda: compute_log_probs(model_of(), SAMPLES, LAYOUT),  # type: ignore[arg-type]
        "recipe must be a Recipe",
    ),
    "a tensor of a batch": (
        lambda: BATCH["input_ids"],  # type: ignore[index]
        r"indexed by row: batch\[0\]. .*batch.tensors\['input_ids'\]",
    ),
    "a model's name": (
        lambda: Runner(model="llama", loss=cross_entropy()),
        r"model must be a torch.nn.Module, got 'llama'. Load the model",
    ),
    "a list of limited columns": (
        lambda: Limits(columns=["p"]),  # type: ignore[arg-type]
        r"limits.columns must map the name .* got \['p'\]",
    ),
    "a list of columns": (
        lambda: planned([3, 2], PATCHES, columns=[1, 2]),
        "columns must map names to one number per sample, got list",
    ),
    "a list of columns for a stream": (
        lambda: PlannedStream(SAMPLES, PATCHES, columns=[1, 2]),  # type: ignore[arg-type]
        "columns must map names to one number per sample, got list",
    ),
    "a list of columns for a pool": (
        lambda: PooledStream(SAMPLES, PATCHES, columns=[1, 2]),  # type: ignore[arg-type]
        "columns must map names to functions of a sample, got list",
    ),
    "a column that no recipe names": (
        lambda: planned([3, 2], PATCHES, columns={"patches": [1, 2], "images": [1, 1]}),
        r"columns has 'images', which the recipe does not use \(it uses patches\)",
    ),
    "a column of a stream that no recipe names": (
        lambda: PlannedStream(SAMPLES, RECIPE, columns={"images": [1, 1]}),
        r"columns has 'images', which the recipe does not use \(it uses none\)",
    ),
    "too few names": (
        lambda: planned([3, 2], names=np.array([7])),
        "names has 1 entries for 2 samples",
    ),
    "lengths in bfloat16": (
        lambda: planned(torch.tensor([3, 2], dtype=torch.bfloat16)),
        "length.* got torch.bfloat16, which cannot be converted",
    ),
    "lengths with gradients": (
        lambda: planned(torch.tensor([3.0, 2.0], requires_grad=True)),
        "length.* got torch.float32, which cannot be converted .*grad",
    ),
    "lists of tokens": (
        lambda: planned([[1, 2, 3], [4, 5]]),
        r"number of tokens of each sample, got a list .* \[len\(tokens\) for tokens in",
    ),
    "equal lists of tokens": (lambda: planned([[1, 2], [4, 5]]), "got a list for the first one"),
    "arrays of tokens": (lambda: planned([np.ones(3), np.ones(2)]), "got a ndarray for the first"),
    "texts": (lambda: planned(["a b", "c"]), "got a str for the first one"),
    "a matrix of tokens": (lambda: planned(np.ones((2, 3), int)), r"got shape \(2, 3\)"),
    "a model's name as cost": (
        lambda: Recipe(layout=LAYOUT, cost="llama-3-8b"),  # type: ignore[arg-type]
        r"cost must be Cost, got 'llama-3-8b'. Write cost=Cost.named\('llama-3-8b'\)",
    ),
    "masked lengths": (
        lambda: planned(np.ma.array([3, 2], mask=[False, True])),
        r"masked array, and masked entries have no value.*compressed\(\)",
    ),
    "masked groups": (
        lambda: PlannedStream(SAMPLES, RECIPE, groups=np.ma.array([3, 2], mask=[False, True])),
        "groups is a masked array",
    ),
    "masked columns": (
        lambda: planned(
            [3, 2], PATCHES, columns={"patches": np.ma.array([3, 2], mask=[False, True])}
        ),
        "patches is a masked array",
    ),
    "large groups as floats": (
        lambda: planned([3, 2], groups=[2.0**53, 2.0**53 + 2]),
        "sample 0 has group 9007199254740992 in float64, .* Pass integers",
    ),
    "large groups of a stream as floats": (
        lambda: PlannedStream(SAMPLES, RECIPE, groups=np.array([1.0, 2.0**24], np.float32)),
        "sample 1 has groups 16777216 in float32",
    ),
    "lengths that float16 rounded": (
        lambda: planned(np.array([3, 4099], np.float16)),
        "sample 1 has length 4100 in float16",
    ),
    "a seed that nothing uses": (
        lambda: Recipe(layout=LAYOUT, seed=3),
        "seed=3 has no effect on this plan: only the packer first_fit_shuffle",
    ),
    "a seed for padded rows": (
        lambda: Recipe(layout=Padded(samples=2), seed=1),
        "seed=1 has no effect",
    ),
    "a seed for a packer without chance": (
        lambda: Recipe(layout=Packed(max_tokens=8, packer="optimal"), seed=1),
        "seed=1 has no effect",
    ),
    "sequence parallelism without tensor parallelism": (
        lambda: Topology(dp=2, sequence_parallel=True),
        "topology.sequence_parallel has no effect, because topology.tp is 1",
    ),
    "shapes of a pipeline that does not exist": (
        lambda: Topology(tp=2, variable_seq_lengths=True),
        "topology.variable_seq_lengths has no effect, because topology.pp is 1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_one_clear_error(name: str) -> None:
    call, fault = FAULTS[name]
    with pytest.raises(EvenstepError, match=fault) as error:
        call()
    assert isinstance(error.value, ConfigError | InputError)
    assert "\n" not in str(error.value)


@examples(60)
@given(groups=st.lists(st.sampled_from(["b", "a7", "ü", "b3f0-11"]), min_size=1, max_size=9))
def test_groups_may_be_texts(groups: list[str]) -> None:
    lengths = [2] * len(groups)
    recipe = Recipe(layout=Packed(max_tokens=32), topology=Topology(dp=2))
    numbers = np.unique(groups, return_inverse=True)[1]
    expected = make_plan(lengths, recipe, groups=numbers)
    series = pytest.importorskip("pandas").Series(groups, index=range(5, 5 + len(groups)))
    for texts in (groups, np.array(groups), np.array(groups, object), series):
        assert make_plan(lengths, recipe, groups=texts).fingerprint == expected.fingerprint
    samples = InMemory([{"input_ids": [1, 2]} for _ in groups])
    one, other = (
        PlannedStream(samples, recipe, groups=ids, world=World(0, 2)).plan_epoch(0).fingerprint
        for ids in (groups, numbers)
    )
    assert one == other
    ids = torch.ones((len(groups), 2), dtype=torch.int64)
    batch = RolloutBatch(
        {"input_ids": ids}, lengths=lengths, padding_side="left", groups=np.array(groups, object)
    )
    assert batch.groups is not None
    assert batch.groups.tolist() == numbers.tolist()


def test_settings_without_effect_in_files_of_earlier_versions_still_load() -> None:
    data = Recipe(layout=LAYOUT, cost=Cost(per_pair=0.5)).to_dict()
    data["seed"], data["topology"] = 7, {**data["topology"], "variable_seq_lengths": True}
    data["topology"]["sequence_parallel"] = True
    assert Recipe.from_dict(data) == Recipe(layout=LAYOUT, cost=Cost(per_pair=0.5))
    shuffled = Recipe(layout=Packed(max_tokens=8, packer="first_fit_shuffle"), seed=7)
    assert Recipe.from_dict(shuffled.to_dict()) == shuffled
