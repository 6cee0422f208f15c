"""Advice in words: what would make the steps of a plan or a run faster, and by how much.

Each change is planned anew on a few steps; the saving is modelled time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from evenstep.core.layout import Packed
from evenstep.core.measures import step_means, step_times
from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray
from evenstep.core.recipe import Recipe, Sharing, Steps
from evenstep.errors import ConfigError, EvenstepError
from evenstep.report.numbers import count, times

Planner: TypeAlias = Callable[..., Plan]
"""Plans lengths with a recipe, groups and columns: `make_plan`."""

_MOST_STEPS = 4  # that changes are tried on
_WORTH = 0.02  # the least saving that is worth a sentence
_MOST_ADVICE = 4


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence, and the share of modelled time that the change saves, if it was planned.

    >>> Advice("A packed layout would cut the time by 20 %.", 0.2).saving
    0.2
    """

    text: str
    saving: float | None = None


def advice(plan: Plan, planner: Planner) -> list[Advice]:
    """What would make the steps faster, the most first; one sentence at least.

    >>> from evenstep import Padded, Recipe, make_plan
    >>> plan = make_plan([100, 7, 7, 7], Recipe(layout=Padded(samples=4), balance="none"))
    >>> advice(plan, make_plan)[0].text
    'A packed layout would cut the time by 70 %.'
    """
    if not plan.num_steps:
        return []
    chosen = _some_steps(plan)
    found = [*_pace(plan, planner), *_changes(plan, chosen, planner)]
    found = [each for each in found if each.saving is not None and each.saving >= _WORTH]
    found.sort(key=lambda each: -(each.saving or 0.0))
    found = found[:_MOST_ADVICE]
    if plan.recipe.cost.description == "tokens only":
        found.append(
            Advice("The cost counts tokens only. Name the model, so that attention counts too.")
        )
    return found or [Advice("No change that was tried saves more than 2 % of the time.")]


def _pace(plan: Plan, planner: Planner) -> Iterator[Advice]:
    """The sample that costs more than the mean load of a rank, in the step where it costs most.

    Not with second work: whether context parallelism divides it is unknown.
    """
    ranks, recipe = plan.num_ranks, plan.recipe
    if recipe.second_work is not None or recipe.sharing is not None:
        return
    costs = recipe.layout.segment_costs(recipe, plan.aligned_lengths)
    starts = plan.segment_offsets[plan.cell_offsets[::ranks]]
    ideal = step_means(plan)
    held = np.diff(starts) > 0
    most = np.zeros(plan.num_steps)
    if held.any():
        most[held] = np.maximum.reduceat(costs, starts[:-1][held])
    sets = (most > 1.01 * ideal) & held
    if ranks == 1 or not sets.any():
        return
    step = int(np.where(sets, most - ideal, -1.0).argmax())
    segment = int(starts[step]) + int(costs[starts[step] : starts[step + 1]].argmax())
    sample = int(plan.segments.sample[segment])
    name = sample if plan.sample_ids is None else int(plan.sample_ids[sample])
    saved = {
        cp: _saving(plan, [step], planner, _context_parallel(recipe, cp), shared_by=cp)
        for cp in (2, 4, 8)
        if ranks % cp == 0
    }
    shared = _saving(plan, [step], planner, _with_sharing(recipe))
    best = max(shared, *saved.values(), 0.0)
    if best < _WORTH:
        return
    change, saving = "sharing=Sharing()", shared
    if shared < 0.9 * best:
        cp = next(cp for cp, saving in saved.items() if saving >= 0.9 * best)
        change = f"context parallelism {cp * recipe.topology.cp} on the same devices"
        saving = saved[cp]
    often = f" One sample sets the pace in {count(sets.sum())} of {times(len(sets), 'step')}."
    yield Advice(
        f"Sample {name} with {times(int(plan.segments.length[segment]), 'token')} sets the pace of "
        f"step {step}: {change} would cut the step by {_percent(saving)}."
        f"{often if sets.sum() > 1 else ''}",
        saving,
    )


def _changes(plan: Plan, steps: list[int], planner: Planner) -> Iterator[Advice]:
    """Changes of the recipe, tried on some steps."""
    recipe, layout = plan.recipe, plan.recipe.layout
    budget = layout.budget or int(plan.slots.max(initial=1))
    if layout.segments_per_row is not None and not recipe.topology.equal_widths:
        packed = replace(recipe, layout=Packed(max_tokens=budget), balance="refined", seed=0)
        yield _advised("A packed layout", plan, steps, planner, packed)
    elif recipe.balance != "refined":
        even = replace(recipe, balance="refined")
        yield _advised("balance='refined'", plan, steps, planner, even)
    if layout.max_tokens is not None and layout.pad_to is None:
        wider = replace(recipe, layout=replace(layout, max_tokens=2 * layout.max_tokens))
        what = f"Twice the budget (layout.max_tokens={2 * layout.max_tokens}, if memory allows)"
        yield _advised(what, plan, steps, planner, wider)
    pairs = [step for step in steps if step + 1 < plan.num_steps]
    if pairs and (recipe.steps.samples or recipe.steps.tokens):
        saving = _saving(plan, pairs, planner, recipe, together=2)
        unit = "samples" if recipe.steps.samples else "tokens"
        size = recipe.steps.samples or recipe.steps.tokens or 0
        yield Advice(
            f"{count(2 * size)} {unit} per step instead of {count(size)} would cut the time per "
            f"epoch by {_percent(saving)} and halve the number of updates.",
            saving,
        )


