"""Plan: which tokens of which samples run in which step, rank and micro-batch. Pure data."""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core import measures, plan_file
from evenstep.core.checks import offsets_nest
from evenstep.core.layout import Packed, Placement, place
from evenstep.core.measures import step_means, step_times
from evenstep.core.prefixes import Prefixes
from evenstep.core.ragged import (
    ELSEWHERE,
    BoolArray,
    FloatArray,
    IntArray,
    Ragged,
    Segments,
    by_first_appearance,
    frozen,
    offsets_of,
    own_segments,
    ranges_of,
    rounded_up,
    sample_name,
    sum_by,
)
from evenstep.core.recipe import Recipe, Topology, recipe_on_fewer_ranks
from evenstep.core.text import attempt, counted, fill, line, set_fields
from evenstep.errors import FileError, InputError, PlanError


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What one rank sends and receives in a wave that shares samples between ranks.

        rank 0: tokens 0-3 of a sample     rank 1: tokens 4-5     rank 2: tokens 6-8
        sends 4 tokens to ranks 1 and 2    receives 4, sends 2    receives 4 and 2

    A part of a sample goes to every rank that holds a later one. Parts are sent and received in the
    order of ranks and, between two ranks, of samples. Every rank of the wave has an exchange, also
    with nothing to send. Segments are counted from the first of the micro-batch.
    """

    ranks: int
    digest: int
    """48 bits, equal on all ranks of the wave if they have the same plan."""
    samples: IntArray
    """The samples that the wave shares, on all ranks alike."""
    lengths: IntArray  # of each of these samples, the tokens that run
    number: IntArray  # of each segment, the index of its sample in `samples`; -1 if it is whole
    sent: IntArray  # segments
    sent_to: IntArray  # rank of each, ascending
    received_number: IntArray  # of each part received, the index of its sample in `samples`
    received: IntArray  # its tokens
    received_start: IntArray  # its first token in the sample
    received_from: IntArray  # its rank, ascending

    def take(self, chosen: IntArray) -> Exchange:
        """The same for some segments, ascending, which include all parts of shared samples."""
        return replace(self, number=self.number[chosen], sent=np.searchsorted(chosen, self.sent))


@dataclass(frozen=True, slots=True, eq=False)
class SharedParts:
    """The parts of all samples that ranks share in a wave, in the order of ranks."""

    parts: Segments
    rank: IntArray  # of each part
    samples: IntArray
    digest: int

    @classmethod
    def of(cls, parts: Segments, rank: IntArray) -> SharedParts:
        """With the samples and a digest of these parts."""
        columns = (parts.sample, parts.start, parts.length, rank)
        text = b"".join(column.tobytes() for column in columns)
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")
        return cls(parts, rank, np.unique(parts.sample), digest)

    def exchange(self, rank: int, ranks: int, segments: Segments, lengths: IntArray) -> Exchange:
        """The exchange of a rank, whose micro-batch has these segments."""
        is_part = np.isin(segments.sample, self.samples)
        known = np.flatnonzero(np.isin(self.parts.sample, segments.sample))
        parts, of_part = self.parts.take(known), self.rank[known]
        source, target = parts.transfers(of_part)
        sent, seen = of_part[source] == rank, np.flatnonzero(target == rank)
        seen = source[seen[np.argsort(of_part[source[seen]], kind="stable")]]
        own = np.cumsum(of_part == rank) - 1  # of each of this rank, its number among them
        return Exchange(
            ranks=ranks,
            digest=self.digest,
            samples=self.samples,
            lengths=lengths,
            number=np.where(is_part, np.searchsorted(self.samples, segments.sample), -1),
            sent=np.flatnonzero(is_part)[own[source[sent]]],
            sent_to=target[sent],
            received_number=np.searchsorted(self.samples, parts.sample[seen]),
            received=parts.length[seen],
            received_start=parts.start[seen],
            received_from=of_part[seen],
        )


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows times width. Row i holds `segments[row_offsets[i]:row_offsets[i + 1]]`, end to end.

    An empty micro-batch has no segments. It has weight zero and is for ranks without work.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> (micro,) = plan[0, 0]
    >>> micro.segments.sample.tolist(), micro.rows, micro.width
    ([0, 1], 1, 8)
    """

    segments: Segments
    row_offsets: IntArray
    width: int
    sample_lengths: IntArray
    """The full length of each segment's sample, to detect samples that do not match the plan."""
    alignment: int = 1
    truncated_to: IntArray | None = None
    """The length of each segment's sample after truncation; None if no sample is truncated."""
    groups: IntArray | None = None
    """The group of each segment, if the plan keeps groups in one micro-batch; else None."""
    width_unit: int = 1
    """Widths are multiples of this (`Recipe.width_unit`)."""
    exchange: Exchange | None = None
    """What ranks exchange in this wave; None if it shares no sample between ranks."""

    __setstate__ = set_fields

    @classmethod
    def one_row(cls, lengths: Sequence[int], width: int | None = None) -> MicroBatch:
        """Whole samples 0, 1, ... in order, end to end in one row of this width (default: as wide
        as they are).

        >>> MicroBatch.one_row([3, 2], width=8).placement.offsets.tolist()
        [0, 3, 5, 8]
        """
        length = np.asarray(lengths, np.int64)
        number, start = np.arange(len(length)), np.zeros_like(length)
        used = int(length.sum())
        width = max(used, 1) if width is None else width
        if width < used:
            raise InputError(
                f"a row of {width} slots cannot hold {used} tokens. Use at least {used}, or fewer "
                f"samples."
            )
        return cls(Segments(number, start, length), np.array([0, len(length)]), width, length)

    @property
    def rows(self) -> int:
        """The number of rows, including empty ones."""
        return len(self.row_offsets) - 1

    @property
    def slots(self) -> int:
        """Real tokens plus padding."""
        return self.rows * self.width

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.segments.length.sum())

    @property
    def sample_ends(self) -> IntArray:
        """Where each segment's sample ends in this plan: its length, also after truncation.

        A segment that ends earlier is one of several; its sample continues elsewhere in the step.
        """
        return self.sample_lengths if self.truncated_to is None else self.truncated_to

    @property
    def placement(self) -> Placement:
        """Where each segment is in the flattened rows."""
        return place(self.segments.length, self.row_offsets, self.width, self.alignment)

    @property
    def is_empty(self) -> bool:
        """Whether it has no segments."""
        return len(self.segments) == 0

    def without(self, samples: Sequence[int]) -> MicroBatch:
        """The same rows and width without these samples; their slots become padding."""
        if self.exchange is not None:
            shared = np.intersect1d(self.exchange.samples, samples)
            if len(shared):
                raise InputError(
                    f"sample {sample_name(int(shared[0]))} cannot be left out: it is shared "
                    f"between ranks, which rely on each other's parts. Repair or remove it in the "
                    f"source, or plan without sharing and context parallelism."
                )
        # How many of the segments that stay come before each: where rows start then.
        keep = np.isin(self.segments.sample, np.asarray(samples, np.int64), invert=True)
        keep = self._with_ancestors(keep)
        kept_before = np.concatenate(([0], np.cumsum(keep)))
        return self._take(np.flatnonzero(keep), kept_before[self.row_offsets], self.width)

    def renumbered(self, numbers: IntArray) -> MicroBatch:
        """The same with sample i numbered `numbers[i]`, for example with its id in a source."""
        segments = self.segments
        named, exchange = replace(segments, sample=numbers[segments.sample]), self.exchange
        if exchange is not None:
            exchange = replace(exchange, samples=numbers[exchange.samples])
        return replace(self, segments=named, exchange=exchange)

    @property
    def own(self) -> BoolArray:
        """Which segments are a sample's own: all but those that others see in front."""
        return own_segments(self.segments.parent, len(self.segments))

    @property
    def parts(self) -> IntArray:
        """The part of each segment that stays together: its group, its tree, or the segment alone.

        Parts are numbered by first appearance: groups [7, 3, 7] -> [0, 1, 0]. One tree alone has
        a part for each sample.
        """
        if self.groups is not None:
            return by_first_appearance(self.groups)[0]
        if self.segments.parent is None or self.is_empty:
            return np.arange(len(self.segments))
        trees = np.cumsum(self.segments.parent < 0) - 1
        samples: IntArray = by_first_appearance(self.segments.sample)[0]
        return trees if int(trees[-1]) else samples

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Two micro-batches of about half the slots each, with groups whole.

        The second is empty if there are fewer than two parts. Padded rows keep their width; packed
        rows are as wide as needed. What samples of both halves share is in both.
        """
        part, count = self.parts, int(self.parts.max(initial=-1)) + 1
        if count < 2:
            return self, self._of(np.zeros(len(part), bool))
        # Divide where the larger half is the smallest: by rows if padded, else by slots.
        size = rounded_up(self.segments.length, self.alignment)
        done = np.cumsum(sum_by(part, np.ones(len(part)) if self._padded else size, count))[:-1]
        total = len(part) if self._padded else int(size.sum())
        first = part <= int(np.argmin(np.maximum(done, total - done)))
        return self._of(self._with_ancestors(first)), self._of(self._with_ancestors(~first))

    def _with_ancestors(self, chosen: BoolArray) -> BoolArray:
        """The own segments among `chosen`, and all that they see in front."""
        parent = self.segments.parent
        if parent is None:
            return chosen
        chosen = chosen & self.own
        level = chosen
        while level.any():
            above = np.unique(parent[level])
            level = np.zeros(len(chosen), bool)
            level[above[above >= 0]] = True
            chosen = chosen | level
        return chosen

    @property
    def _padded(self) -> bool:
        """Whether it has several rows of at most one segment each."""
        return self.rows > 1 and int(np.diff(self.row_offsets).max()) <= 1

    def _of(self, which: BoolArray) -> MicroBatch:
        """These segments, in the same kind of rows."""
        chosen = np.flatnonzero(which)
        count = len(chosen)
        if self._padded and count:
            return self._take(chosen, np.arange(count + 1), self.width)
        slots = int(rounded_up(self.segments.length[chosen], self.alignment).sum())
        unit = math.lcm(self.width_unit, self.alignment)
        return self._take(chosen, np.array([0, count]), max(rounded_up(slots, unit), unit))

    def _take(self, chosen: IntArray, row_offsets: IntArray, width: int) -> MicroBatch:
        """The segments at `chosen`, with their ancestors."""
        segments, user = self.segments.take(chosen), chosen
        if segments.parent is not None:
            # A segment that is shared is named after the first sample that uses it: as children
            # follow it, that is the next own segment.
            own = np.where(self.own[chosen], np.arange(len(chosen)), len(chosen))
            user = chosen[np.minimum.accumulate(own[::-1])[::-1]]
            above = np.searchsorted(chosen, segments.parent)
            segments = replace(
                segments,
                sample=self.segments.sample[user],
                parent=np.where(segments.parent < 0, segments.parent, above),
            )
        return replace(
            self,
            segments=segments,
            row_offsets=row_offsets,
            width=width,
            sample_lengths=self.sample_lengths[user],
            truncated_to=self.sample_ends[user],
            groups=None if self.groups is None else self.groups[user],
            exchange=None if self.exchange is None else self.exchange.take(chosen),
        )


def samples_of(micro_batches: Iterable[MicroBatch]) -> IntArray:
    """The ids of the samples in these micro-batches, ascending and unique."""
    none = np.empty(0, np.int64)
    return np.unique(np.concatenate([none, *(micro.segments.sample for micro in micro_batches)]))


_HASHED = 64  # segments and micro-batches that a hash looks at
_OFFSETS = ("row_offsets", "micro_offsets", "cell_offsets")
_OF_SAMPLES = ("lengths", "step_of", "groups")
_ARRAYS = (*_OF_SAMPLES, *_OFFSETS, "widths", "sample_ids", "prefix_order", "prefix_shared")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Segments in execution order, divided into rows, micro-batches and cells.

    Three nested offsets: row r holds segments `row_offsets[r]` up to `row_offsets[r + 1]`,
    micro-batch m holds rows `micro_offsets[m]` onwards, and the cell of (step, rank), number
    `step * ranks + rank`, holds micro-batches `cell_offsets[cell]` onwards. `widths` gives each
    micro-batch's width. `step_of` is the step that each sample is assigned to, -1 if it is dropped.
    `sample_ids` gives the id of each sample in a source, if samples were planned in another order.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> plan
    Plan(1 step, 1 rank, 2 samples, 1 micro-batch, fill 100%, imbalance 1.000)
    >>> plan.segments.length.tolist(), plan.widths.tolist()
    ([5, 3], [8])
    """

    recipe: Recipe
    lengths: IntArray
    step_of: IntArray
    segments: Segments
    row_offsets: IntArray
    micro_offsets: IntArray
    cell_offsets: IntArray
    widths: IntArray
    groups: IntArray | None = None
    columns: Mapping[str, IntArray] = field(default_factory=dict)
    sample_ids: IntArray | None = None
    prefix_order: IntArray | None = None
    """With `prefix_shared`: the `Prefixes` of the samples, if they were given."""
    prefix_shared: IntArray | None = None

    def __post_init__(self) -> None:
        # Arrays become read-only copies, unless they already are (see `frozen`).
        for name in _ARRAYS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, frozen(getattr(self, name)))
        columns = {name: frozen(column) for name, column in self.columns.items()}
        object.__setattr__(self, "columns", MappingProxyType(columns))

    # Shape -------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return self.recipe.topology.dp

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return (len(self.cell_offsets) - 1) // self.num_ranks

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of all steps and ranks, including empty ones."""
        return len(self.widths)

    def __len__(self) -> int:
        return self.num_steps

    @overload
    def __getitem__(self, at: SupportsIndex) -> list[list[MicroBatch]]: ...
    @overload
    def __getitem__(self, at: tuple[SupportsIndex, SupportsIndex]) -> list[MicroBatch]: ...
    def __getitem__(
        self, at: SupportsIndex | tuple[SupportsIndex, SupportsIndex]
    ) -> list[list[MicroBatch]] | list[MicroBatch]:
        """`plan[step, rank]`: the micro-batches of one rank, in execution order.

        `plan[step]` is the list of these for all ranks. `plan[-1]` is the last step.
        """
        indices = at if isinstance(at, tuple) else (at,)
        if len(indices) > 2:
            raise IndexError(f"expected plan[step] or plan[step, rank], got {len(indices)} indices")
        step, *rest = (operator.index(index) for index in indices)
        if not -self.num_steps <= step < self.num_steps:
            raise IndexError(
                f"step {step} is out of range: the plan has {counted(self.num_steps, 'step')}"
            )
        step %= self.num_steps
        if not rest:
            return self._cells(step, range(self.num_ranks))
        if not 0 <= rest[0] < self.num_ranks:
            raise IndexError(
                f"rank {rest[0]} is out of range: the plan has ranks 0 to {self.num_ranks - 1}"
            )
        return self._cells(step, rest)[0]

    def __iter__(self) -> Iterator[list[list[MicroBatch]]]:
        """The steps, each as `plan[step]`."""
        return (self[step] for step in range(self.num_steps))

    def _cells(self, step: int, ranks: Sequence[int]) -> list[list[MicroBatch]]:
        exchanges, first = self._exchanges(step, ranks), step * self.num_ranks
        ends = [self.cell_offsets[first + rank :][:2].tolist() for rank in ranks]
        return [[self._micro(micro, exchanges.get(micro)) for micro in range(*e)] for e in ends]

    def _micro(self, micro: int, exchange: Exchange | None) -> MicroBatch:
        rows = self.row_offsets[self.micro_offsets[micro] : self.micro_offsets[micro + 1] + 1]
        segments = self.segments.take(slice(int(rows[0]), int(rows[-1])))
        together = self.groups if self.recipe.groups == "micro_batch" else None
        return MicroBatch(
            segments,
            rows - rows[0],
            int(self.widths[micro]),
            self.lengths[segments.sample],
            self.recipe.topology.alignment,
            self.ends(segments.sample),
            None if together is None else together[segments.sample],
            self.recipe.width_unit,
            exchange,
        )

    def ends(self, samples: IntArray) -> IntArray:
        """Where each of `samples` ends in this plan: its length, also after truncation.

        A segment that ends earlier is one of several segments of its sample.
        """
        lengths = self.lengths[samples]
        limit = self.recipe.longest_segment if self.recipe.overflow == "truncate" else None
        return lengths if limit is None else np.minimum(lengths, limit)

    # Columns per micro-batch -------------------------------------------------------------------

    @property
    def segment_offsets(self) -> IntArray:
        """The first segment of each micro-batch, and the end of the last."""
        return self.row_offsets[self.micro_offsets]

    @property
    def rows(self) -> IntArray:
        """Rows of each micro-batch."""
        return np.diff(self.micro_offsets)

    @property
    def slots(self) -> IntArray:
        """Slots of each micro-batch: rows times width."""
        return self.rows * self.widths

    @property
    def tokens(self) -> IntArray:
        """Real tokens of each micro-batch."""
        return self.sum_by_micro_batch(self.segments.length)

    @property
    def costs(self) -> FloatArray:
        """Modelled work of each micro-batch, including padding; an empty one costs its slots.

        See `micro_batch_costs` of the layouts.
        """
        recipe, owner = self.recipe, self.micro_batch_of_segment
        return recipe.layout.micro_batch_costs(
            recipe.cost, self.rows, self.widths, owner, self.aligned_lengths, self.segments.behind
        )

    @property
    def aligned_lengths(self) -> IntArray:
        """The slots of each segment in its row, without the padding at the end of the row."""
        return rounded_up(self.segments.length, self.recipe.topology.alignment)

    def sum_by_micro_batch(self, per_segment: IntArray) -> IntArray:
        """Sum a per-segment column over each micro-batch; an empty one gives 0."""
        return np.diff(offsets_of(per_segment)[self.segment_offsets])

    @property
    def cell_of_micro_batch(self) -> IntArray:
        """`step * ranks + rank` of each micro-batch."""
        return np.repeat(np.arange(len(self.cell_offsets) - 1), np.diff(self.cell_offsets))

    @property
    def micro_batch_of_segment(self) -> IntArray:
        """The micro-batch of each segment."""
        return np.repeat(np.arange(self.num_micro_batches), np.diff(self.segment_offsets))

    # Shared prefixes ---------------------------------------------------------------------------

    @property
    def own(self) -> BoolArray:
        """Which segments are a sample's own: all but those that others see in front."""
        return own_segments(self.parents, len(self.segments))

    @property
    def parents(self) -> IntArray | None:
        """The parent of each segment, counted from the first segment of the plan; -1 for none in
        its micro-batch. None if no segment has one there."""
        parent = self.segments.parent
        if parent is None or not self.segments.shares_slots:
            return None
        first = self.segment_offsets[:-1][self.micro_batch_of_segment]
        return np.where(parent < 0, -1, parent + first)

    @property
    def whole_segments(self) -> Segments:
        """The samples' own segments, each with the tokens that it sees in front of itself."""
        segments, parent = self.segments, self.segments.parent
        if parent is None or not segments.shares_slots:
            return segments
        behind = np.where(parent < 0, 0, segments.start)
        above = np.minimum(parent, -1)  # of parts that ranks share
        columns = segments.sample, segments.start - behind, segments.length + behind, above
        return Segments(*(column[self.own] for column in columns))

    @property
    def prefixes(self) -> Prefixes | None:
        """What the samples share at their start; None if it was not given."""
        if self.prefix_order is None or self.prefix_shared is None:
            return None
        return Prefixes(self.prefix_order, self.prefix_shared)

    # Samples shared between ranks ----------------------------------------------------------------

    @property
    def exchanged(self) -> tuple[IntArray, IntArray]:
        """(tokens sent, tokens received) of each micro-batch, if ranks share samples; else 0."""
        micro = self.micro_batch_of_segment
        source, target = self.segments.transfers(micro)
        sent, received = (
            sum_by(at, self.segments.length[source], self.num_micro_batches).astype(np.int64)
            for at in (micro[source], target)
        )
        return sent, received

    def _exchanges(self, step: int, ranks: Sequence[int]) -> dict[int, Exchange]:
        """The exchanges of these ranks in a step, by micro-batch, of waves that share samples."""
        if self.segments.parent is None:
            return {}
        cells = self.cell_offsets[step * self.num_ranks : (step + 1) * self.num_ranks + 1]
        offsets = self.segment_offsets[cells[0] : cells[-1] + 1]
        segments = self.segments.take(slice(int(offsets[0]), int(offsets[-1])))
        # Of each segment: its micro-batch, its rank, its wave.
        micro = np.repeat(np.arange(cells[0], cells[-1]), np.diff(offsets))
        rank = np.searchsorted(cells, micro, side="right") - 1
        wave, shared, exchanges = micro - cells[rank], segments.is_shared, {}
        for number in np.unique(wave[shared]).tolist():
            here = np.flatnonzero(shared & (wave == number))
            parts = SharedParts.of(segments.take(here), rank[here])
            lengths = self.ends(parts.samples)
            for each in ranks:
                at = int(cells[each]) + number
                first, last = (offsets[at - cells[0] :][:2] - offsets[0]).tolist()
                own = segments.take(slice(first, last))
                exchanges[at] = parts.exchange(each, self.num_ranks, own, lengths)
        return exchanges

    # Order of samples --------------------------------------------------------------------------

    @property
    def order(self) -> IntArray:
        """Forward permutation: the i-th segment to run is number `order[i]` in sample order.

        Sample order is by sample, then by start. Without splitting or dropping, `order[i]` is
        the sample that runs i-th. Shared prefixes are left out: only own segments are counted.
        """
        # The inverse of sorting by sample and start.
        own = slice(None) if self.segments.parent is None else self.own
        by_sample = np.lexsort((self.segments.start[own], self.segments.sample[own]))
        order = np.empty(len(by_sample), np.int64)
        order[by_sample] = np.arange(len(by_sample))
        return order

    def restore(self, values: ArrayLike) -> NDArray[Any]:
        """Put one value (or row) per segment, given in execution order, back in sample order.

        An execution order of [3, 0, 2, 1] with rows [30, 0, 20, 10] restores [0, 10, 20, 30].
        Where samples share prefixes, values are those of own segments: one per sample.
        """
        array, order = np.asarray(values), self.order
        if len(array) != len(order):
            raise InputError(
                f"restore got {len(array)} values but the plan has {len(order)} segments. "
                f"Pass one value per segment, in execution order."
            )
        restored = np.empty_like(array)
        restored[order] = array
        return restored

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[Recipe, dict[str, bytes]]]:
        """Pickle the recipe, and arrays as bytes: they are read without a copy, and read-only."""
        data = {name: array.tobytes() for name, array in self._arrays().items()}
        return Plan._of_bytes, (self.recipe, data)

    def __copy__(self) -> Plan:
        """A plan never changes, so it is its own copy."""
        return self

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    # Measures, identity, files -----------------------------------------------------------------

    def __repr__(self) -> str:
        """Sizes, fill and imbalance in one line; only sizes if the offsets do not nest.

        Floors are left out, because they take time to compute.
        """
        sizes = [  # these never fail, even of a damaged plan
            counted(max(self.num_steps, 0), "step"),
            counted(self.num_ranks, "rank"),
            counted(len(self.lengths), "sample"),
            counted(self.num_micro_batches, "micro-batch"),
        ]
        if attempt(lambda: "broken" if offsets_nest(self) else "whole") != "whole":
            return line("Plan", [*sizes, "offsets do not nest"])

        def imbalance() -> str:
            ideal = float(step_means(self).sum())
            return f"imbalance {step_times(self).sum() / ideal:.3f}" if ideal > 0 else ""

        def filled() -> str:
            return fill(self.tokens.sum(), (self.rows * self.widths.astype(np.float64)).sum())

        return line("Plan", [*sizes, attempt(filled), attempt(imbalance)])

    def __eq__(self, other: object) -> bool:
        """Whether both have the same recipe and the same arrays."""
        if not isinstance(other, Plan):
            return NotImplemented
        if self is other:
            return True
        mine, others = self._arrays(), other._arrays()
        if self.recipe != other.recipe or mine.keys() != others.keys():
            return False
        return all(np.array_equal(mine[name], others[name]) for name in mine)

    def __hash__(self) -> int:
        """A cheap hash of the recipe, the sizes and the first segments."""
        sizes = len(self.lengths), len(self.segments)
        columns = self.widths, self.segments.sample, self.segments.length
        return hash((self.recipe, sizes, *(column[:_HASHED].tobytes() for column in columns)))

    def stats(
        self, width: int | None = None, *, progress: measures.Progress | None = None
    ) -> dict[str, measures.Value]:
        """Padding, imbalance and distance from the bounds. See `core.measures`.

        `progress(done, total)` is called with the number of steps measured so far.
        """
        measured = measures.of_plan(self, width, progress)
        return {"cost": self.recipe.cost.description, **measured}

    def step_stats(self) -> list[dict[str, measures.Value]]:
        """The same measures for each step by itself."""
        return measures.of_steps(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan: equal plans, and only these, have equal fingerprints."""
        return hashlib.sha256(self._encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically."""
        plan_file.replace_file(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan. Raises `FileError` if the file is damaged, truncated or not a plan."""
        return cls.from_bytes(plan_file.read(path), path)

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes."""
        return plan_file.pack(self._encode())

    @classmethod
    def from_bytes(cls, data: bytes, name: str | os.PathLike[str] = "the plan") -> Plan:
        """Read a plan from the bytes of its file; `name` is what an error calls it."""
        recipe, arrays = plan_file.unpack(data, name)
        try:
            return cls._of_arrays(Recipe.from_dict(recipe), arrays)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise FileError(
                f"{os.fspath(name)} holds a plan that this version cannot read ({error}). Make the "
                f"plan again with this version."
            ) from None

    def _arrays(self) -> dict[str, IntArray]:
        """All arrays of the plan, by name, without those that are None."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        for name in ("sample", "start", "length", "parent"):
            arrays[name] = getattr(self.segments, name)
        arrays |= {f"column:{name}": column for name, column in self.columns.items()}
        return {name: array for name, array in arrays.items() if array is not None}

    def _encode(self) -> bytes:
        return plan_file.encode(self.recipe.to_dict(), self._arrays())

    @classmethod
    def _of_bytes(cls, recipe: Recipe, data: dict[str, bytes]) -> Plan:
        arrays = {name: np.frombuffer(array, np.int64) for name, array in data.items()}
        return cls._of_arrays(recipe, arrays)

    @classmethod
    def _of_arrays(cls, recipe: Recipe, arrays: dict[str, IntArray]) -> Plan:
        """The inverse of `_arrays`."""
        columns = {
            name.removeprefix("column:"): arrays.pop(name)
            for name in list(arrays)
            if name.startswith("column:")
        }
        parent = arrays.pop("parent", None)
        segments = Segments(arrays.pop("sample"), arrays.pop("start"), arrays.pop("length"), parent)
        return cls(recipe=recipe, segments=segments, columns=columns, **arrays)


def samples_by_step(plan: Plan) -> Ragged:
    """The samples of each step, ascending. A dropped sample belongs to the step that follows it,
    or else to the last.

    steps [0, -1, 1, -1] of four samples -> samples [[0], [1, 2, 3]]
    """
    kept = np.flatnonzero(plan.step_of >= 0)
    if not len(kept):
        return Ragged.group(np.empty(0, np.int64), plan.num_steps)
    # Of each sample, the next one that is kept (itself, if it is), and the step of that one.
    following = np.searchsorted(kept, np.arange(len(plan.step_of)))
    owner = plan.step_of[kept[np.minimum(following, len(kept) - 1)]]
    owner[following == len(kept)] = plan.num_steps - 1
    return Ragged.group(owner, plan.num_steps)


def step_plan(plan: Plan, step: int, samples: IntArray) -> Plan:
    """Step `step` as a plan of its own, whose sample i is number `samples[i]` of `plan`.

    `samples` are those of `samples_by_step`.
    """
    # The offsets of one step at each level, moved to start at 0.
    cells = plan.cell_offsets[step * plan.num_ranks : (step + 1) * plan.num_ranks + 1]
    micros = plan.micro_offsets[cells[0] : cells[-1] + 1]
    rows = plan.row_offsets[micros[0] : micros[-1] + 1]
    segments = plan.segments.take(slice(int(rows[0]), int(rows[-1])))
    prefixes = None if plan.prefixes is None else plan.prefixes.take(samples)
    return Plan(
        recipe=plan.recipe,
        lengths=plan.lengths[samples],
        step_of=np.minimum(plan.step_of[samples], 0),
        segments=replace(segments, sample=np.searchsorted(samples, segments.sample)),
        row_offsets=rows - rows[0],
        micro_offsets=micros - micros[0],
        cell_offsets=cells - cells[0],
        widths=plan.widths[cells[0] : cells[-1]],
        groups=None if plan.groups is None else plan.groups[samples],
        columns={name: column[samples] for name, column in plan.columns.items()},
        prefix_order=None if prefixes is None else prefixes.order,
        prefix_shared=None if prefixes is None else prefixes.shared,
    )


def on_fewer_ranks(plan: Plan, ranks: int) -> Plan:
    """The same micro-batches of a plan of one step on `ranks` ranks, which divide the plan's.

    A wave becomes several: 1 wave of 4 ranks is 2 waves of 2 ranks.
    """
    if ranks == plan.num_ranks:
        return plan
    refuse_shared(plan, ranks)
    # 2 micro-batches on 4 ranks: 0 1 | 2 3 | 4 5 | 6 7, as waves 0 2 4 6 | 1 3 5 7; on 2 ranks:
    # 0 4 1 5 | 2 6 3 7
    numbers = np.arange(plan.num_micro_batches).reshape(plan.num_ranks, -1)
    order = numbers.T.reshape(-1, ranks).T.ravel()
    # Rows and segments go with their micro-batches.
    rows = plan.rows[order]
    row = ranges_of(plan.micro_offsets[order], rows)
    segments = np.diff(plan.row_offsets)[row]  # in each row
    return replace(
        plan,
        recipe=recipe_on_fewer_ranks(plan.recipe, ranks),
        segments=plan.segments.take(ranges_of(plan.row_offsets[row], segments)),
        row_offsets=offsets_of(segments),
        micro_offsets=offsets_of(rows),
        cell_offsets=np.arange(ranks + 1) * (len(order) // ranks),
        widths=plan.widths[order],
    )


def on_context_ranks(plan: Plan) -> Plan:
    """The same micro-batches, each divided between the context-parallel ranks of its rank.

    Each of cp ranks runs two of 2 cp equal parts of every sample, one from either side, so that
    causal work is even: 9 tokens on 2 ranks, parts of 2, 2, 2 and 3 -> parts 0, 3 and 1, 2. Rank
    r of these is rank d * cp + r of all.
    """
    recipe, segments, cp = plan.recipe, plan.segments, plan.recipe.topology.cp
    if segments.parent is not None or (segments.length < plan.ends(segments.sample)).any():
        raise PlanError(
            "context-parallel ranks divide whole samples, but this plan has split ones or prefixes "
            "that samples share. Set overflow to 'truncate' or 'drop', plan without prefixes, or "
            "set topology.cp to 1."
        )
    cell, micros = plan.cell_of_micro_batch, np.diff(plan.cell_offsets)
    rank = np.arange(cp)
    # (micro-batches, cp): those of rank 0 of a cell, then those of rank 1, ...
    number = np.arange(plan.num_micro_batches) + (cp - 1) * plan.cell_offsets[cell]
    number = number[:, None] + rank * micros[cell][:, None]
    # (segments, cp, 2): the parts of each rank
    part = np.stack((rank, 2 * cp - 1 - rank), axis=1)
    start, end = (segments.length[:, None, None] * (part + at) // (2 * cp) for at in (0, 1))
    owner = np.broadcast_to(number[plan.micro_batch_of_segment][..., None], start.shape)
    sample = np.broadcast_to(segments.sample[:, None, None], start.shape)
    real = end > start
    order = np.argsort(owner[real], kind="stable")
    sample, start, end, owner = (x[real][order] for x in (sample, start, end, owner))
    widths = np.empty(number.size, np.int64)
    widths[number] = (plan.slots // cp)[:, None]
    longest = recipe.longest_segment or int(plan.lengths.max(initial=1))
    return replace(
        plan,
        recipe=Recipe(
            layout=Packed(max_tokens=longest),
            topology=Topology(dp=plan.num_ranks * cp),
            steps=recipe.steps,
            overflow=recipe.overflow,
            groups=recipe.groups,
            cost=recipe.cost,
        ),
        segments=Segments(sample, start, end - start, np.where(start > 0, ELSEWHERE, -1)),
        row_offsets=offsets_of(np.bincount(owner, minlength=number.size)),
        micro_offsets=np.arange(number.size + 1),
        cell_offsets=offsets_of(np.repeat(micros, cp)),
        widths=widths,
    )


def refuse_shared(plan: Plan, ranks: int) -> None:
    """Raise if a plan cannot run on another number of ranks, because its ranks share samples."""
    if ranks != plan.num_ranks and plan.segments.is_shared.any():
        raise PlanError(
            f"the plan shares samples between its {plan.num_ranks} ranks, so it cannot run on "
            f"{ranks}. Run it on {plan.num_ranks} ranks, or plan for {ranks}."
        )


def join_plans(plans: Sequence[Plan], sample_ids: Sequence[IntArray]) -> Plan:
    """One plan that runs `plans` one after the other and numbers samples by their ids.

    Sample i of plan k has the id `sample_ids[k][i]`; see `step.plan` and `step.sample_ids` of a
    planned stream. All ids together must be 0 ... n-1, each once, as in a whole epoch.
    """
    if not plans:
        raise InputError("expected at least one plan, got none.")
    if any(plan.recipe != plans[0].recipe for plan in plans):
        raise InputError(
            "plans of different recipes cannot be joined. Join the steps of one stream."
        )
    ids = np.concatenate(sample_ids)
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
        raise InputError(
            f"the ids of the {len(ids)} samples are not 0 to {len(ids) - 1}, each once. Join all "
            f"steps of one epoch."
        )
    # Steps are counted on, samples have their ids, and offsets are joined as differences:
    # [0, 2, 3] and [0, 4] -> [2, 1, 4] -> [0, 2, 3, 7]
    parts, before = [], 0
    for plan, names in zip(plans, sample_ids, strict=True):
        arrays = plan._arrays()
        if any(each.segments.parent is not None for each in plans):
            arrays.setdefault("parent", np.full(len(plan.segments), -1))
        if any(each.prefixes is not None for each in plans):
            alone = Prefixes(np.arange(len(names)), np.zeros(len(names), np.int64))
            prefixes = plan.prefixes or alone
            arrays |= {"prefix_order": names[prefixes.order], "prefix_shared": prefixes.shared}
        arrays["sample"] = names[plan.segments.sample]
        arrays["step_of"] = np.where(plan.step_of < 0, -1, plan.step_of + before)
        parts.append(arrays | {name: np.diff(arrays[name]) for name in _OFFSETS})
        before += plan.num_steps
    joined = {name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]}
    joined |= {name: offsets_of(joined[name]) for name in _OFFSETS}
    joined.pop("sample_ids", None)
    # Columns of samples are put in the order of the ids.
    by_id = np.argsort(ids)
    for name in joined:
        if name in _OF_SAMPLES or name.startswith("column:"):
            joined[name] = joined[name][by_id]
    return Plan._of_arrays(plans[0].recipe, joined)
