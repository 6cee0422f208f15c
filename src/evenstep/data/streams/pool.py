"""Pool: samples that were read but not yet put into a micro-batch, and how it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import rounded_up
from evenstep.core.segments import Segments
from evenstep.core.validate import MOST, whole_field
from evenstep.data.sources.source import Sample
from evenstep.errors import ConfigError
from evenstep.planning.batching.selection import Room, select
from evenstep.planning.overflow import refused, segments_of

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
    loss_tokens     the most loss tokens of a micro-batch, besides the bounds of the layout
    warmup_steps    the budget grows from `warmup_tokens` to its own over so many steps
    """

    samples: int = 64
    tokens: int | None = None
    strategy: PackedStrategy | PaddedStrategy | None = None
    loss_tokens: int | None = None
    warmup_steps: int = 0
    warmup_tokens: int | None = None

    def __post_init__(self) -> None:
        whole_field(self, "pool.samples")
        if self.tokens is not None:
            whole_field(self, "pool.tokens", least=0)
        whole_field(self, "pool.warmup_steps", least=0)
        if self.loss_tokens is not None:
            whole_field(self, "pool.loss_tokens")
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
    loss_tokens: int
    sample: Sample
    piece: Sequence[int] = ()
    """[epoch, number, start] for cursors, which share it; never changed."""


@dataclass(frozen=True)
class PoolBatcher:
    """Forms micro-batches of a recipe from pool entries. Decides by lengths alone."""

    recipe: Recipe
    pool: Pool

    def __post_init__(self) -> None:
        recipe, layout = self.recipe, self.recipe.layout
        if self.strategy not in layout.pool_strategies:
            raise ConfigError(
                f"unknown pool.strategy {self.strategy!r} for {layout.kind} rows; expected one of: "
                f"{', '.join(layout.pool_strategies)}."
            )
        self._refuse_options()
        if recipe.steps.samples is not None or recipe.steps.tokens is not None:
            raise ConfigError(
                "a pool counts steps in micro-batches, because it cannot know how many samples or "
                "tokens the other ranks have. Set steps.micro_batches, or use a PlannedStream."
            )
        if self.micro_batches % recipe.topology.multiple:
            raise ConfigError(
                f"steps.micro_batches is {self.micro_batches}, but this pipeline runs multiples of "
                f"{recipe.topology.multiple}. Use a multiple."
            )
        limit = self.pool.loss_tokens
        if limit is not None and limit < layout.packs_per_micro_batch:
            raise ConfigError(
                f"pool.loss_tokens is {limit}, shared by {layout.packs_per_micro_batch} rows. "
                f"Raise it to {layout.packs_per_micro_batch} or more."
            )
        if recipe.topology.equal_widths and not layout.static:
            raise ConfigError(
                "this pipeline needs micro-batches of one shape, which a pool cannot promise. Set "
                "layout.pad_to (and layout.samples where rows are padded), or "
                "topology.variable_seq_lengths."
            )

    def _refuse_options(self) -> None:
        """Refuse what only plans can do."""
        recipe, limits = self.recipe, self.recipe.limits
        given = dict(recipe.layout.options)
        default = {"balance": "refined", "equal_sizes": False, "groups": "micro_batch"}
        given |= {
            name: getattr(recipe, name)
            for name, usual in default.items()
            if getattr(recipe, name) != usual
        }
        if limits.cost is not None:
            given["limits.cost"] = limits.cost
        given |= {f"limits.columns.{name}": most for name, most in limits.columns.items()}
        for name, value in given.items():
            raise ConfigError(
                f"{name}={value!r} has no effect in a pool, which forms micro-batches as samples "
                f"arrive. Leave it out, or use a PlannedStream."
            )

    @cached_property
    def strategy(self) -> str:
        """The strategy, or the layout's own."""
        return self.pool.strategy or self.recipe.layout.pool_strategies[0]

    @cached_property
    def enough(self) -> int:
        """How many tokens the pool holds at least before a micro-batch is taken."""
        if self.pool.tokens is not None:
            return self.pool.tokens
        own = self.strategy == self.recipe.layout.pool_strategies[0]
        return 2 * (self.recipe.layout.budget or 0) if own else 0

    @cached_property
    def longest(self) -> int | None:
        """The longest piece that a micro-batch can hold; None if nothing limits it."""
        return self.recipe.longest_segment

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step."""
        return self.recipe.steps.micro_batches or 1

    def segments(self, length: int) -> list[tuple[int, int]] | None:
        """(start, length) of each segment of a sample, [] if it is dropped, None if refused."""
        if self.longest is None or length <= self.longest:
            return [(0, length)]
        lengths, overflow = np.array([length], np.int64), self.recipe.overflow
        if len(refused(lengths, self.longest, overflow)):
            return None
        found, _ = segments_of(lengths, self.longest, overflow)
        return list(zip(found.start.tolist(), found.length.tolist(), strict=True))

    def take(self, waiting: list[Entry], step: int) -> tuple[MicroBatch, list[Entry]]:
        """The next micro-batch and its entries, which leave `waiting`, in the order they lie."""
        layout = self.recipe.layout
        packs: list[list[Entry]] = []
        left = self.pool.loss_tokens
        while len(packs) < layout.packs_per_micro_batch and waiting:
            if packs and left is not None and left < max(1, waiting[0].loss_tokens):
                break  # no loss tokens are left for a further row
            packs.append(self._pack(waiting, step, left))
            left = None if left is None else left - sum(entry.loss_tokens for entry in packs[-1])
        taken = packs[0] if len(packs) == 1 else [entry for pack in packs for entry in pack]
        rows = layout.rows_of(packs)
        return micro_batch(rows, self.recipe, self._width_unit, self._alignment), taken

    def _pack(self, waiting: list[Entry], step: int, left: int | None) -> list[Entry]:
        lengths = np.array([entry.length for entry in waiting], np.int64)
        counted = None
        if self._alignment > 1:
            lengths = rounded_up(lengths, self._alignment)
        if self.pool.loss_tokens is not None:
            counted = np.array([entry.loss_tokens for entry in waiting], np.int64)
        room = self._full_room if self.pool.warmup_tokens is None else self._room(step)
        if left is not None and room.counted is not None and left < room.counted:
            room = replace(room, counted=left)
        chosen = select(self.strategy, lengths, room, counted).tolist()
        pack = [waiting[at] for at in chosen]
        for at in sorted(chosen, reverse=True):
            del waiting[at]
        return pack

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
        """What a pack may hold in a step."""
        layout, unit = self.recipe.layout, self._width_unit
        packs, counted = layout.packs_per_micro_batch, self.pool.loss_tokens
        slots, rounding = layout.room(self.recipe)
        budget = self.pool.budget((MOST if slots is None else slots) * packs, step) // packs
        return Room(
            capacity=max(unit, budget // unit * unit),
            unit=rounding,
            counted=None if counted is None else counted // packs,
            most=None if layout.samples is None else layout.samples // packs,
        )


def micro_batch(
    rows: list[list[Entry]], recipe: Recipe, unit: int | None = None, align: int | None = None
) -> MicroBatch:
    """Entries, row by row, as a micro-batch; without any, an empty one. `unit` and `align` are the
    recipe's, for callers that have them at hand."""
    layout = recipe.layout
    unit = recipe.width_unit if unit is None else unit
    align = recipe.topology.alignment if align is None else align
    rows = rows + [[]] * (layout.row_counts(len(rows)) - len(rows))
    used = max([sum([rounded_up(entry.length, align) for entry in row]) for row in rows])
    # number, start, length, whole, end of each, in one array
    columns = np.array([entry[1:6] for row in rows for entry in row], np.int64).reshape(-1, 5).T
    sample, start, length, whole, end = columns
    offsets = np.array([0, *accumulate(map(len, rows))], np.int64)
    width = layout.widths(used, unit)
    return MicroBatch(Segments(sample, start, length), offsets, width, whole, align, end)