def _advised(what: str, plan: Plan, steps: list[int], planner: Planner, recipe: Recipe) -> Advice:
    saving = _saving(plan, steps, planner, recipe)
    return Advice(f"{what} would cut the time by {_percent(saving)}.", saving)


def _saving(
    plan: Plan,
    steps: list[int],
    planner: Planner,
    recipe: Recipe | None,
    *,
    shared_by: int = 1,
    together: int = 1,
) -> float:
    """The share of time that these steps save with another recipe; 0 if it cannot plan them.

    `shared_by` ranks divide a micro-batch between them; `together` following steps become one.
    """
    if recipe is None:
        return 0.0
    whole = replace(recipe, steps=Steps())
    before, after = 0.0, 0.0
    spent = step_times(plan)
    try:
        for step in steps:
            inside = (plan.step_of >= step) & (plan.step_of < step + together)
            before += float(spent[step : step + together].sum())
            groups = None if plan.groups is None else plan.groups[inside]
            columns = {name: plan.columns[name][inside] for name in whole.columns}
            shared = plan.prefixes and plan.prefixes.take(np.flatnonzero(inside))
            sharing = {"prefixes": shared} if shared else {}
            changed = planner(
                plan.lengths[inside], whole, groups=groups, columns=columns, **sharing
            )
            after += float(step_times(changed).sum()) / shared_by
    except EvenstepError:
        return 0.0
    return 1 - after / before if before > 0 else 0.0


def _with_sharing(recipe: Recipe) -> Recipe | None:
    """The recipe with ranks that share sequences; None if it has settings that exclude it."""
    try:
        return replace(recipe, steps=Steps(), sharing=Sharing())
    except ConfigError:
        return None


def _context_parallel(recipe: Recipe, times: int) -> Recipe | None:
    """The recipe with fewer data-parallel ranks that each are several devices; None if it has a
    fixed width. A micro-batch has as many slots per device as before."""
    topology, layout = recipe.topology, recipe.layout
    if layout.pad_to is not None:
        return None
    change: dict[str, Any] = {"dp": topology.dp // times, "cp": topology.cp * times}
    if layout.max_tokens is not None:
        layout = replace(layout, max_tokens=layout.max_tokens * times)
    return replace(recipe, topology=replace(topology, **change), layout=layout)


def _some_steps(plan: Plan) -> list[int]:
    """The slowest step and some that are evenly spaced."""
    spaced = np.linspace(0, plan.num_steps - 1, _MOST_STEPS).astype(int).tolist()
    return sorted({*spaced[: _MOST_STEPS - 1], int(step_times(plan).argmax())})


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def of_ranks(speeds: FloatArray) -> list[Advice]:
    """A rank that is slower than the others on equal work.

    >>> of_ranks(np.array([1.0, 1.0, 1.3]))[0].text
    'Rank 2 takes 30 % longer than the others for the same work. Check its device.'
    """
    if len(speeds) < 2:
        return []
    slowest = int(speeds.argmax())
    over = float(speeds[slowest] / np.median(np.delete(speeds, slowest)) - 1)
    if over < 0.1:
        return []
    return [
        Advice(
            f"Rank {slowest} takes {_percent(over)} longer than the others for the same work. "
            f"Check its device."
        )
    ]


def of_waiting(share: float) -> list[Advice]:
    """Time that is spent waiting for data.

    >>> of_waiting(0.1)[0].saving
    0.1
    """
    if not share >= _WORTH:
        return []
    return [
        Advice(
            f"{_percent(share)} of the time is spent waiting for data. Put trainer.out on a faster "
            f"disk; in a loop of your own, use StreamLoader with workers.",
            share,
        )
    ]


def of_error(error: float, fitted: float | None) -> list[Advice]:
    """Planned costs that are far from the measured times, and what a fitted cost would reach.

    >>> of_error(0.25, 0.05)[0].text[:64]
    'Planned times are off by 25 % (median over micro-batches). fit_c'
    """
    if not error >= 0.1:
        return []
    text = f"Planned times are off by {_percent(error)} (median over micro-batches)."
    if fitted is not None and fitted < 0.8 * error:
        text += f" fit_cost on half of this run is off by {_percent(fitted)} on the other half."
    return [Advice(text)]
