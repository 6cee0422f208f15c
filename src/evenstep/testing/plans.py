"""Checks of plans, and random cases to plan (Hypothesis)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from evenstep.core.checks import assert_valid
from evenstep.core.cost import Cost
from evenstep.core.layout import PACKER_NAMES, Cut, Layout, Packed, Padded
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, Ragged, rounded_up
from evenstep.core.recipe import (
    Balance,
    Limits,
    Overflow,
    Recipe,
    Scope,
    SecondWork,
    Steps,
    SyncEvery,
    Topology,
    uses_seed,
)

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


def assert_valid_plan(plan: Plan) -> None:
    """Raise a `PlanError` that lists every invariant the plan violates; see `core.checks`.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> assert_valid_plan(make_plan([5, 3], Recipe(layout=Packed(max_tokens=8))))
    """
    assert_valid(plan)


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of one call of `make_plan`.

    >>> from evenstep import Packed
    >>> Case(np.array([5, 3]), Recipe(layout=Packed(max_tokens=8)), None, {}).plan().num_steps
    1
    """

    lengths: IntArray
    recipe: Recipe
    groups: IntArray | None
    columns: dict[str, IntArray]

    def plan(self) -> Plan:
        """Plan it."""
        from evenstep.planning.planner import make_plan

        return make_plan(self.lengths, self.recipe, groups=self.groups, columns=self.columns)


