"""Pool: samples that were read but not yet put into a micro-batch, and how it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from evenstep.core.layout import Fixed, PackedStatic, Padded
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.recipe import Recipe
from evenstep.core.segments import Segments
from evenstep.core.validate import MOST, one_of, whole_field
from evenstep.data.source import Sample
from evenstep.errors import ConfigError
from evenstep.planning.select import Room, select

PackedStrategy: TypeAlias = Literal["subset_sum", "greedy"]
PaddedStrategy: TypeAlias = Literal["fullest", "prefer_closest", "prefer_first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """How large the pool is, and how a micro-batch is chosen from it.

    It is filled until it holds `samples` samples and `tokens` tokens; then one micro-batch is
    taken, always with the oldest sample in it, so nothing waits for more than as many
    micro-batches as the pool holds samples. `tokens` is two budgets unless given: a pool that
    holds less than one cannot fill it. cosmos-rl counts samples alone.

    strategy        packed rows: `subset_sum` fills the rest as full as it can be, `greedy` takes
                    what fits in order. Padded rows: `fullest` chooses the width and rows that
                    hold most tokens; `prefer_closest` and `prefer_first` are cosmos-rl's.
    trained_tokens  at most so many trained tokens to a micro-batch, beside the layout's budget,
                    which caps what is physically there
    warmup_steps    the budget grows from `warmup_tokens` to its own over so many steps
    """

    samples: int = 64
    tokens: int | None = None
    strategy: PackedStrategy | PaddedStrategy | None = None
    trained_tokens: int | None = None
    warmup_steps: int = 0
    warmup_tokens: int | None = None

    def __post_init__(self) -> None:
        whole_field(self, "pool.samples")
        if self.tokens is not None:
            whole_field(self, "pool.tokens", least=0)
        whole_field(self, "pool.warmup_steps", least=0)
        if self.trained_tokens is not None:
            whole_field(self, "pool.trained_tokens")
        if (self.warmup_steps > 0) != (self.warmup_tokens is not None):
            raise ConfigError(
                "pool.warmup_steps and pool.warmup_tokens go together: over how many steps the "
                "budget grows, and from where. One alone has no effect. Set both or neither."
            )
        if self.warmup_tokens is not None:
            whole_field(self, "pool.warmup_tokens")

    def budget(self, full: int, step: int) -> int:
        """The budget of a step: 200 growing to 1000 over 4 steps gives 200, 400, 600, 800, 1000.

        >>> [Pool(warmup_steps=4, warmup_tokens=200).budget(1000, step) for step in (0, 3, 4)]
        [200, 800, 1000]
        """
        if self.warmup_tokens is None or step >= self.warmup_steps or self.warmup_tokens >= full:
            return full
        return self.warmup_tokens + (full - self.warmup_tokens) * step // self.warmup_steps


class Entry(NamedTuple):
    """A piece of a sample in the pool: the whole sample, unless it was cut for being over-long."""

    epoch: int
    number: int
    start: int
    length: int
    whole: int
    """The length of the sample."""
    end: int
    """Where the sample ends in what is run: its length, or what truncation leaves of it."""
    trained: int
    sample: Sample
    piece: Sequence[int] = ()
    """[epoch, number, start] for cursors, which share it; never changed."""


@dataclass(frozen=True)
class Former:
    """Forms micro-batches of a recipe from pool entries. Decides by lengths alone."""

    recipe: Recipe
    pool: Pool

    def __post_init__(self) -> None:
        recipe, layout = self.recipe, self.recipe.layout
        if isinstance(layout, Padded):
            one_of("pool.strategy", self.strategy, PaddedStrategy)
        else:
            one_of("pool.strategy", self.strategy, PackedStrategy)
        limits, steps = recipe.limits, recipe.steps
        if limits.cost is not None or limits.columns:
            raise ConfigError(
                "limits on cost and columns are kept by plans, and a pool would ignore them. "
                "Use a PlannedStream, or limits.segments and pool.trained_tokens."
            )
        if steps.samples is not None or steps.tokens is not None:
            raise ConfigError(
                "a pool counts steps in micro-batches, because it cannot know how many samples or "
                "tokens the other ranks have. Set steps.micro_batches, or use a PlannedStream."
            )
        if (self.micro_batches % recipe.topology.multiple) != 0:
            raise ConfigError(
                f"steps.micro_batches is {self.micro_batches} but this pipeline runs them in "
                f"multiples of {recipe.topology.multiple}. Use a multiple."
            )
        for name, limit in (
            ("limits.segments", limits.segments),
            ("pool.trained_tokens", self.pool.trained_tokens),
        ):
            if limit is not None and limit < self._rows:
                raise ConfigError(
                    f"{name} is {limit}, shared by the {self._rows} rows of a packed_static "
                    f"micro-batch, so a row could hold none. Raise it to {self._rows} or more."
                )
        static = isinstance(layout, PackedStatic) or layout.pad_to is not None
        if recipe.topology.equal_widths and not (static and not isinstance(layout, Padded)):
            raise ConfigError(
                "this pipeline needs micro-batches of one shape, which a pool cannot promise. Set "
                "layout.pad_to or use packed_static, or set topology.variable_seq_lengths."
            )

    @cached_property
    def strategy(self) -> str:
        """The strategy, or the layout's own."""
        padded = isinstance(self.recipe.layout, Padded)
        return self.pool.strategy or ("fullest" if padded else "subset_sum")

    @cached_property
    def enough(self) -> int:
        """How many tokens the pool holds at least before a micro-batch is taken."""
        if self.pool.tokens is not None:
            return self.pool.tokens
        own = self.strategy in ("subset_sum", "fullest")
        return 2 * (self.recipe.layout.max_tokens or 0) if own else 0

    @cached_property
    def longest(self) -> int | None:
        """The longest piece that a micro-batch can hold; None if nothing limits it."""
        return self.recipe.longest_segment

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step."""
        return self.recipe.steps.micro_batches or 1

    def cut(self, length: int) -> list[tuple[int, int]] | None:
        """(start, length) of each piece of a sample, [] if it is dropped, None if it is refused."""
        limit, overflow = self.longest, self.recipe.overflow
        if limit is None or length <= limit or overflow == "alone":
            return [(0, length)]
        if overflow == "drop":
            return []
        if overflow == "truncate" and limit:
            return [(0, limit)]
        if overflow == "split" and limit:
            return [(start, min(limit, length - start)) for start in range(0, length, limit)]
        return None

    def take(self, waiting: list[Entry], step: int) -> tuple[MicroBatch, list[Entry]]:
        """The next micro-batch and its entries, which leave `waiting`, in the order they lie."""
        layout = self.recipe.layout
        rows: list[list[Entry]] = []
        left = self.pool.trained_tokens
        while len(rows) < self._rows and waiting:
            if rows and left is not None and left < max(1, waiting[0].trained):
                break  # of the trained tokens nothing is left for a further row
            rows.append(self._row(waiting, step, left))
            left = None if left is None else left - sum(entry.trained for entry in rows[-1])
        taken = rows[0] if len(rows) == 1 else [entry for row in rows for entry in row]
        if isinstance(layout, Padded):
            rows = [[entry] for entry in taken]
        return micro_batch(rows, self.recipe, self._width_unit, self._alignment), taken

    def _row(self, waiting: list[Entry], step: int, trained: int | None) -> list[Entry]:
        lengths = np.array([entry.length for entry in waiting], np.int64)
        unit, counted = self._alignment, None
        if unit > 1 and not isinstance(self.recipe.layout, Padded):
            lengths = -(-lengths // unit) * unit
        if self.pool.trained_tokens is not None:
            counted = np.array([entry.trained for entry in waiting], np.int64)
        room = self._full_room if self.pool.warmup_tokens is None else self._room(step)
        if trained is not None and room.counted is not None and trained < room.counted:
            room = replace(room, counted=trained)
        chosen = select(self.strategy, lengths, room, counted).tolist()
        row = [waiting[at] for at in chosen]
        for at in sorted(chosen, reverse=True):
            del waiting[at]
        return row

    @cached_property
    def _rows(self) -> int:
        """Rows that are filled one by one and share every limit of their micro-batch."""
        return self.recipe.layout.rows if isinstance(self.recipe.layout, PackedStatic) else 1

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
        layout, unit, rows = self.recipe.layout, self._width_unit, self._rows
        most, counted = self.recipe.limits.segments, self.pool.trained_tokens
        capacity = self.recipe.capacity
        if isinstance(layout, Fixed):
            most = layout.samples if most is None else min(most, layout.samples)
        if isinstance(layout, Padded):
            budget = self.pool.budget(layout.max_tokens, step)
            return Room(capacity=budget, unit=layout.pad_to or unit, counted=counted, most=most)
        capacity = MOST if capacity is None else capacity
        budget = max(unit, self.pool.budget(capacity * rows, step) // rows // unit * unit)
        return Room(
            capacity=budget,
            counted=None if counted is None else counted // rows,
            most=None if most is None else most // rows,
        )


def micro_batch(
    rows: list[list[Entry]], recipe: Recipe, unit: int | None = None, align: int | None = None
) -> MicroBatch:
    """Entries, row by row, as a micro-batch; without any, a dummy. `unit` and `align` are the
    recipe's, for whoever has them at hand."""
    layout = recipe.layout
    unit = recipe.width_unit if unit is None else unit
    align = recipe.topology.alignment if align is None else align
    count = layout.rows if isinstance(layout, PackedStatic) else max(1, len(rows))
    rows = rows + [[]] * (count - len(rows))
    used = max([sum([-(-entry.length // align) for entry in row]) for row in rows]) * align
    width = max(-(-used // unit), 1) * unit
    if isinstance(layout, PackedStatic):
        width = layout.width
    elif layout.pad_to is not None:
        width = max(width, layout.pad_to)
    # number, start, length, whole, end of each, in one array
    columns = np.array([entry[1:6] for row in rows for entry in row], np.int64).reshape(-1, 5).T
    sample, start, length, whole, end = columns
    offsets = np.array([0, *accumulate(map(len, rows))], np.int64)
    return MicroBatch(Segments(sample, start, length), offsets, width, whole, align, end)


def trained_tokens_of(sample: Any, start: int, end: int) -> int:
    """How many of a sample's tokens from `start` to `end` are trained, by its labels or mask; all
    of them where it has neither.

    >>> trained_tokens_of({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, 0, 3)
    2
    """
    if isinstance(sample, Mapping):
        if "labels" in sample:
            return int((np.asarray(sample["labels"])[start:end] != -100).sum())
        if "loss_mask" in sample:
            return int((np.asarray(sample["loss_mask"])[start:end] != 0).sum())
    return end - start


Measure: TypeAlias = Callable[[Sample], int]
