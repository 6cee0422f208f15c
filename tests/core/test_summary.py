"""What values print as: one line, cheap, and never an error."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import evenstep
from evenstep import Cost, Limits, Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.errors import EvenstepError
from evenstep.testing import Case, cases
from tests.core.test_checks import FAULTS, LENGTHS, Fault, changed, packed
from tests.examples import examples
from tests.internals import Segments, measures_module

SHOWN = re.compile(
    r"Plan\(\d[\d,]* steps?, \d[\d,]* ranks?, \d[\d,]* samples?, \d[\d,]* micro-batch(es)?"
    r"(, fill [\d.]+%)?(, imbalance [\d.]+)?\)"
)


def test_a_plan_shows_its_sizes_fill_and_imbalance() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2), steps=Steps(samples=3))
    plan = make_plan([5, 3, 8, 4, 8, 2], recipe)
    assert repr(plan) == "Plan(2 steps, 2 ranks, 6 samples, 4 micro-batches, fill 100%, " + (
        "imbalance 1.067)"  # costs 8 and 8, then 8 and 6: 16 over 15
    )


@examples(60)
@given(cases())
def test_what_a_plan_shows_is_what_its_stats_say(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    shown, stats = repr(plan), plan.stats()
    assert SHOWN.fullmatch(shown)
    if plan.num_micro_batches:
        when = plan.recipe.sync_every
        assert f"imbalance {stats[f'imbalance_cost_{when}']:.3f})" in shown
        fill = re.search(r"fill ([\d.]+)%", shown)
        assert fill is not None
        assert float(fill[1]) == pytest.approx(100 * (1 - stats["padding_ratio"]), abs=0.1)
        assert (fill[1] == "100") == (stats["padding"] == 0)


def test_an_empty_plan_shows_that_it_is_empty() -> None:
    plan = make_plan([], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=4)))
    assert repr(plan) == "Plan(0 steps, 4 ranks, 0 samples, 0 micro-batches)"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_broken_plan_still_prints(fault: Fault) -> None:
    shown = repr(fault.spoil(fault.plan()))
    assert shown.startswith("Plan(")
    assert "\n" not in shown
    assert ("offsets do not nest" in shown) == (fault.check == "offsets_nest")


@pytest.mark.parametrize(
    "damage",
    [
        {"row_offsets": []},
        {"micro_offsets": []},
        {"cell_offsets": []},
        {"cell_offsets": [0, 10**17]},
        {"row_offsets": [0, 10**17, 3]},
        {"widths": []},
        {"widths": [2**62] * 4},
        {"lengths": []},
        {"segments": Segments(*(np.empty(0, np.int64) for _ in range(3)))},
    ],
    ids=str,
)
def test_a_damaged_plan_still_prints_its_sizes(damage: dict[str, Any]) -> None:
    shown = repr(changed(make_plan(LENGTHS, packed), **damage))
    assert shown.startswith("Plan(")
    assert "\n" not in shown


@examples(100)
@given(cases())
def test_a_recipe_prints_as_the_call_that_makes_it(case: Case) -> None:
    packer = case.recipe.layout.packer
    own = {packer.__name__: packer} if callable(packer) else {}
    assert eval(repr(case.recipe), {**vars(evenstep), **own}) == case.recipe


def test_a_recipe_shows_what_differs_from_the_defaults() -> None:
    assert repr(Recipe(layout=Packed(max_tokens=8))) == "Recipe(layout=Packed(max_tokens=8))"
    recipe = Recipe(
        layout=Padded(max_tokens=64, cut="greedy"),
        topology=Topology(dp=4),
        steps=Steps(samples=512),
        cost=Cost(per_pair=0.5),
        limits=Limits(columns={"patches": 9}),
        groups="step",
    )
    assert repr(recipe) == (
        "Recipe(layout=Padded(max_tokens=64, cut='greedy'), topology=Topology(dp=4), "
        "steps=Steps(samples=512), cost=Cost(per_pair=0.5), "
        "limits=Limits(columns={'patches': 9}), groups='step')"
    )


def test_printing_asks_for_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(LENGTHS, packed)
    monkeypatch.setattr(Plan, "stats", None)
    monkeypatch.setattr(measures_module, "Floors", None)
    assert "imbalance" in repr(plan)
