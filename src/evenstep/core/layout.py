"""Layouts: how segments lie in the rows of a micro-batch, and all arithmetic that follows from it.

Padded    one segment per row        [a a a .]
                                     [b b . .]
Packed    segments end to end        [a a a b b c .]

Planning, floors, checks, stats and pools ask a layout. Where the two differ, `BaseLayout` answers
for both, by `segments_per_row`. Outside of this file, which of the two it is matters only where
planning chooses between sorted cuts and packing, and in the bounds on padded rows. `place` says
where segments lie in rows of either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import (
    FloatArray,
    IntArray,
    Ragged,
    Whole,
    offsets_of,
    rounded_up,
    sum_by,
)
from evenstep.core.text import MOST, one_of, whole_field
from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.core.cost import Cost
    from evenstep.core.recipe import Recipe

Entry = TypeVar("Entry")
Cut: TypeAlias = Literal["optimal", "greedy"]
PackerName: TypeAlias = Literal[
    "concatenative",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "best_fit_decreasing",
    "optimal",
]
"""The names in `PACKERS` of `planning.packers`."""
PACKER_NAMES: tuple[PackerName, ...] = get_args(PackerName)
Packer: TypeAlias = Callable[[IntArray, int, int], Ragged]
"""(lengths, capacity, seed) -> the items of each bin. Pure."""


@dataclass(frozen=True, kw_only=True)  # without slots, to keep what is computed once
class BaseLayout:
    """Base of the layouts: the bounds of a micro-batch. All given bounds hold.

    max_tokens  the most slots: rows times width, after rounding and alignment
    samples     the most segments
    round_to    widths are multiples of this
    pad_to      the width of every row

    A layout forms *packs*, which planning fills one by one: the rows of a packed micro-batch, or
    all rows of a padded one. What adds up over the segments of a pack has a share of its own:
    `slots`, `samples`, `cost` and `columns.NAME`.
    """

    max_tokens: int | None = None
    samples: int | None = None
    round_to: int = 1
    pad_to: int | None = None

    segments_per_row: ClassVar[int | None]
    """The most segments in a row; None if unbounded."""

    def check_bounds(self, kind: str, *needed: str) -> None:
        """Raise if a bound is not an integer, bounds contradict each other, or none of those that
        are needed is given."""
        whole_field(self, "layout.round_to")
        for name in ("max_tokens", "samples", "pad_to"):
            whole_field(self, f"layout.{name}", optional=True)
        if self.pad_to is not None and self.pad_to % self.round_to:
            raise ConfigError(
                f"layout.pad_to must be a multiple of layout.round_to {self.round_to}, "
                f"got {self.pad_to}."
            )
        least = self.least_slots
        if self.max_tokens is not None and least > self.max_tokens:
            raise ConfigError(
                f"layout.max_tokens is {self.max_tokens}, but every {kind} micro-batch has at "
                f"least {least} slots. Raise max_tokens, or lower pad_to, rows or samples."
            )
        if all(getattr(self, name) is None for name in needed):
            *names, last = (f"layout.{name}" for name in needed)
            raise ConfigError(
                f"layout.max_tokens is missing: a {kind} layout needs {', '.join(names)} or {last}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    # Shapes: rows, widths and slots of a micro-batch.

    @cached_property
    def _fixed_rows(self) -> int | None:
        """The rows of every micro-batch, empty ones too; None if they depend on its segments."""
        if self.segments_per_row is None:
            return self.packs_per_micro_batch
        return None if self.pad_to is None else self.samples

    @cached_property
    def packs_per_micro_batch(self) -> int:
        """How many separately filled packs form a micro-batch and share its limits."""
        return 1

    @cached_property
    def static(self) -> bool:
        """Whether every micro-batch has one shape."""
        return self.pad_to is not None and self._fixed_rows is not None

    @cached_property
    def least_slots(self) -> int:
        """The slots of an empty micro-batch if the layout fixes them; else those of one slot."""
        return (self._fixed_rows or 1) * (self.pad_to or 1)

    @cached_property
    def budget(self) -> int | None:
        """The most slots of a micro-batch, given or implied; None if unbounded."""
        return self.least_slots if self.static else self.max_tokens

    def row_counts(self, segments: Whole) -> Whole:
        """The rows of micro-batches that hold this many segments: at least one."""
        if self._fixed_rows is not None:
            return segments * 0 + self._fixed_rows
        empty: Whole = segments == 0
        return segments + empty

    def widths(self, used: Whole, unit: int) -> Whole:
        """The widths of micro-batches whose fullest row uses `used` slots.

        `used` may be an int or an array; an empty row is one unit wide.
        """
        if self.pad_to is not None:
            return used * 0 + self.pad_to
        return rounded_up(used + (used == 0), unit)

    def rows_of(self, packs: list[list[Entry]]) -> list[list[Entry]]:
        """The entries of each pack -> those of each row: a packed row is a pack, a padded one an
        entry."""
        if self.segments_per_row is None:
            return packs
        return [[entry] for pack in packs for entry in pack]

    def row_numbers(self, key: IntArray, counts: IntArray) -> IntArray:
        """The row of each segment in its micro-batch: its key if packed, the next if padded.

        Segments are sorted by micro-batch, then by `key`; each micro-batch holds `counts`. Padded:
        counts [2, 3] -> [0, 1, 0, 1, 2].
        """
        if self.segments_per_row is None:
            return key
        return np.arange(len(key)) - np.repeat(offsets_of(counts)[:-1], counts)

    # Costs and limits. `rows` and `widths` are those of micro-batches. Of each segment, `owner` is
    # its micro-batch, `aligned` its aligned length, and `behind` the tokens that it sees in front
    # of itself: `Segments.behind`.

    def micro_batch_costs(
        self,
        cost: Cost,
        rows: IntArray,
        widths: IntArray,
        owner: IntArray,
        aligned: IntArray,
        behind: IntArray | None = None,
    ) -> FloatArray:
        """The modelled work of micro-batches, padding included.

        Padded rows are computed at their full width, empty ones too. Packed segments attend within
        themselves; everything else costs every slot.
        """
        if self.segments_per_row is not None:
            return rows * cost.of_lengths(widths) + cost.per_micro_batch
        length = aligned.astype(np.float64)  # a square may not fit 64 bits
        seen = length if behind is None else length + 2.0 * behind
        pairs = sum_by(owner, length * seen, len(rows))
        count = np.bincount(owner, minlength=len(rows))
        return (
            cost.per_token * (rows * widths)
            + cost.per_pair * pairs
            + cost.per_segment * count
            + cost.per_micro_batch
        )

    def segment_costs(
        self,
        recipe: Recipe,
        aligned: IntArray,
        behind: IntArray | None = None,
        widths: IntArray | None = None,
    ) -> FloatArray:
        """What each segment counts against `limits.cost`: packed segments at their aligned
        lengths, padded rows at their own width, or at `widths`, those of their micro-batches."""
        if self.segments_per_row is not None:
            aligned = self.widths(aligned, recipe.width_unit) if widths is None else widths
        return recipe.cost.of_lengths(aligned, behind)

    def moving_costs(
        self, recipe: Recipe, aligned: IntArray, behind: IntArray | None = None
    ) -> FloatArray:
        """The work of each segment that goes with it to its micro-batch.

        Where all micro-batches have one shape, their slots cost the same wherever segments are.
        """
        cost = recipe.cost
        if (self.static or recipe.topology.equal_widths) and cost.per_pair + cost.per_segment > 0:
            cost = replace(cost, per_token=0.0)
        return cost.of_lengths(aligned, behind)

    def cost_share(self, recipe: Recipe) -> float:
        """What the segments of one pack may cost together."""
        if recipe.limits.cost is None:
            return math.inf
        return (recipe.limits.cost - recipe.cost.per_micro_batch) / self.packs_per_micro_batch

    def shares(
        self,
        recipe: Recipe,
        aligned: IntArray,
        columns: Mapping[str, IntArray],
        behind: IntArray | None = None,
    ) -> dict[str, tuple[float, NDArray[Any]]]:
        """(what one pack may hold, what each segment takes) of all that adds up, by name.

        `columns` are per segment.
        """
        packs, shares = self.packs_per_micro_batch, dict[str, tuple[float, NDArray[Any]]]()
        if self.samples is not None:
            shares["samples"] = self.samples // packs, np.ones(len(aligned), np.int64)
        if recipe.limits.cost is not None:
            costs = self.segment_costs(recipe, aligned, behind)
            shares["cost"] = self.cost_share(recipe), costs
        for name, most in recipe.limits.columns.items():
            if name in columns:
                shares[f"columns.{name}"] = most // packs, columns[name]
        if self.segments_per_row is None and recipe.capacity is not None:
            shares["slots"] = recipe.capacity, aligned  # add up in packed rows alone
        return shares

    def measured(self, recipe: Recipe) -> frozenset[str]:
        """The shares that planning has in the size of a pack; the others are further limits.

        Aligned slots add up in packed rows; without a bound on them, samples are the size. Slots do
        not add up over padded rows of different lengths: `rows_that_fit` covers their shares.
        """
        if self.segments_per_row is not None:
            return frozenset({"samples", "cost"})
        return frozenset({"samples" if recipe.capacity is None else "slots"})

    @property
    def pool_strategies(self) -> tuple[str, ...]:
        """The ways to fill a packed row, or to choose padded rows, from a pool; the default first.

        `fullest` needs a budget of slots to fill.
        """
        if self.segments_per_row is None:
            return ("subset_sum", "greedy")
        if self.budget is None:
            return ("prefer_closest", "prefer_first", "fullest")
        return ("fullest", "prefer_closest", "prefer_first")

    def room(self, recipe: Recipe) -> tuple[int | None, int]:
        """(the most slots of a pack, the multiple that a pool rounds widths to).

        Aligned sizes add up without rounding in packed rows.
        """
        if self.segments_per_row is None:
            return recipe.capacity, 1
        return self.budget, self.pad_to or recipe.width_unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded(BaseLayout):
    """One segment per row, padded to the longest of its micro-batch.

    cut  where sorted samples are divided; None is `optimal`

    `Padded(max_tokens=8192)` is dynamic batching: rows of similar length share a micro-batch.
    `Padded(samples=8)` bounds rows instead of slots; with `balance="none"` it is what most training
    scripts do. `Padded(samples=8, pad_to=2048)` is static: eight rows, missing ones empty.

    `cut` says where sorted samples are divided: `optimal` (the default: the least modelled time of
    the slowest rank or wave) or `greedy` (the same cuts on every rank, as in NeMo-RL and ROLL).

    >>> from evenstep import Recipe, make_plan
    >>> make_plan([5, 3, 2], Recipe(layout=Padded(samples=2), balance="none")).widths.tolist()
    [5, 2]
    """

    kind: Literal["padded"] = "padded"
    cut: Cut | None = None

    segments_per_row: ClassVar[int | None] = 1
    packer: ClassVar[None] = None
    """None: sorted rows are cut, not packed."""

    def __post_init__(self) -> None:
        one_of("layout.kind", self.kind, Literal["padded"])
        self.check_bounds("padded", "max_tokens", "samples")
        if self.cut is not None:
            one_of("layout.cut", self.cut, Cut)

    @property
    def options(self) -> dict[str, object]:
        """The cut, if one is given, by its path. Only planning uses it."""
        return {} if self.cut is None else {"layout.cut": self.cut}

    def check_options(self, recipe: Recipe) -> None:
        """Raise if `cut` has no effect, or if it leaves the balance without effect."""
        if self.cut is not None and recipe.topology.equal_widths:
            raise ConfigError(
                f"layout.cut={self.cut!r} has no effect, because this pipeline needs equal widths. "
                f"Leave it out, or set topology.variable_seq_lengths."
            )
        if self.cut == "greedy" and recipe.balance not in ("refined", "stride", "none"):
            raise ConfigError(
                f"layout.cut='greedy' deals sorted samples to ranks in turn, so "
                f"balance={recipe.balance!r} has no effect. Leave one of them out."
            )

    def step_widths(self, recipe: Recipe, aligned: IntArray) -> IntArray:
        """The least width of each segment's row; the widest of its step if that has one width."""
        widths = self.widths(aligned, recipe.width_unit)
        if recipe.topology.equal_widths:
            widest = widths.max(axis=-1, initial=0, keepdims=True)
            return np.broadcast_to(widest, widths.shape)
        return widths

    def rows_that_fit(self, recipe: Recipe, widths: IntArray) -> IntArray:
        """How many rows of each width a micro-batch holds, at least one."""
        most = np.full(widths.shape, self.samples or MOST, np.int64)
        if self.max_tokens is not None:
            most = np.minimum(most, self.max_tokens // widths)
        if recipe.limits.cost is not None:
            affordable = self.cost_share(recipe) / recipe.cost.of_lengths(widths) + 1e-9
            most = np.minimum(most, affordable).astype(np.int64)  # a limit may exceed 64 bits
        return np.maximum(most, 1)

    def pack_bounds(self, recipe: Recipe, widest: IntArray) -> tuple[int | None, IntArray]:
        """(None, as slots do not add up; the most segments of a pack with each unit).

        `widest` is the longest aligned segment of each unit.
        """
        return None, self.rows_that_fit(recipe, self.widths(widest, recipe.width_unit))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed(BaseLayout):
    """Segments end to end in one row, or in `rows` static rows of width `pad_to`.

    rows    packed rows of a micro-batch; more than one need `pad_to`
    packer  what forms packs: the name of a packer, or a function; None: the planner

    `Packed(max_tokens=8192)` packs to a budget, `Packed(samples=2)` packs at most two samples per
    micro-batch, `Packed(rows=4, pad_to=4096)` has one shape: limits and `samples` are shared evenly
    between its rows, and no segment crosses a row.

    With `packer=None` the planner forms packs for fill and balance together; with a balance other
    than `refined` or `none` it uses best fit. With a packer's name, or a function (lengths,
    capacity, seed) -> `Ragged`, the planner keeps the packer's bins and divides the largest where
    ranks, the pipeline or `steps.micro_batches` need more. A packer gets aligned lengths, with a
    group as one item, and no limit but the slots.

    >>> from evenstep import Recipe, make_plan
    >>> make_plan([5, 3, 2], Recipe(layout=Packed(max_tokens=8))).widths.tolist()
    [5, 5]
    """

    kind: Literal["packed"] = "packed"
    rows: int = 1
    packer: str | Packer | None = None

    segments_per_row: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        one_of("layout.kind", self.kind, Literal["packed"])
        if self.packer is not None:
            _check_packer(self.packer)
        whole_field(self, "layout.rows")
        self.check_bounds("packed", "max_tokens", "samples", "pad_to")
        if self.rows > 1 and self.pad_to is None:
            raise ConfigError(f"layout.rows={self.rows} needs a fixed width. Set layout.pad_to.")
        if self.samples is not None and self.samples % self.rows:
            raise ConfigError(
                f"layout.samples must be a multiple of layout.rows, {self.rows}, because rows "
                f"share it evenly, got {self.samples}. Use "
                f"{rounded_up(self.samples, self.rows)}."
            )
        if self.packer is not None and self.samples is not None:
            raise ConfigError(
                "layout.packer and layout.samples cannot be combined: a packer gets only lengths. "
                "Leave one of them out."
            )

    @property
    def options(self) -> dict[str, object]:
        """The packer, if one is given, by its path. Only planning uses it."""
        return {} if self.packer is None else {"layout.packer": self.packer_name}

    def check_options(self, recipe: Recipe) -> None:
        """Raise if there is a packer and a limit that it cannot keep."""
        if self.packer is None:
            return
        limits = [*(["cost"] if recipe.limits.cost is not None else []), *recipe.limits.columns]
        if limits:
            raise ConfigError(
                f"layout.packer and the limit on {limits[0]} cannot be combined: a packer gets "
                f"only lengths. Leave one of them out."
            )

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal; packers are compared by `packer_name`."""
        return isinstance(other, Packed) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.to_dict().items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a function is written as `module:function`."""
        return {**asdict(self), "packer": self.packer_name}

    @property
    def packer_name(self) -> str | None:
        """The packer in files: its name, or `module:function`."""
        return self.packer if isinstance(self.packer, str | None) else _path_of(self.packer)

    def padded(self) -> Padded:
        """The padded layout that keeps the same bounds."""
        if self.rows > 1:  # as many rows fit; `samples` is never less
            return Padded(max_tokens=self.budget, round_to=self.round_to, pad_to=self.pad_to)
        return Padded(max_tokens=self.budget, samples=self.samples, round_to=self.round_to)

    @cached_property
    def packs_per_micro_batch(self) -> int:
        """Each row is a pack."""
        return self.rows

    def pack_bounds(self, recipe: Recipe, widest: IntArray) -> tuple[int | None, IntArray]:
        """(the slots of a row; its share of the samples, for each unit)."""
        most = MOST if self.samples is None else self.samples // self.rows
        return recipe.capacity, np.full(len(widest), most)


Layout: TypeAlias = Padded | Packed
LAYOUTS: dict[str, type[Padded] | type[Packed]] = {"padded": Padded, "packed": Packed}


def _check_packer(packer: Any) -> None:
    """Raise unless `packer` is a known name or a function that a file can name."""
    if isinstance(packer, str):
        if ":" not in packer:  # else a function's name, read from a file
            one_of("layout.packer", packer, PackerName)
    elif not callable(packer):
        raise ConfigError(
            f"layout.packer must be a name or a function (lengths, capacity, seed) -> Ragged, got "
            f"{packer!r}."
        )
    elif "<" in _path_of(packer) or not isfunction(packer):
        raise ConfigError(
            f"layout.packer must be a function that a module defines, so that files can name it, "
            f"got {_path_of(packer)}."
        )


def _path_of(packer: Any) -> str:
    """`module:function`."""
    module = getattr(packer, "__module__", None) or "<unknown>"
    return f"{module}:{getattr(packer, '__qualname__', f'<{type(packer).__name__}>')}"


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Tiles that cover all rows * width slots: one per segment with its alignment, and one for the
    padding at the end of each row.

    Tile i starts at `offsets[i]`, its first `real[i]` slots hold tokens (0 for padding), and it
    is segment `segment[i]` (-1 for padding).
    """

    offsets: IntArray
    real: IntArray
    segment: IntArray

    @property
    def slots(self) -> IntArray:
        """The slots of each tile, padding included."""
        return np.diff(self.offsets)


def place(lengths: IntArray, row_offsets: IntArray, width: int, alignment: int) -> Placement:
    """Put segments end to end into their rows, each rounded up to the alignment.

    lengths [3, 2] in one row of 8 -> offsets [0, 3, 5, 8], real [3, 2, 0], segment [0, 1, -1]
    """
    slots = lengths if alignment == 1 else rounded_up(lengths, alignment)
    number = np.arange(len(lengths))
    # One row is the common case: at most one tile of padding, at its end.
    if len(row_offsets) == 2:
        tail = width - int(slots.sum())
        if tail:
            slots = np.concatenate((slots, (tail,)))
            lengths, number = np.concatenate((lengths, (0,))), np.concatenate((number, (-1,)))
    else:
        # Several rows: a tile of padding after the last segment of each row that is not full.
        used = np.diff(offsets_of(slots)[row_offsets])
        short = used < width
        at = row_offsets[1:][short]
        slots = np.insert(slots, at, (width - used)[short])
        lengths, number = np.insert(lengths, at, 0), np.insert(number, at, -1)
    return Placement(offsets_of(slots), lengths, number)
