"""Pool: its settings, the segments in it, and their micro-batches. No compiler here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import Segments, rounded_up, sample_name
from evenstep.core.recipe import Overflow, Recipe
from evenstep.core.text import whole_field, whole_number
from evenstep.data.source import Sample, loss_tokens_of
from evenstep.errors import ConfigError, SampleError
from evenstep.planning.units import refused, segments_of


def refuse_sharing(recipe: Recipe) -> None:
    """Raise if ranks would share samples: a rank of pooled or fed steps knows its own alone."""
    if recipe.sharing is not None:
        raise ConfigError(
            "sharing needs the lengths of all samples of a step before it begins, which pooled "
            "streams and feeds do not know. Use a PlannedStream, or leave sharing out."
        )


# Segments ----------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Tokens of a sample that stay together."""

    start: int
    length: int
    end: int
    """Where the sample ends after truncation; its length if it was not truncated."""


class OverflowPolicy(NamedTuple):
    """Segments of at most `longest` tokens (None: of any length), by the policy `overflow`.

    A cursor holds it, so that the budget may change.

    >>> OverflowPolicy(8, "truncate").segments(20)
    [Segment(start=0, length=8, end=8)]
    """

    longest: int | None
    overflow: Overflow

    def segments(self, length: int) -> list[Segment] | None:
        """The segments of a sample of this length; [] if it is dropped, None if refused."""
        return self.divide(Segment(0, length, length))

    def divide(self, segment: Segment) -> list[Segment] | None:
        """A segment of another policy; [] if it is dropped, None if refused.

        >>> OverflowPolicy(6, "split").divide(Segment(8, 8, 20))
        [Segment(start=8, length=6, end=20), Segment(start=14, length=2, end=20)]
        """
        first, length, end = segment
        if self.longest is None or length <= self.longest:
            return [segment]
        lengths = np.array([length], np.int64)
        if len(refused(lengths, self.longest, self.overflow)):
            return None
        columns, _ = segments_of(lengths, self.longest, self.overflow)
        kept = int(columns.length.sum())
        end = end if kept == length else first + kept
        pairs = zip(columns.start.tolist(), columns.length.tolist(), strict=True)
        return [Segment(first + start, size, end) for start, size in pairs]


# Limited columns ----------------------------------------------------------------------------------

ColumnOf: TypeAlias = Callable[[Sample], int]
"""What a sample takes of a column, such as its number of image patches."""