def loss_tokens_of(sample: Any, start: int, end: int, stop: int) -> int:
    """The labels that count in the loss for tokens `start` to `end` of a sample that runs to
    `stop`, by its labels or mask. Token i is predicted at i - 1, so the first token of a sample is
    no label, and the first one behind a segment is.

    >>> sample = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    >>> loss_tokens_of(sample, 0, 3, 3), loss_tokens_of(sample, 0, 1, 3)
    (2, 1)
    """
    labels = slice(start + 1, min(end + 1, stop))
    if isinstance(sample, Mapping):
        if "labels" in sample:
            return int((np.asarray(sample["labels"])[labels] != -100).sum())
        if "loss_mask" in sample:
            return int((np.asarray(sample["loss_mask"])[labels] != 0).sum())
    return max(labels.stop - labels.start, 0)


def entries_of(
    epoch: int, number: int, sample: Sample, length: int, segments: list[tuple[int, int]]
) -> list[Entry]:
    """The entries of a sample, one for each (start, length) of its segments."""
    stop = segments[-1][0] + segments[-1][1] if segments else 0
    return [
        Entry(
            epoch,
            number,
            start,
            part,
            length,
            stop,
            loss_tokens_of(sample, start, start + part, stop),
            sample,
            [epoch, number, start],
        )
        for start, part in segments
    ]


Measure: TypeAlias = Callable[[Sample], int]