def cases(max_samples: int = 40) -> SearchStrategy[Case]:
    """Random lengths and recipes: all layouts, topologies, limits, groups and kinds of steps.

    Budgets are small, so that over-long samples, single tokens, empty ranks and indivisible
    counts are frequent. Some cases cannot be planned; `make_plan` must raise then.

    >>> from hypothesis import given
    >>> @given(cases())
    ... def test_my_planner(case): ...
    """
    from hypothesis import strategies as st

    lengths, recipes, seeds = _lengths(max_samples), _recipes(), st.integers(0, 2**16)
    grouped = st.sampled_from([True, False, False, False])
    shares = st.sampled_from([0.3, 1.0, 1.0])

    @st.composite
    def case(draw: DrawFn) -> Case:
        sizes = np.array(draw(lengths), np.int64)
        n = len(sizes)
        rng = np.random.default_rng(draw(seeds))
        groups = rng.integers(0, max(2, n // 2), n) if draw(grouped) else None
        patches = rng.integers(0, 10, n) * (rng.random(n) < draw(shares))
        recipe = draw(recipes)
        return Case(sizes, recipe, groups, dict.fromkeys(recipe.columns, patches))

    return case()


def _lengths(most: int) -> SearchStrategy[list[int]]:
    from hypothesis import strategies as st

    return st.one_of(
        st.lists(st.integers(1, 64), min_size=1, max_size=most),
        st.lists(st.sampled_from([1, 2, 30, 31, 32, 33]), min_size=1, max_size=most),
        st.builds(lambda n, size: [size] * n, st.integers(1, most), st.integers(1, 40)),
    )


def _recipes() -> SearchStrategy[Recipe]:
    from hypothesis import strategies as st

    topologies = st.builds(
        lambda pipeline, tensors, **rest: Topology(**pipeline, **tensors, **rest),
        st.sampled_from(
            [
                {},
                {},
                {"pp": 2},
                {"pp": 4, "variable_seq_lengths": True},
                {"pp": 2, "vpp": 2},
                {"pp": 2, "vpp": 2, "variable_seq_lengths": True},
            ]
        ),
        st.sampled_from([{}, {}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}]),
        dp=st.sampled_from([1, 1, 2, 3, 4, 8, 64]),
        cp=st.sampled_from([1, 1, 1, 2]),
    )
    costs = [Cost(), Cost(per_pair=0.1), Cost(per_segment=3, per_micro_batch=5)]
    rest = st.fixed_dictionaries(
        {
            "cost": st.sampled_from(costs),
            "sync_every": st.sampled_from(get_args(SyncEvery)),
            "groups": st.sampled_from(get_args(Scope)),
        }
    )
    equal = st.sampled_from([True, False, False, False])
    layouts, limits, steps, seconds = _layouts(), _limits(), _steps(), _second_works()
    savings = st.sampled_from([None, None, 0.0, 0.1])

    @st.composite
    def recipe(draw: DrawFn) -> Recipe:
        topology, layout, step = draw(topologies), draw(layouts), draw(steps)
        limited = Limits() if isinstance(layout, Packed) and layout.packer else draw(limits)
        overflows = [each for each in get_args(Overflow) if each != "alone"]
        if layout.pad_to is None and not topology.equal_widths:
            overflows.append("alone")
        if isinstance(layout, Padded) and topology.equal_widths:
            layout = replace(layout, cut=None)
        balances = list(get_args(Balance))
        if layout.options.get("layout.cut") == "greedy":
            balances = ["refined", "stride"]
        elif layout.options:
            balances.remove("none")
        if step.micro_batches is not None and step.micro_batches % topology.multiple:
            step = Steps(micro_batches=topology.multiple)
        balance = draw(st.sampled_from(balances))
        overflow = draw(st.sampled_from(overflows))
        packed = isinstance(layout, Packed)
        equal_sizes = balance != "none" and draw(equal)
        free = packed and balance == "refined" and not layout.options and not equal_sizes
        one_width = layout.pad_to is not None or topology.equal_widths
        second = draw(seconds) if free else None
        if second is not None and step.micro_batches is not None:
            second = replace(second, same_waves=False)
        wide = packed and not one_width and overflow != "alone"
        return Recipe(
            layout=layout,
            topology=topology,
            steps=step,
            limits=limited,
            balance=balance,
            equal_sizes=equal_sizes,
            equal_tokens=wide and draw(equal),
            second_work=second,
            min_saving=draw(savings) if balance == "refined" else None,
            overflow=overflow,
            seed=draw(st.integers(0, 3)) if packed and uses_seed(layout.packer) else 0,
            **draw(rest),
        )

    return recipe()


def _layouts() -> SearchStrategy[Layout]:
    """Every bound alone and with others; contradictory bounds are adjusted."""
    from hypothesis import strategies as st

    budgets = st.sampled_from([None, 8, 24, 32, 64, 100, 128, 200])
    widths = st.sampled_from([None, None, None, 16, 32, 64])
    counts = st.sampled_from([None, None, 1, 2, 3, 5])
    roundings = st.sampled_from([1, 1, 1, 2, 8])
    cuts = st.sampled_from([None, *get_args(Cut)])
    rows = st.sampled_from([1, 1, 1, 2, 3])
    packers = st.sampled_from([None, None, None, *PACKER_NAMES, shortest_first])

    @st.composite
    def layout(draw: DrawFn) -> Layout:
        budget, samples, pad_to = draw(budgets), draw(counts), draw(widths)
        padded = draw(st.booleans())
        if padded:
            if budget is None and samples is None:
                budget = 64
            least = (samples or 1) * (pad_to or 1)
        else:
            count = draw(rows) if pad_to is not None else 1
            samples = None if samples is None else rounded_up(samples, count)
            if budget is None and samples is None and pad_to is None:
                budget = 64
            least = count * (pad_to or 1)
        if budget is not None and pad_to is not None:
            budget = max(budget, least)
        bounds: dict[str, Any] = {"max_tokens": budget, "samples": samples, "pad_to": pad_to}
        if padded:
            return Padded(**bounds, round_to=draw(roundings), cut=draw(cuts))
        packer = draw(packers) if samples is None else None
        return Packed(**bounds, round_to=draw(roundings), rows=count, packer=packer)

    return layout()


def shortest_first(lengths: IntArray, capacity: int, seed: int) -> Ragged:
    """A user-defined packer: shortest first, a new bin whenever the next item does not fit.

    >>> shortest_first(np.array([3, 1, 2]), 3, 0).tolist()
    [[1, 2], [0]]
    """
    bins: list[list[int]] = []
    left = 0
    for item in np.argsort(lengths, kind="stable").tolist():
        if not bins or lengths[item] > left:
            bins.append([])
            left = capacity
        bins[-1].append(item)
        left -= int(lengths[item])
    return Ragged.of(bins)


def _steps() -> SearchStrategy[Steps]:
    from hypothesis import strategies as st

    return st.one_of(
        st.just(Steps()),
        st.builds(Steps, samples=st.integers(1, 20)),
        st.builds(Steps, tokens=st.integers(1, 300)),
        st.builds(Steps, micro_batches=st.sampled_from([1, 2, 4])),
    )


def _second_works() -> SearchStrategy[SecondWork | None]:
    from hypothesis import strategies as st

    works = st.builds(
        SecondWork,
        column=st.just("patches"),
        cost=st.sampled_from([None, Cost(per_token=3, per_segment=1)]),
        same_waves=st.booleans(),
    )
    return st.one_of(st.none(), st.none(), works)


def _limits() -> SearchStrategy[Limits]:
    from hypothesis import strategies as st

    return st.one_of(
        st.just(Limits()),
        st.just(Limits()),
        st.just(Limits()),
        st.builds(Limits, cost=st.sampled_from([100.0, 300.0])),
        st.builds(lambda most: Limits(columns={"patches": most}), st.integers(9, 30)),
        st.just(Limits(cost=300.0, columns={"patches": 30})),
    )