class SampleColumns:
    """The columns in `recipe.limits.columns`, by the `functions`.

    `loss_tokens` needs no function: they are counted from `labels` and the loss mask, per segment.
    Every segment of a split sample counts its other columns in full, as in plans.

    >>> from evenstep import Limits, Packed
    >>> recipe = Recipe(layout=Packed(max_tokens=9), limits=Limits(columns={"images": 4}))
    >>> SampleColumns(recipe, {"images": lambda sample: len(sample["images"])}).names
    ('images',)
    """

    def __init__(self, recipe: Recipe, functions: Mapping[str, ColumnOf]) -> None:
        if not isinstance(functions, Mapping):
            raise ConfigError(
                f"columns must map names to functions of a sample, got {type(functions).__name__}. "
                f"Pass columns={{'images': lambda sample: len(sample['images'])}}."
            )
        self.names = tuple(recipe.limits.columns)
        packs = recipe.layout.packs_per_micro_batch
        self.shares = tuple(most // packs for most in recipe.limits.columns.values())
        """What one row of a micro-batch may hold of each; padded: the micro-batch."""
        self._functions, self._alone = dict(functions), recipe.overflow == "alone"
        for name in functions:
            if name not in self.names:
                raise ConfigError(
                    f"columns has {name!r}, which has no limit. Set limits.columns.{name}, or "
                    f"leave it out."
                )
        for name in self.names:
            if name not in functions and name != "loss_tokens":
                raise ConfigError(
                    f"limits.columns.{name} needs the values of samples. Pass "
                    f"columns={{{name!r}: function of a sample}} to the PooledStream, or use a "
                    f"PlannedStream."
                )

    def of(self, sample_id: int, sample: Sample, segment: Segment) -> tuple[int, ...]:
        """What a segment of a sample takes of each column."""
        values = []
        for name, share in zip(self.names, self.shares, strict=True):
            if name in self._functions:
                value = whole_number(f"column {name}", self._functions[name](sample), least=0)
            else:
                start, length, end = segment
                value = loss_tokens_of(sample, start, start + length, end)
            if value > share and not self._alone:
                raise SampleError(
                    f"sample {sample_name(sample_id)} takes {value} of limits.columns.{name}, more "
                    f"than the {share} that fit. Raise the limit, remove the sample, or set "
                    f"overflow='alone'."
                )
            values.append(value)
        return tuple(values)


# The pool -----------------------------------------------------------------------------------------

Measure: TypeAlias = Callable[[Sample], int]
"""Returns the number of tokens of a sample."""
PackedStrategy: TypeAlias = Literal["subset_sum", "greedy"]
PaddedStrategy: TypeAlias = Literal["fullest", "prefer_closest", "prefer_first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Size of the pool, and the strategy that selects micro-batches from it.

    The pool fills until it holds `samples` samples and `tokens` tokens. Then one micro-batch is
    taken. It includes the oldest sample, so a sample waits for at most as many micro-batches as
    there are samples in the pool. With `fullest` it includes a sample that is drawn by tokens,
    which is the oldest in at least every other draw on average.

    samples         least number of samples before a micro-batch is taken
    tokens          least number of tokens; by default twice the budget, so that a micro-batch can
                    be filled (0 with the strategies of cosmos-rl, which counts samples only)
    strategy        packed rows: `subset_sum` fills the remaining capacity as far as possible,
                    `greedy` takes what fits, in order. Padded rows: `fullest` chooses the width
                    and rows that hold the most tokens; `prefer_closest` and `prefer_first` are
                    those of cosmos-rl. The default is the first of each.
    alone           samples of at least so many tokens are a micro-batch of their own
    warmup_steps    number of steps over which the budget grows from `warmup_tokens` to its full
                    size
    warmup_tokens   the budget of the first step

    >>> Pool(samples=128, strategy="greedy").tokens is None
    True
    """

    samples: int = 64
    tokens: int | None = None
    strategy: PackedStrategy | PaddedStrategy | None = None
    alone: int | None = None
    warmup_steps: int = 0
    warmup_tokens: int | None = None

    def __post_init__(self) -> None:
        whole_field(self, "pool.samples")
        whole_field(self, "pool.tokens", least=0, optional=True)
        whole_field(self, "pool.alone", optional=True)
        whole_field(self, "pool.warmup_steps", least=0)
        if (self.warmup_steps > 0) != (self.warmup_tokens is not None):
            raise ConfigError(
                "pool.warmup_steps and pool.warmup_tokens have no effect without each other. Set "
                "both or neither."
            )
        whole_field(self, "pool.warmup_tokens", optional=True)

    def budget(self, full: int, step: int) -> int:
        """The budget of a step. From 200 to 1000 over 4 steps: 200, 400, 600, 800, 1000.

        >>> [Pool(warmup_steps=4, warmup_tokens=200).budget(1000, step) for step in (0, 3, 4)]
        [200, 800, 1000]
        """
        if self.warmup_tokens is None or step >= self.warmup_steps or self.warmup_tokens >= full:
            return full
        return self.warmup_tokens + (full - self.warmup_tokens) * step // self.warmup_steps


class Entry(NamedTuple):
    """A segment in the pool: a whole sample, unless an over-long sample was split or truncated."""

    epoch: int
    sample_id: int
    start: int
    length: int
    whole: int
    """The length of the sample."""
    end: int
    """Where the sample ends after truncation; its length if it was not truncated."""
    columns: tuple[int, ...]
    """What it takes of each limited column."""
    sample: Sample
    key: list[int]
    """What cursors hold (see `Waiting`)."""


# Micro-batches ------------------------------------------------------------------------------------


def micro_batch(rows: list[list[Entry]], recipe: Recipe) -> MicroBatch:
    """The micro-batch of these rows of entries; an empty micro-batch if there are none."""
    layout, unit, align = recipe.layout, recipe.width_unit, recipe.topology.alignment
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
