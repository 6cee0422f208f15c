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
from evenstep.errors import ConfigError, InputError
from evenstep.planning.assemble import StepLayout, assemble
from evenstep.planning.cells import place_step
from evenstep.planning.joint import fill_bins
from evenstep.planning.limits import check_units, units_of
from evenstep.planning.segment import cut_samples
from evenstep.planning.steps import deal_steps


def make_plan(
    lengths: ArrayLike,
    recipe: Recipe,
    *,
    groups: ArrayLike | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan samples of these lengths. Pure: the same arguments give the same plan everywhere.

    `groups` gives each sample a group id; `columns` gives it the further numbers that
    `recipe.limits.columns` limits. `progress(done, total)` is called after each step.

    >>> from evenstep.core.layout import Packed
    >>> plan = make_plan([5, 3, 4, 2], Recipe(layout=Packed(max_tokens=7)))
    >>> [micro.segments.sample.tolist() for micro in plan[0, 0]]
    [[0, 3], [1, 2]]
    """
    counts = _integers("length", lengths, least=1)
    n = len(counts)
    group_ids = None if groups is None else _column("groups", groups, n)
    limited = {name: _limited(name, columns, n) for name in recipe.limits.columns}
    multiple, asked = recipe.topology.multiple, recipe.steps.micro_batches
    if asked is not None and asked % multiple:
        raise ConfigError(
            f"steps.micro_batches is {asked} but this pipeline runs them in multiples of "
            f"{multiple}; no step could have that many. Use {-(-asked // multiple) * multiple}."
        )
    segments, dropped = cut_samples(counts, recipe)
    kept = np.delete(np.arange(n), dropped)
    tokens = np.bincount(segments.sample, weights=segments.length, minlength=n).astype(np.int64)
    units = units_of(segments, recipe, limited, None)
    check_units(units, recipe, segments, None, None)
    step_of = np.full(n, -1, np.int64)
    step_of[kept] = deal_steps(
        recipe.steps,
        kept,
        tokens[kept],
        group_ids,
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
        check_units(units, recipe, chosen, group_ids, step)
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
    member = np.zeros(int(segments.sample.max()) + 1, bool)
    member[samples] = True
    chosen = segments.take(np.flatnonzero(member[segments.sample]))
    units = units_of(chosen, recipe, limited, groups)
    layout, capacity = recipe.layout, recipe.capacity
    if isinstance(layout, Padded) or recipe.equal_sizes:
        return place_step(chosen, units, recipe, None).per_rank <= asked
    if isinstance(layout, Fixed):
        units, capacity = units.by_count(layout.max_tokens), layout.samples
    assert capacity is not None
    bins = len(fill_bins(units, capacity, "best_fit_decreasing", 0))
    rows = layout.rows if isinstance(layout, PackedStatic) else 1
    return bins <= asked * ranks * rows


def _most_tokens(recipe: Recipe, tokens: IntArray) -> int:
    """No step of so many micro-batches holds more tokens than this."""
    asked, layout = recipe.steps.micro_batches, recipe.layout
    budget = layout.max_tokens
    if asked is None or budget is None or recipe.overflow == "alone":
        return int(tokens.sum())
    return asked * recipe.topology.dp * budget


def _integers(name: str, values: ArrayLike, least: int | None) -> IntArray:
    """A flat int64 copy of `values`, or an error that names the sample at fault."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iufO" or array.dtype.kind == "O":
        if array.size == 0 and array.ndim == 1:
            return np.empty(0, np.int64)
        raise InputError(
            f"{name}s have shape {array.shape} and type {array.dtype}; a plan needs one whole "
            f"number per sample. Pass a flat sequence of integers."
        )
    if array.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
        if len(bad):
            raise InputError(
                f"sample {bad[0]} has {name} {array[bad[0]]}, which is not a whole number, so it "
                f"cannot be planned. Give every sample an integer."
            )
    if least is not None:
        bad = np.flatnonzero(array < least)
        if len(bad):
            raise InputError(
                f"sample {bad[0]} has {name} {array[bad[0]]}, so it holds nothing to train on and "
                f"cannot be planned. Remove samples without tokens."
            )
    if array.size and array.max() > 2**40:
        raise InputError(
            f"sample {int(array.argmax())} has {name} {array.max()}, more than any model can read; "
            f"sums would overflow. Check the unit of the {name}s."
        )
    return array.astype(np.int64)


def _column(name: str, values: ArrayLike, n: int) -> IntArray:
    column = _integers(name, values, least=None)
    if len(column) != n:
        raise InputError(
            f"{name} has {len(column)} entries for {n} samples, so they cannot be matched. "
            f"Give one per sample."
        )
    return column


def _limited(name: str, columns: Mapping[str, ArrayLike] | None, n: int) -> IntArray:
    if columns is None or name not in columns:
        have = ", ".join(sorted(columns or {})) or "none"
        raise InputError(
            f"limits.columns names {name!r} but no such column was given (there is: {have}), so "
            f"the limit cannot be kept. Pass columns={{{name!r}: ...}}."
        )
    column = _column(f"columns[{name!r}]", columns[name], n)
    if (column < 0).any():
        bad = int(np.argmin(column))
        raise InputError(
            f"sample {bad} has {name} {column[bad]}; less than nothing cannot be limited. "
            f"Give 0 or more."
        )
    return column
