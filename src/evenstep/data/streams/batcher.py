"""PoolBatcher: forms micro-batches from the samples in a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import rounded_up
from evenstep.core.segments import Segments
from evenstep.core.validate import MOST
from evenstep.data.streams.cut import Cut
from evenstep.data.streams.further_limits import further_limits
from evenstep.data.streams.leader import leader_first
from evenstep.data.streams.pool import Entry, Pool
from evenstep.data.streams.sample_columns import ColumnOf, SampleColumns
from evenstep.errors import ConfigError
from evenstep.planning.pool import Room, select


@dataclass(frozen=True)
class PoolBatcher:
    """Forms the micro-batches of a recipe from pool entries. Uses only their lengths."""

    recipe: Recipe
    pool: Pool
    columns: Mapping[str, ColumnOf] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recipe, layout = self.recipe, self.recipe.layout
        if self.strategy not in layout.pool_strategies:
            raise ConfigError(
                f"unknown pool.strategy {self.strategy!r} for {layout.kind} rows; expected one of: "
                f"{', '.join(layout.pool_strategies)}."
            )
        self._refuse_options()
        assert self.sample_columns is not None  # refuses columns without a function
        if recipe.steps.samples is not None or recipe.steps.tokens is not None:
            raise ConfigError(
                "steps.samples and steps.tokens cannot be used with a pool, because a rank does "
                "not know what other ranks read. Set steps.micro_batches, or use a PlannedStream."
            )
        if self.micro_batches % recipe.topology.multiple:
            raise ConfigError(
                f"steps.micro_batches must be a multiple of {recipe.topology.multiple} for this "
                f"pipeline, got {self.micro_batches}."
            )
        if self.pool.warmup_tokens is not None and layout.budget is None:
            raise ConfigError(
                "pool.warmup_steps grows a budget of slots, and this layout has none. Set "
                "layout.max_tokens, or leave the warm-up out."
            )
        if recipe.topology.equal_widths and not layout.static:
            raise ConfigError(
                "this pipeline needs micro-batches of equal shape, which a pool does not guarantee "
                "with this layout. Set layout.pad_to (and layout.samples for padded rows), or "
                "topology.variable_seq_lengths."
            )

    def _refuse_options(self) -> None:
        """Refuse options that only planning supports."""
        recipe = self.recipe
        given = dict(recipe.layout.options)
        default = {
            "balance": "refined",
            "equal_sizes": False,
            "equal_tokens": False,
            "second_work": None,
            "min_saving": None,
            "groups": "micro_batch",
        }
        given |= {
            name: getattr(recipe, name)
            for name, value in default.items()
            if getattr(recipe, name) != value
        }
        for name, value in given.items():
            raise ConfigError(
                f"{name}={value!r} has no effect with a pool. Remove it, or use a PlannedStream."
            )

    @cached_property
    def sample_columns(self) -> SampleColumns:
        """What samples take of the limited columns."""
        return SampleColumns(self.recipe, self.columns)

    @cached_property
    def strategy(self) -> str:
        """The strategy of the pool, or the layout's default."""
        return self.pool.strategy or self.recipe.layout.pool_strategies[0]

    @cached_property
    def samples(self) -> int:
        """Least number of samples in the pool before a micro-batch is taken."""
        return max(self.pool.samples, self.recipe.layout.samples or 0)

    @cached_property
    def enough(self) -> int:
        """Least number of tokens in the pool before a micro-batch is taken."""
        if self.pool.tokens is not None:
            return self.pool.tokens
        own = self.strategy == self.recipe.layout.pool_strategies[0]
        return 2 * (self.recipe.layout.budget or 0) if own else 0

    @cached_property
    def longest(self) -> int | None:
        """The longest segment that fits into a micro-batch; None if any does."""
        return self.recipe.longest_segment

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.recipe.steps.micro_batches or 1

    @cached_property
    def cut(self) -> Cut:
        """How over-long samples become segments."""
        return Cut(self.longest, self.recipe.overflow)

    def segments(self, length: int) -> list[tuple[int, int]] | None:
        """(start, length) of each segment of a sample; [] if it is dropped, None if refused."""
        return self.cut.segments(length)

    def take(
        self, waiting: list[Entry], step: int, ending: bool = False
    ) -> tuple[MicroBatch, list[Entry]]:
        """Remove the next micro-batch from `waiting`; return it and its entries in row order.
        `ending`: nothing will be added to `waiting`."""
        layout = self.recipe.layout
        packs: list[list[Entry]] = []
        left = list(self.recipe.limits.columns.values())
        while len(packs) < layout.packs_per_micro_batch and waiting:
            first = waiting[0].columns
            if packs and any(most < max(1, one) for most, one in zip(left, first, strict=True)):
                break  # nothing left for another row
            packs.append(self._pack(waiting, step, left, ending))
            for entry in packs[-1] if left else ():
                left = [most - one for most, one in zip(left, entry.columns, strict=True)]
        taken = packs[0] if len(packs) == 1 else [entry for pack in packs for entry in pack]
        rows = layout.rows_of(packs)
        return micro_batch(rows, self.recipe, self._width_unit, self._alignment), taken

    def take_few(
        self, waiting: list[Entry], step: int, most: int
    ) -> tuple[MicroBatch, list[Entry]]:
        """As `take`, when nothing will be added to `waiting`, but at most `most` entries."""
        micro, taken = self.take(list(waiting), step, ending=True)
        if len(taken) > most:
            micro, taken = self.take(taken[:most], step, ending=True)
        gone = {id(entry) for entry in taken}
        waiting[:] = [entry for entry in waiting if id(entry) not in gone]
        return micro, taken

    def _pack(self, waiting: list[Entry], step: int, left: list[int], ending: bool) -> list[Entry]:
        lengths = np.array([entry.length for entry in waiting], np.int64)
        if self._alignment > 1:
            lengths = rounded_up(lengths, self._alignment)
        room = self._full_room if self.pool.warmup_tokens is None else self._room(step)
        if self.pool.alone is not None:  # as if it filled the room
            alone = np.array([entry.length >= self.pool.alone for entry in waiting])
            lengths = np.where(alone, np.maximum(lengths, room.capacity), lengths)
        if not left and self.recipe.limits.cost is None:
            chosen = self._selected(lengths, room, None, ending)
        else:
            columns = np.array([entry.columns for entry in waiting], np.int64)
            columns = columns.reshape(len(waiting), len(left))
            chosen = self._limited(lengths, room, columns, left, ending)
        pack = [waiting[at] for at in chosen]
        for at in sorted(chosen, reverse=True):
            del waiting[at]
        return pack

    def _limited(
        self, lengths: IntArray, room: Room, columns: IntArray, left: list[int], ending: bool
    ) -> list[int]:
        """The next pack within the limits on columns and cost. One column is a part of the
        selection. Of several, the samples that would be selected without them come first."""
        shares = np.minimum(self.sample_columns.shares, np.maximum(left, 1))
        if len(left) == 1 and self.recipe.limits.cost is None:
            counted = replace(room, counted=int(shares[0]))
            return self._selected(lengths, counted, columns[:, 0], ending)
        first = self._selected(lengths, room, None, ending)
        others = np.delete(np.arange(len(lengths)), first).tolist()
        limits = further_limits(self.recipe, lengths, columns, shares)
        return limits.within(lengths, room, first + others)

    def _selected(
        self, lengths: IntArray, room: Room, counted: IntArray | None, ending: bool
    ) -> list[int]:
        """Indices in the pool of the next pack. The first is the oldest, or its leader."""
        chosen: list[int]
        if self.strategy != "fullest":
            chosen = select(self.strategy, lengths, room, counted).tolist()
            return chosen
        order = leader_first(lengths, ending)
        counts = None if counted is None else counted[order]
        chosen = order[select(self.strategy, lengths[order], room, counts)].tolist()
        return chosen

    @cached_property
    def _alignment(self) -> int:
        return self.recipe.topology.alignment

    @cached_property
    def _width_unit(self) -> int:
        return self.recipe.width_unit

    @cached_property
    def _full_room(self) -> Room:
        return self._room(self.pool.warmup_steps)

    def _room(self, step: int) -> Room:
        """Limits of one pack in a step."""
        layout, unit = self.recipe.layout, self._width_unit
        packs = layout.packs_per_micro_batch
        slots, rounding = layout.room(self.recipe)
        budget = self.pool.budget((MOST if slots is None else slots) * packs, step) // packs
        return Room(
            capacity=max(unit, budget // unit * unit),
            unit=rounding,
            most=None if layout.samples is None else layout.samples // packs,
        )


def micro_batch(
    rows: list[list[Entry]], recipe: Recipe, unit: int | None = None, align: int | None = None
) -> MicroBatch:
    """The micro-batch of these rows of entries; an empty micro-batch if there are none.

    `unit` and `align` default to those of the recipe; callers may pass them to save the lookup.
    """
    layout = recipe.layout
    unit = recipe.width_unit if unit is None else unit
    align = recipe.topology.alignment if align is None else align
    rows = rows + [[]] * (layout.row_counts(len(rows)) - len(rows))
    if align == 1:
        used = max([sum([entry.length for entry in row]) for row in rows])
    else:
        used = max([sum([rounded_up(entry.length, align) for entry in row]) for row in rows])
    # columns: sample id, start, length, length of the sample, its end
    columns = np.array([entry[1:6] for row in rows for entry in row], np.int64).reshape(-1, 5).T
    sample, start, length, whole, end = columns
    offsets = np.array([0, *accumulate(map(len, rows))], np.int64)
    width = layout.widths(used, unit)
    segments = Segments(sample, start, length)
    return MicroBatch(segments, offsets, width, whole, align, end, width_unit=unit)
