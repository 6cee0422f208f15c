"""Pool: settings of the buffer of samples that are read but not yet in a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from evenstep.core.text import whole_field
from evenstep.data.sources.source import Sample
from evenstep.data.streams.cut import Piece
from evenstep.data.streams.sample_columns import SampleColumns
from evenstep.errors import ConfigError

Measure: TypeAlias = Callable[[Sample], int]
"""Returns the number of tokens of a sample."""
PackedStrategy: TypeAlias = Literal["subset_sum", "greedy"]
PaddedStrategy: TypeAlias = Literal["fullest", "prefer_closest", "prefer_first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Size of the pool, and the strategy that selects micro-batches from it.

    The pool fills until it holds `samples` samples and `tokens` tokens. Then one micro-batch is
    taken. It includes the oldest sample, so a sample waits for at most as many micro-batches as
    there are samples in the pool. With `fullest` it includes a sample drawn by tokens (`leader`),
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
        if self.tokens is not None:
            whole_field(self, "pool.tokens", least=0)
        if self.alone is not None:
            whole_field(self, "pool.alone")
        whole_field(self, "pool.warmup_steps", least=0)
        if (self.warmup_steps > 0) != (self.warmup_tokens is not None):
            raise ConfigError(
                "pool.warmup_steps and pool.warmup_tokens have no effect without each other. Set "
                "both or neither."
            )
        if self.warmup_tokens is not None:
            whole_field(self, "pool.warmup_tokens")

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
    key: Sequence[int] = ()
    """What cursors hold (see `Waiting`). Cursors share this list; do not change it."""


def entry_of(
    epoch: int, sample_id: int, sample: Sample, length: int, piece: Piece, columns: SampleColumns
) -> Entry:
    """The pool entry of a piece of a sample of this length."""
    start, size, stop = piece
    taken = columns.of(sample_id, sample, piece)
    key = [epoch, sample_id, start]
    return Entry(epoch, sample_id, start, size, length, stop, taken, sample, key)


def entries_of(
    epoch: int,
    sample_id: int,
    sample: Sample,
    length: int,
    segments: list[tuple[int, int]],
    columns: SampleColumns,
) -> list[Entry]:
    """The pool entries of a sample, one for each (start, length) in `segments`."""
    stop = segments[-1][0] + segments[-1][1] if segments else 0
    return [
        entry_of(epoch, sample_id, sample, length, Piece(start, size, stop), columns)
        for start, size in segments
    ]
