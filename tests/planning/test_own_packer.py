"""A packer and a source of the user's own, which nothing in the library knows."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import (
    Packed,
    Plan,
    PlannedStream,
    Ragged,
    Recipe,
    Steps,
    Topology,
    make_plan,
    violations,
)
from evenstep.errors import ConfigError, PlanError
from evenstep.testing import assert_valid_plan
from tests.internals import IntArray


def pairs(lengths: IntArray, capacity: int, seed: int) -> Ragged:
    """The longest with the shortest that fits, two to a bin at most."""
    order = np.argsort(lengths).tolist()
    bins = []
    while order:
        longest = order.pop()
        fits = order and lengths[order[0]] + lengths[longest] <= capacity
        bins.append([longest, order.pop(0)] if fits else [longest])
    return Ragged.of(bins)


def lists(lengths: IntArray, capacity: int, seed: int) -> Any:
    """As `pairs`, as plain lists."""
    return pairs(lengths, capacity, seed).tolist()


def loses_one(lengths: IntArray, capacity: int, seed: int) -> Any:
    return [[item] for item in range(1, len(lengths))]


def repeats_one(lengths: IntArray, capacity: int, seed: int) -> Any:
    return [[item] for item in range(len(lengths))] + [[0]]


def overfills(lengths: IntArray, capacity: int, seed: int) -> Any:
    return [list(range(len(lengths)))]


def invents_one(lengths: IntArray, capacity: int, seed: int) -> Any:
    return [[item] for item in range(len(lengths) + 1)]


def answers_nonsense(lengths: IntArray, capacity: int, seed: int) -> Any:
    return 3


def changes_its_input(lengths: IntArray, capacity: int, seed: int) -> Any:
    lengths[:] = 1
    return [[item] for item in range(len(lengths))]


LENGTHS = np.random.default_rng(0).integers(1, 60, 50)


def bins_of(plan: Plan) -> set[frozenset[int]]:
    """What lies together in a row."""
    rows = zip(plan.row_offsets[:-1], plan.row_offsets[1:], strict=True)
    return {frozenset(plan.segments.sample[a:b].tolist()) for a, b in rows} - {frozenset()}


@pytest.mark.parametrize("packer", [pairs, lists])
@pytest.mark.parametrize("balance", ["refined", "lpt", "karmarkar_karp", "stride"])
@pytest.mark.parametrize("sync_every", ["micro_batch", "step"])
def test_the_bins_of_a_packer_are_kept(packer: Any, balance: Any, sync_every: Any) -> None:
    expected = {frozenset(row) for row in pairs(LENGTHS, 64, 0).tolist()}
    recipe = Recipe(
        layout=Packed(max_tokens=64, packer=packer), balance=balance, sync_every=sync_every
    )
    plan = make_plan(LENGTHS, recipe)
    assert_valid_plan(plan)
    assert bins_of(plan) == expected


@pytest.mark.parametrize("name", ["concatenative", "first_fit_shuffle", "optimal"])
def test_packers_give_different_plans_under_the_default_balance(name: str) -> None:
    plain = make_plan(LENGTHS, Recipe(layout=Packed(max_tokens=64)))
    named = make_plan(LENGTHS, Recipe(layout=Packed(max_tokens=64, packer=name)))
    assert bins_of(plain) != bins_of(named)


def test_where_ranks_need_more_the_largest_bins_are_divided() -> None:
    recipe = Recipe(layout=Packed(max_tokens=64, packer=pairs), topology=Topology(dp=24))
    plan = make_plan(LENGTHS, recipe)
    assert_valid_plan(plan)
    own = [set(row) for row in pairs(LENGTHS, 64, 0).tolist()]
    assert all(any(row <= whole for whole in own) for row in bins_of(plan))
    assert len(bins_of(plan)) > len(own)


@pytest.mark.parametrize(
    ("packer", "said"),
    [
        (loses_one, "loses_one returned item 0 0 times"),
        (repeats_one, "repeats_one returned item 0 2 times"),
        (overfills, r"put \d+ tokens into bin 0, which holds 64"),
        (invents_one, "returned item 50 of 50"),
        (answers_nonsense, "returned int; expected a Ragged"),
    ],
)
def test_what_a_packer_returns_is_checked(packer: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make_plan(LENGTHS, Recipe(layout=Packed(max_tokens=64, packer=packer)))


def test_a_packer_cannot_change_the_lengths_of_the_plan() -> None:
    recipe = Recipe(layout=Packed(max_tokens=64, packer=changes_its_input))
    plan = make_plan(LENGTHS, recipe)
    assert not violations(plan)
    assert plan.lengths.tolist() == LENGTHS.tolist()


def test_files_name_the_packer_and_loading_never_imports_it(tmp_path: Path) -> None:
    recipe = Recipe(layout=Packed(max_tokens=64, packer=pairs))
    plan = make_plan(LENGTHS, recipe)
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan")
    name = f"{__name__}:pairs"
    assert loaded.recipe.to_dict()["layout"]["packer"] == name
    assert json.loads(json.dumps(recipe.to_dict()))["layout"]["packer"] == name
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.recipe == recipe
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(ConfigError, match="Pass the function"):
        make_plan(LENGTHS, loaded.recipe)


class Squares:
    """A source of the user's own: sample i holds i * i + 1 tokens."""

    fingerprint = "squares"

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return {"input_ids": np.full(index * index + 1, index)}

    def lengths_of(self, samples: IntArray) -> IntArray:
        return samples * samples + 1


def test_a_source_and_a_packer_of_ones_own_make_a_stream() -> None:
    recipe = Recipe(layout=Packed(max_tokens=64, packer=pairs), steps=Steps(samples=4))
    seen = []
    for step in PlannedStream(Squares(8), recipe):
        for micro, samples in step:
            assert len(micro.segments) <= 2
            for sample, length in zip(micro.segments.sample, micro.segments.length, strict=True):
                assert len(samples[sample]["input_ids"]) == length
                seen.append(int(sample))
    assert sorted(seen) == list(range(8))
