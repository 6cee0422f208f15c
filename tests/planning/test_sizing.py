"""Steps counted in micro-batches: how they are sized, and on what that depends."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import (
    Limits,
    Packed,
    Padded,
    PlannedStream,
    Ragged,
    Recipe,
    SecondWork,
    Steps,
    Topology,
    World,
    make_plan,
    pack,
)
from evenstep.data import Lengths
from evenstep.errors import EvenstepError
from evenstep.testing import Case, cases
from tests.examples import examples
from tests.internals import (
    IntArray,
    Layout,
    Segments,
    construct,
    step_module,
    step_size,
    units_of,
)

DRAWS: dict[str, Callable[[np.random.Generator], IntArray]] = {
    "narrow": lambda rng: rng.integers(900, 1100, 60_000),
    "log-normal": lambda rng: np.clip(rng.lognormal(7, 1, 60_000), 1, 8192).astype(np.int64),
    "over half": lambda rng: rng.integers(4100, 8192, 60_000),
    "two kinds": lambda rng: rng.choice([40, 5000], 60_000),
}


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many units were packed, each time the packer ran."""
    seen: list[int] = []
    pack = construct.pack  # type: ignore[attr-defined]

    def counted(lengths: Any, *args: Any, **options: Any) -> Ragged:
        seen.append(len(lengths))
        return pack(lengths, *args, **options)

    monkeypatch.setattr(construct, "pack", counted)
    return seen


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("packer", [None, "first_fit_decreasing", "concatenative"])
def test_a_step_is_sized_by_six_packings_at_most(
    draw: str, packer: str | None, packings: list[int]
) -> None:
    lengths = DRAWS[draw](np.random.default_rng(0))
    recipe = Recipe(
        layout=Packed(max_tokens=8192, packer=packer),
        topology=Topology(dp=64),
        steps=Steps(micro_batches=8),
    )
    size = step_size(lengths, recipe)
    assert size is not None
    assert len(packings) <= 6
    assert count_packs(lengths[:size], recipe) <= 512
    larger = [n for n in range(size + 1, size + 40) if count_packs(lengths[:n], recipe) <= 512]
    missed = lengths[size : max(larger, default=size)].sum()
    assert missed <= 8192, "at most a pack's worth of samples could have been added"
    packings.clear()
    stream = PlannedStream(Lengths(lengths), recipe, shuffle=False, world=World(0, 64))
    stream.skip_batches(1)
    assert stream.state_dict()["place"]["position"] == size
    assert len(packings) <= 6, "looking at more and more samples runs no packer"


def count_packs(lengths: IntArray, recipe: Recipe) -> int:
    assert isinstance(recipe.layout, Packed)
    return len(pack(lengths, 8192, recipe.layout.packer or "best_fit_decreasing"))


def second_work_of(case: Case) -> SecondWork | None:
    """Without waves of its own, which steps of micro-batches cannot have."""
    second = case.recipe.second_work
    return None if second is None else replace(second, same_waves=False)


@examples(300)
@given(cases(), st.integers(0, 20))
def test_what_lies_behind_a_step_has_no_say_in_it(case: Case, more: int) -> None:
    if case.groups is not None:
        return
    steps = Steps(micro_batches=2 * case.recipe.topology.multiple)
    recipe = replace(case.recipe, steps=steps, second_work=second_work_of(case))
    about: dict[str, Any] = {"columns": case.columns}
    try:
        size = step_size(case.lengths, recipe, complete=False, **about)
    except EvenstepError:
        return
    if size is None:
        return
    longer = np.concatenate((case.lengths, np.full(more, case.lengths[0])))
    columns = {name: np.concatenate((c, np.full(more, c[0]))) for name, c in case.columns.items()}
    assert step_size(longer, recipe, complete=False, columns=columns) == size


@examples(300)
@given(cases(), st.sampled_from(["samples", "tokens", "micro_batches"]), st.integers(1, 60))
def test_a_step_ends_with_its_last_sample_that_is_kept(case: Case, by: str, size: int) -> None:
    number = size * case.recipe.topology.multiple if by == "micro_batches" else size
    steps = Steps(**{by: number})
    recipe = replace(case.recipe, steps=steps, second_work=second_work_of(case))
    # Members of a group are adjacent.
    order = np.arange(len(case.lengths)) if case.groups is None else np.argsort(case.groups)
    about: dict[str, Any] = {"columns": {name: c[order] for name, c in case.columns.items()}}
    if case.groups is not None:
        about["groups"] = case.groups[order]
    try:
        plan = make_plan(case.lengths[order], recipe, **about)
    except EvenstepError:
        return
    first = np.flatnonzero(plan.step_of == 0)
    assert step_size(case.lengths[order], recipe, **about) == first.max(initial=-1) + 1


