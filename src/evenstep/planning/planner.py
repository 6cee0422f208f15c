"""lengths + Recipe -> Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from evenstep.core.layout import Fixed, PackedStatic, Padded
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.core.validate import MOST
from evenstep.errors import ConfigError, InputError
from evenstep.planning.assemble import StepLayout, assemble
from evenstep.planning.cells import place_step
from evenstep.planning.joint import pack_units
from evenstep.planning.limits import check_units, units_of
from evenstep.planning.segment import cut_samples
from evenstep.planning.steps import deal_steps


def make_plan(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    names: IntArray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan samples of these lengths. Pure: the same arguments give the same plan everywhere.

    `groups` gives each sample a group id; `columns` gives it the further numbers that
    `recipe.limits.columns` limits. `names` is what error messages call the samples, where these
    are a window of many. `progress(done, total)` is called after each step.

    >>> from evenstep.core.layout import Packed
    >>> plan = make_plan([5, 3, 4, 2], Recipe(layout=Packed(max_tokens=7)))
    >>> [micro.segments.sample.tolist() for micro in plan[0, 0]]
    [[0, 3], [1, 2]]
    """
    counts = _integers("length", lengths, 1, MOST, names)
    n = len(counts)
    called = np.arange(n) if names is None else names
    group_ids = None
    if groups is not None:
        group_ids = _column("group", groups, -(2**63), 2**63 - 1, called)
    limited = {name: _limited(name, columns, called) for name in recipe.limits.columns}
    multiple, asked = recipe.topology.multiple, recipe.steps.micro_batches
    if asked is not None and asked % multiple:
        raise ConfigError(
            f"steps.micro_batches is {asked} but this pipeline runs them in multiples of "
            f"{multiple}; no step could have that many. Use {-(-asked // multiple) * multiple}."
        )
    segments, dropped = cut_samples(counts, recipe, called)
    kept = np.delete(np.arange(n), dropped)
    tokens = np.bincount(segments.sample, weights=segments.length, minlength=n).astype(np.int64)
    units = units_of(segments, recipe, limited, None)
    check_units(units, recipe, segments, None, called)
    step_of = np.full(n, -1, np.int64)
    step_of[kept] = deal_steps(
        recipe.steps,
        called[kept],
        (tokens if asked else counts)[kept],
        None if group_ids is None else group_ids[kept],
        lambda chosen: _fits_step(kept[chosen], segments, recipe, limited, group_ids),
        _most_tokens(recipe, tokens),
    )
    total = int(step_of.max(initial=-1)) + 1
    order = np.argsort(step_of[segments.sample], kind="stable")
    bounds = np.searchsorted(step_of[segments.sample][order], np.arange(total + 1))
    laid: list[StepLayout] = []
    for step in range(total):
        chosen = segments.take(np.sort(order[bounds[step] : bounds[step + 1]]))
        units = units_of(chosen, recipe, limited, group_ids)
        check_units(units, recipe, chosen, group_ids, called)
        wanted = asked if step < total - 1 else None
        laid.append(place_step(chosen, units, recipe, wanted))
        if progress is not None:
            progress(step + 1, total)
    return assemble(recipe, counts, step_of, laid, group_ids, limited)


def _fits_step(
    samples: IntArray,
    segments: Segments,
    recipe: Recipe,
    limited: Mapping[str, IntArray],
    groups: IntArray | None,
) -> bool:
    """Whether these samples fill no more micro-batches than a step has, by best fit."""
    asked, ranks = recipe.steps.micro_batches, recipe.topology.dp
    assert asked is not None
    chosen = segments.take(_segments_of(np.sort(samples), segments))
    units = units_of(chosen, recipe, limited, groups)
    layout, capacity = recipe.layout, recipe.capacity
    if isinstance(layout, Padded) or recipe.equal_sizes:
        return place_step(chosen, units, recipe, None).per_rank <= asked
    if isinstance(layout, Fixed):
        units, capacity = units.by_count(capacity), layout.samples
    assert capacity is not None
    bins = len(pack_units(units, capacity, "best_fit_decreasing", 0))
    rows = layout.rows if isinstance(layout, PackedStatic) else 1
    return bins <= asked * ranks * rows


def _segments_of(samples: IntArray, segments: Segments) -> IntArray:
    """The places of all segments of these samples; segments are in sample order."""
    first = np.searchsorted(segments.sample, samples, "left")
    count = np.searchsorted(segments.sample, samples, "right") - first
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(int(count.sum()))


def _most_tokens(recipe: Recipe, tokens: IntArray) -> int:
    """No step of so many micro-batches holds more tokens than this."""
    asked, layout = recipe.steps.micro_batches, recipe.layout
    budget = layout.max_tokens
    if asked is None or budget is None or recipe.overflow == "alone":
        return int(tokens.sum())
    return asked * recipe.topology.dp * budget


def _integers(
    what: str, values: ArrayLike, least: int, most: int, names: IntArray | None
) -> IntArray:
    """A flat int64 copy of `values`, or an error that names the sample at fault."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError(
            f"{what} has shape {array.shape} and type {array.dtype}; a plan needs one whole "
            f"number per sample. Pass a flat sequence of integers."
        )
    whole = np.ones(len(array), bool)
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.floor(array))
    bad = np.flatnonzero(~whole | (array < least) | (array > most))
    if len(bad):
        at = int(bad[0])
        raise InputError(
            f"sample {at if names is None else names[at]} has {what} {array[at]}, which cannot be "
            f"planned. Give every sample a whole number between {least} and {most}, or leave it "
            f"out."
        )
    return array.astype(np.int64)


def _column(name: str, values: ArrayLike, least: int, most: int, names: IntArray) -> IntArray:
    column = _integers(name, values, least, most, None)
    if len(column) != len(names):
        raise InputError(
            f"{len(column)} entries of {name} for {len(names)} samples cannot be matched. "
            f"Give one per sample."
        )
    return column


def _limited(name: str, columns: Mapping[str, ArrayLike] | None, names: IntArray) -> IntArray:
    if columns is None or name not in columns:
        have = ", ".join(sorted(columns or {})) or "none"
        raise InputError(
            f"limits.columns names {name!r} but no such column was given (there is: {have}), so "
            f"the limit cannot be kept. Pass columns={{{name!r}: ...}}."
        )
    return _column(name, columns[name], 0, MOST, names)
