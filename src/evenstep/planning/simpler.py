"""Simpler settings, whose plans are also plans of the default settings.

A search is no proof: now and then equal sizes, another balance or a packer's bins are faster. Where
the search has to be the fastest, these plans are made too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from evenstep.core.layout import PACKER_NAMES, Packed, Padded
from evenstep.core.recipe import Balance, Recipe
from evenstep.errors import ConfigError, PlanError
from evenstep.planning.assemble import DecidedStep
from evenstep.planning.units import Units

_MOST = 2**17  # units up to which simpler settings are tried: a multiple of the planning time
_FEW = 64  # padded rows up to which they are always tried
_ROWS = 256  # padded rows up to which they are tried at all: cutting takes longer than packing
_EVEN = 1 + 1e-9  # a time this close to its floor is final
_BALANCES: tuple[Balance, ...] = ("lpt", "karmarkar_karp", "stride")


def fastest(
    decide: Callable[[Recipe], tuple[DecidedStep, float]],
    recipe: Recipe,
    units: Units,
    floor_of: Callable[[int], float],
) -> DecidedStep:
    """The fastest step of the recipe and of simpler settings.

    `decide` gives a step and its time. More micro-batches per rank have to save `recipe.saving`.
    """
    best, least = decide(recipe)
    for settings in _simpler_settings(recipe, units):
        if least <= floor_of(best.per_rank) * _EVEN:
            break
        try:
            step, time = decide(settings)
        except PlanError:
            continue
        more = step.per_rank > best.per_rank
        if more and recipe.steps.micro_batches is not None:
            continue  # the step may not have more
        if time < least * (1 - (recipe.saving if more else 0.0)):
            best, least = step, time
    return best


def _simpler_settings(recipe: Recipe, units: Units) -> Iterator[Recipe]:
    """The recipes to compare with.

    None if the recipe has such a setting itself. And none where more micro-batches have to save a
    share of the time: there, a plan within that share of the fastest is good enough. Rows of one
    micro-batch and few padded rows are far from their floor, so they are always compared.
    """
    layout = recipe.layout
    own = recipe.balance != "refined" or recipe.equal_sizes or recipe.second_work is not None
    greedy = isinstance(layout, Padded) and layout.cut == "greedy"
    if own or greedy or layout.packer is not None or len(units) > _MOST:
        return
    if isinstance(layout, Padded) and len(units) > _ROWS:
        return
    few = isinstance(layout, Padded) and len(units) <= _FEW
    if recipe.saving > 0 and layout.packs_per_micro_batch == 1 and not few:
        return
    yield replace(recipe, equal_sizes=True)
    for balance in _BALANCES:
        yield replace(recipe, balance=balance, min_saving=None)
    if isinstance(layout, Packed) and not len(units.caps):
        for packer in PACKER_NAMES:
            try:
                yield replace(recipe, layout=replace(layout, packer=packer))
            except ConfigError:  # this layout takes no packer
                return