def test_a_dropped_member_at_the_end_of_a_group_belongs_to_the_next_step() -> None:
    layout = Packed(max_tokens=8)
    for steps in (Steps(tokens=8), Steps(samples=2), Steps(micro_batches=1)):
        recipe = Recipe(layout=layout, overflow="drop", steps=steps)
        about: dict[str, Any] = {"groups": np.array([0, 0, 0, 1, 1])}
        lengths = np.array([4, 4, 9, 3, 3])
        assert make_plan(lengths, recipe, **about).step_of.tolist() == [0, 0, -1, 1, 1]
        assert step_size(lengths, recipe, **about) == 2


@examples(300)
@given(cases())
def test_which_samples_a_step_holds_does_not_depend_on_the_balance(case: Case) -> None:
    steps = Steps(micro_batches=2 * case.recipe.topology.multiple)
    recipe = replace(case.recipe, steps=steps, balance="refined", second_work=second_work_of(case))
    found = []
    for balance in ("refined", "lpt", "karmarkar_karp", "stride"):
        try:
            other = replace(recipe, balance=balance)
        except EvenstepError:
            continue  # greedy cuts deal by themselves
        try:
            found.append(replace(case, recipe=other).plan().step_of.tolist())
        except EvenstepError as error:
            found.append(str(error)[:40])
    assert all(each == found[0] for each in found)


LAYOUTS: dict[str, Layout] = {
    "packed": Packed(max_tokens=64),
    "packer": Packed(max_tokens=64, packer="first_fit_shuffle"),
    "samples": Packed(max_tokens=64, samples=3),
    "rows": Packed(rows=2, pad_to=32),
    "padded": Padded(max_tokens=64),
    "greedy": Padded(max_tokens=64, cut="greedy"),
    "static": Padded(samples=4, pad_to=32),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("equal_sizes", [False, True])
def test_every_step_but_the_last_is_nearly_full(name: str, equal_sizes: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 32, 600)
    recipe = Recipe(
        layout=LAYOUTS[name],
        topology=Topology(dp=2),
        steps=Steps(micro_batches=4),
        equal_sizes=equal_sizes,
    )
    plan = make_plan(lengths, recipe)
    share = 0.5 if isinstance(LAYOUTS[name], Padded) else 0.75
    capacity = {"samples": 8 * 3 * 16, "static": 4 * 8 * 16}.get(name, 8 * 64)
    for step in range(plan.num_steps - 1):
        assert lengths[plan.step_of == step].sum() > share * capacity


def test_a_sample_that_no_step_holds_is_named() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(micro_batches=2), overflow="split")
    with pytest.raises(
        EvenstepError, match="sample 1 with 40 tokens does not fit into a step of 2"
    ):
        make_plan([4, 40, 4], recipe)


def test_a_group_that_a_probe_finds_too_wide_is_not_refused() -> None:
    """A wide sample behind the step makes its group impossible, but it is in the next step."""
    recipe = Recipe(
        layout=Padded(max_tokens=32),
        topology=Topology(pp=2),
        steps=Steps(micro_batches=1),
        limits=Limits(),
    )
    plan = make_plan([8, 8, 8, 30], recipe, groups=[0, 0, 0, 1])
    assert plan.step_of.tolist() == [0, 0, 0, 1]


def test_ranks_of_equal_sizes_need_whole_micro_batches() -> None:
    layout = Packed(rows=2, pad_to=8)
    recipe = Recipe(layout=layout, topology=Topology(dp=2), equal_sizes=True)
    for count, packs in ((2, 4), (4, 4), (5, 8)):  # a row each; two ranks of two rows
        segments = Segments(np.arange(count), np.zeros(count, np.int64), np.full(count, 8))
        assert step_module.count_needed(units_of(segments, recipe, {}, None), recipe, 8) == packs
