"""filled_packs: the samples of every micro-batch of a step, with none empty."""

from __future__ import annotations

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, Ragged, by_first_appearance, sum_by
from evenstep.errors import PlanError
from evenstep.planning.packers import divide_bins


def filled_packs(plan: Plan, step: int = 0) -> list[list[IntArray]]:
    """The samples of each micro-batch, by rank. Each has one, though the plan may leave some empty.

    An empty micro-batch takes half of the largest one of its rank. A rank with too few samples
    first takes the shortest ones of others. Nothing exceeds a limit that the plan keeps. Samples
    of a group stay together.

    >>> from evenstep import Packed, Recipe, Topology, make_plan
    >>> recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    >>> [[pack.tolist() for pack in rank] for rank in filled_packs(make_plan([1, 1], recipe))]
    [[[0]], [[1]]]
    """
    ranks = [[micro.segments.sample for micro in rank] for rank in plan[step]]
    if all(len(samples) for rank in ranks for samples in rank):
        return ranks
    unit_of, sizes = _units(plan)
    units = [[_distinct(unit_of[samples]) for samples in rank] for rank in ranks]
    _lend(units, sizes)
    members = Ragged.group(unit_of, len(sizes))
    return [
        [np.concatenate([members[int(unit)] for unit in pack]) for pack in _divided(packs, sizes)]
        for packs in units
    ]


def _units(plan: Plan) -> tuple[IntArray, IntArray]:
    """(the unit of each sample, the tokens of each unit); groups are units where they must be."""
    if plan.groups is None or plan.recipe.groups != "micro_batch":
        return np.arange(len(plan.lengths)), plan.lengths
    unit_of, first = by_first_appearance(plan.groups)
    return unit_of, sum_by(unit_of, plan.lengths, len(first)).astype(np.int64)


def _distinct(units: IntArray) -> IntArray:
    return units[np.sort(np.unique(units, return_index=True)[1])]


def _lend(ranks: list[list[IntArray]], sizes: IntArray) -> None:
    """Give every rank as many units as it has packs, in place."""
    count = len(ranks[0])
    held = [sum(map(len, packs)) for packs in ranks]
    if sum(held) < count * len(ranks):
        raise PlanError(
            f"{sum(held)} samples or groups cannot fill {count} micro-batches on each of "
            f"{len(ranks)} ranks. Use fewer ranks, more samples, or a larger budget."
        )
    for poor in range(len(ranks)):
        while held[poor] < count:
            rich = int(np.argmax(held))
            whole = np.concatenate(ranks[rich])
            unit = whole[np.argmin(sizes[whole])]
            ranks[rich] = [pack[pack != unit] for pack in ranks[rich]]
            empty = next(at for at, pack in enumerate(ranks[poor]) if not len(pack))
            ranks[poor][empty] = np.array([unit])
            held[poor], held[rich] = held[poor] + 1, held[rich] - 1


def _divided(packs: list[IntArray], sizes: IntArray) -> list[IntArray]:
    """The packs of a rank, its largest ones halved for those that are empty."""
    full = [at for at, pack in enumerate(packs) if len(pack)]
    empty = [at for at, pack in enumerate(packs) if not len(pack)]
    if not empty:
        return packs
    bins = Ragged.of([packs[at].tolist() for at in full])
    found = list(packs)
    for at, pack in zip([*full, *empty], divide_bins(sizes, bins, len(packs)), strict=True):
        found[at] = pack
    return found
