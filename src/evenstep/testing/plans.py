"""Tests of plans: every promise checked, and random cases to check it on (Hypothesis)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from evenstep.core.checks import assert_valid
from evenstep.core.cost import Cost
from evenstep.core.layout import PACKER_NAMES, Fixed, Layout, Packed, PackedStatic, Padded
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Balance, Clock, Limits, Overflow, Recipe, Scope, Steps
from evenstep.core.topology import Topology
from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


def assert_valid_plan(plan: Plan) -> None:
    """Raise a `PlanError` that names every promise the plan breaks; see `core.checks`."""
    assert_valid(plan)


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of one call of `make_plan`."""

    lengths: IntArray
    recipe: Recipe
    groups: IntArray | None
    columns: dict[str, IntArray]

    def plan(self) -> Plan:
        """Plan it."""
        from evenstep.planning import make_plan

        return make_plan(self.lengths, self.recipe, groups=self.groups, columns=self.columns)


def cases(max_samples: int = 40) -> SearchStrategy[Case]:
    """Random lengths with random recipes: all layouts, topologies, limits, groups, step kinds.

    Budgets are small, so that over-long samples, single tokens, empty ranks and indivisible
    counts all occur often. Some cases cannot be planned; planning must then say so.
    """
    from hypothesis import strategies as st

    lengths, recipes, seeds = _lengths(max_samples), _recipes(), st.integers(0, 2**16)
    grouped = st.sampled_from([True, False, False, False])

    @st.composite
    def case(draw: DrawFn) -> Case:
        sizes = np.array(draw(lengths), np.int64)
        n = len(sizes)
        rng = np.random.default_rng(draw(seeds))
        groups = rng.integers(0, max(2, n // 2), n) if draw(grouped) else None
        return Case(sizes, draw(recipes), groups, {"patches": rng.integers(0, 10, n)})

    return case()


def _lengths(most: int) -> SearchStrategy[list[int]]:
    from hypothesis import strategies as st

    return st.one_of(
        st.lists(st.integers(1, 64), min_size=1, max_size=most),
        st.lists(st.sampled_from([1, 2, 30, 31, 32, 33]), min_size=1, max_size=most),
        st.builds(lambda n, size: [size] * n, st.integers(1, most), st.integers(1, 40)),
    )


def _recipes() -> SearchStrategy[Recipe]:
    from hypothesis import assume
    from hypothesis import strategies as st

    topologies = st.builds(
        lambda pipeline, **rest: Topology(**pipeline, **rest),
        st.sampled_from([{}, {}, {"pp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2}]),
        dp=st.sampled_from([1, 1, 2, 3, 4, 8, 64]),
        cp=st.sampled_from([1, 1, 1, 2]),
        tp=st.sampled_from([1, 1, 2]),
        sequence_parallel=st.booleans(),
        variable_seq_lengths=st.booleans(),
    )
    costs = [Cost(), Cost(per_pair=0.1), Cost(per_segment=3, per_micro_batch=5)]
    fields = st.fixed_dictionaries(
        {
            "layout": _layouts(),
            "topology": topologies,
            "steps": _steps(),
            "cost": st.sampled_from(costs),
            "limits": _limits(),
            "balance": st.sampled_from(get_args(Balance)),
            "clock": st.sampled_from(get_args(Clock)),
            "groups": st.sampled_from(get_args(Scope)),
            "equal_sizes": st.sampled_from([True, False, False, False]),
            "overflow": st.sampled_from(get_args(Overflow)),
            "seed": st.integers(0, 3),
        }
    )

    @st.composite
    def recipe(draw: DrawFn) -> Recipe:
        try:
            return Recipe(**draw(fields))
        except ConfigError:
            assume(False)
            raise

    return recipe()


def _layouts() -> SearchStrategy[Layout]:
    from hypothesis import strategies as st

    budget = st.sampled_from([8, 32, 64, 100, 200])
    round_to = st.sampled_from([1, 1, 2, 8])
    pad_to = st.sampled_from([None, None, None, 32, 64])
    packer = st.sampled_from(PACKER_NAMES)
    return st.one_of(
        st.builds(
            Padded,
            max_tokens=st.sampled_from([24, 64, 128, 200]),
            round_to=round_to,
            pad_to=pad_to,
            cut=st.sampled_from(["optimal", "greedy"]),
        ),
        st.builds(Packed, max_tokens=st.sampled_from([64, 200]), pad_to=pad_to, packer=packer),
        st.builds(Packed, max_tokens=budget, round_to=round_to, packer=packer),
        st.builds(
            PackedStatic, rows=st.integers(1, 3), width=st.sampled_from([16, 32, 64]), packer=packer
        ),
        st.builds(
            Fixed,
            samples=st.integers(1, 5),
            max_tokens=st.sampled_from([None, 100, 200, 400]),
            round_to=round_to,
        ),
    )


def _steps() -> SearchStrategy[Steps]:
    from hypothesis import strategies as st

    return st.one_of(
        st.just(Steps()),
        st.builds(Steps, samples=st.integers(1, 20)),
        st.builds(Steps, tokens=st.integers(1, 300)),
        st.builds(Steps, micro_batches=st.sampled_from([1, 2, 4])),
    )


def _limits() -> SearchStrategy[Limits]:
    from hypothesis import strategies as st

    return st.one_of(
        st.just(Limits()),
        st.just(Limits()),
        st.builds(Limits, segments=st.integers(1, 6)),
        st.builds(Limits, cost=st.sampled_from([100.0, 300.0])),
        st.builds(lambda most: Limits(columns={"patches": most}), st.integers(9, 30)),
        st.just(Limits(segments=6, columns={"patches": 30})),
    )
