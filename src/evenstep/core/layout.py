"""Layouts: how segments lie in the rows of a micro-batch, and the arithmetic that follows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import isfunction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from evenstep.core.bounds import makespans, packed_times, row_bound, second_times
from evenstep.core.ragged import (
    FloatArray,
    IntArray,
    Ragged,
    divided_up,
    offsets_of,
    rounded_up,
    sum_by,
)
from evenstep.core.text import MOST, one_of, whole_field
from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.core.bounds import Loads
    from evenstep.core.cost import Cost
    from evenstep.core.recipe import Recipe


# -------------------------------------------------------------------------------------------------
# Frame: the bounds of a micro-batch, and the arithmetic that both layouts share.
# -------------------------------------------------------------------------------------------------

Whole = TypeVar("Whole", int, NDArray[np.int64])
Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLayout(ABC):
    """Base of the layouts: the bounds of a micro-batch. All given bounds hold.

    max_tokens  the most slots: rows times width, after rounding and alignment
    samples     the most segments
    round_to    widths are multiples of this
    pad_to      the width of every row
    """

    max_tokens: int | None = None
    samples: int | None = None
    round_to: int = 1
    pad_to: int | None = None

    def check_bounds(self, kind: str) -> None:
        """Raise if a bound is not an integer or bounds contradict each other."""
        whole_field(self, "layout.round_to")
        for name in ("max_tokens", "samples", "pad_to"):
            if getattr(self, name) is not None:
                whole_field(self, f"layout.{name}")
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

    @property
    @abstractmethod
    def options(self) -> dict[str, object]:
        """The options given in addition to the bounds, by path. Only planning uses them."""

    @abstractmethod
    def check_options(self, recipe: Recipe) -> None:
        """Raise if an option has no effect in this recipe."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    # Shapes --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def static(self) -> bool:
        """Whether every micro-batch has one shape."""

    @property
    @abstractmethod
    def least_slots(self) -> int:
        """The slots of an empty micro-batch if the layout fixes them, else 1."""

    @property
    @abstractmethod
    def budget(self) -> int | None:
        """The most slots of a micro-batch, given or implied; None if unbounded."""

    @property
    @abstractmethod
    def packs_per_micro_batch(self) -> int:
        """How many separately filled packs form a micro-batch and share its limits."""

    @property
    @abstractmethod
    def segments_per_row(self) -> int | None:
        """The most segments in a row; None if unbounded."""

    @abstractmethod
    def row_counts(self, held: Whole) -> Whole:
        """The rows of micro-batches that hold this many segments."""

    @abstractmethod
    def rows_of(self, packs: list[list[Entry]]) -> list[list[Entry]]:
        """The entries of each pack -> the entries of each row."""

    @abstractmethod
    def row_numbers(self, key: IntArray, held: IntArray) -> IntArray:
        """The row of each segment in its micro-batch.

        Segments are sorted by micro-batch, then by `key`; `held` is their number in each
        micro-batch.
        """

    def widths(self, used: Whole, unit: int) -> Whole:
        """The widths of micro-batches whose fullest row uses `used` slots.

        `used` may be an int or an array; an empty row is one unit wide.
        """
        if self.pad_to is not None:
            return used * 0 + self.pad_to
        return rounded_up(used + (used == 0), unit)

    def capacity(self, recipe: Recipe) -> int | None:
        """The slots of one row; None if unbounded.

        max_tokens 100 with widths in multiples of 16 gives 96.
        """
        most = self.max_tokens if self.pad_to is None else self.pad_to
        return None if most is None else most // recipe.width_unit * recipe.width_unit

    # Costs ---------------------------------------------------------------------------------------

    @abstractmethod
    def segment_costs(self, recipe: Recipe, aligned: IntArray) -> FloatArray:
        """What each segment counts against `limits.cost`."""

    def moving_costs(self, recipe: Recipe, aligned: IntArray) -> FloatArray:
        """The work of each segment that goes with it to its micro-batch.

        Where all micro-batches have one shape, their slots cost the same wherever segments are.
        """
        cost = recipe.cost
        if (self.static or recipe.topology.equal_widths) and cost.per_pair + cost.per_segment > 0:
            cost = replace(cost, per_token=0.0)
        return cost.of_lengths(aligned)

    @abstractmethod
    def micro_batch_costs(
        self, cost: Cost, rows: IntArray, widths: IntArray, owner: IntArray, aligned: IntArray
    ) -> FloatArray:
        """The modelled work of micro-batches, including padding.

        `owner` is the micro-batch of each segment, `aligned` its aligned length.
        """

    @abstractmethod
    def limited_costs(
        self, cost: Cost, rows: IntArray, widths: IntArray, owner: IntArray, aligned: IntArray
    ) -> FloatArray:
        """What micro-batches count against `limits.cost`."""

    def cost_share(self, recipe: Recipe) -> float:
        """What the segments of one pack may cost together."""
        if recipe.limits.cost is None:
            return math.inf
        return (recipe.limits.cost - recipe.cost.per_micro_batch) / self.packs_per_micro_batch

    # Limits --------------------------------------------------------------------------------------

    @abstractmethod
    def shares(self, recipe: Recipe) -> dict[str, float]:
        """What one pack may hold of each quantity that adds up over segments.

        The keys are `slots`, `samples`, `cost` and `columns.NAME`.
        """

    @abstractmethod
    def measured(self, recipe: Recipe) -> frozenset[str]:
        """The shares that planning uses as the size of a pack; the others are further limits."""

    def taken(
        self, recipe: Recipe, aligned: IntArray, columns: Mapping[str, IntArray]
    ) -> dict[str, NDArray[Any]]:
        """What each segment takes of each share, by name; `columns` are per segment."""
        found: dict[str, NDArray[Any]] = {
            "slots": aligned,
            "samples": np.ones(len(aligned), np.int64),
            **{f"columns.{name}": column for name, column in columns.items()},
        }
        if recipe.limits.cost is not None:
            found["cost"] = self.segment_costs(recipe, aligned)
        return found

    def column_shares(self, recipe: Recipe) -> dict[str, float]:
        """What one pack may hold of each limited column."""
        packs = self.packs_per_micro_batch
        return {f"columns.{name}": most // packs for name, most in recipe.limits.columns.items()}

    def longest_segment(self, recipe: Recipe) -> int | None:
        """The longest segment that a micro-batch can hold; None if unbounded.

        max_tokens 100 at alignment 16 holds a segment of 96; a limit on cost may allow less.
        """
        unit, capacity = recipe.topology.alignment, self.capacity(recipe)
        if recipe.limits.cost is None:
            return None if capacity is None else capacity // unit * unit
        most = (MOST if capacity is None else capacity) // unit
        share = self.cost_share(recipe)
        # Cost grows with length: bisect for the longest segment within the limit.
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if float(self.segment_costs(recipe, np.array([middle * unit]))[0]) <= share:
                low = middle
            else:
                high = middle - 1
        return None if capacity is None and low == most else low * unit

    @abstractmethod
    def pack_bounds(self, recipe: Recipe, widest: IntArray) -> tuple[int | None, IntArray]:
        """(slots of a pack, or None if they do not add up; most segments of a pack with each unit).

        `widest` is the longest aligned segment of each unit.
        """

    # Pools ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def pool_strategies(self) -> tuple[str, ...]:
        """The strategies that select a micro-batch from a pool; the first is the default."""

    @abstractmethod
    def room(self, recipe: Recipe) -> tuple[int | None, int]:
        """(the most slots of one pack, the multiple that selection rounds widths to)."""

    # Floors --------------------------------------------------------------------------------------

    @abstractmethod
    def fewest_micro_batches(self, recipe: Recipe, aligned: IntArray, bins: int) -> int:
        """A lower bound on the micro-batches that hold these segments.

        `bins` is the bound on packs by everything that adds up.
        """

    @abstractmethod
    def least_times(
        self, recipe: Recipe, loads: Loads, per_rank: IntArray
    ) -> dict[str, FloatArray]:
        """Lower bounds on the modelled time of each step, by what they name.

        Each rank runs at least `per_rank` micro-batches. The floor is the largest bound.
        """

    @abstractmethod
    def least_second_times(self, recipe: Recipe, loads: Loads) -> FloatArray:
        """A lower bound on the time of each step's second work."""


# -------------------------------------------------------------------------------------------------
# Padded: one segment per row.
# -------------------------------------------------------------------------------------------------

Cut: TypeAlias = Literal["optimal", "greedy"]


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

    def __post_init__(self) -> None:
        one_of("layout.kind", self.kind, Literal["padded"])
        self.check_bounds("padded")
        if self.max_tokens is None and self.samples is None:
            raise ConfigError(
                "layout.max_tokens is missing: a padded layout needs layout.max_tokens or "
                "layout.samples."
            )
        if self.cut is not None:
            one_of("layout.cut", self.cut, Cut)

    @property
    def options(self) -> dict[str, object]:
        """The cut, if one is given."""
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

    @property
    def packer(self) -> None:
        """None: sorted rows are cut, not packed."""
        return None

    @property
    def static(self) -> bool:
        """Whether every micro-batch has one shape."""
        return self.samples is not None and self.pad_to is not None

    @property
    def least_slots(self) -> int:
        """The slots of an empty micro-batch: all rows if static, else one row."""
        rows = self.samples if self.static and self.samples is not None else 1
        return rows * (self.pad_to or 1)

    @property
    def budget(self) -> int | None:
        """The most slots of a micro-batch."""
        if self.samples is None or self.pad_to is None:
            return self.max_tokens
        return self.samples * self.pad_to

    @property
    def packs_per_micro_batch(self) -> int:
        """One: all rows are chosen together."""
        return 1

    @property
    def segments_per_row(self) -> int:
        """One."""
        return 1

    def row_counts(self, held: Whole) -> Whole:
        """One row per segment; one row if there is no segment."""
        if self.static and self.samples is not None:
            return held * 0 + self.samples
        empty: Whole = held == 0
        return held + empty

    def rows_of(self, packs: list[list[Entry]]) -> list[list[Entry]]:
        """Each entry in a row of its own."""
        return [[entry] for pack in packs for entry in pack]

    def row_numbers(self, key: IntArray, held: IntArray) -> IntArray:
        """Each segment in the next row: held [2, 3] -> [0, 1, 0, 1, 2]."""
        first: IntArray = np.repeat(offsets_of(held)[:-1], held)
        return np.asarray(np.arange(len(key)) - first, np.int64)

    def padded(self) -> Padded:
        """Itself."""
        return self

    # Costs ---------------------------------------------------------------------------------------

    def segment_costs(self, recipe: Recipe, aligned: IntArray) -> FloatArray:
        """Rows are computed at their full width."""
        return recipe.cost.of_lengths(self.widths(aligned, recipe.width_unit))

    def micro_batch_costs(
        self, cost: Cost, rows: IntArray, widths: IntArray, owner: IntArray, aligned: IntArray
    ) -> FloatArray:
        """Every row at the full width, empty ones included."""
        return rows * cost.of_lengths(widths) + cost.per_micro_batch

    def limited_costs(
        self, cost: Cost, rows: IntArray, widths: IntArray, owner: IntArray, aligned: IntArray
    ) -> FloatArray:
        """The cost of the rows that hold a segment."""
        held = np.bincount(owner, minlength=len(rows))
        return self.micro_batch_costs(cost, held, widths, owner, aligned)

    # Limits --------------------------------------------------------------------------------------

    def shares(self, recipe: Recipe) -> dict[str, float]:
        """What one micro-batch may hold; slots do not add up over rows."""
        found = self.column_shares(recipe)
        if self.samples is not None:
            found["samples"] = self.samples
        if recipe.limits.cost is not None:
            found["cost"] = self.cost_share(recipe)
        return found

    def measured(self, recipe: Recipe) -> frozenset[str]:
        """Samples and cost, which `rows_that_fit` covers."""
        return frozenset({"samples", "cost"})

    def rows_that_fit(self, recipe: Recipe, widths: IntArray) -> IntArray:
        """How many rows of each width a micro-batch holds, at least one."""
        most = np.full(len(widths), self.samples or MOST, np.int64)
        if self.max_tokens is not None:
            most = np.minimum(most, self.max_tokens // widths)
        if recipe.limits.cost is not None:
            dear = self.cost_share(recipe) / recipe.cost.of_lengths(widths) + 1e-9
            most = np.minimum(most, dear).astype(np.int64)  # a limit may exceed 64 bits
        return np.maximum(most, 1)

    def pack_bounds(self, recipe: Recipe, widest: IntArray) -> tuple[int | None, IntArray]:
        """As many rows as fit at the width of the widest."""
        return None, self.rows_that_fit(recipe, self.widths(widest, recipe.width_unit))

    # Pools ---------------------------------------------------------------------------------------

    @property
    def pool_strategies(self) -> tuple[str, ...]:
        """The ways to choose rows from a pool."""
        # `fullest` needs a budget of slots to fill.
        if self.budget is None:
            return ("prefer_closest", "prefer_first", "fullest")
        return ("fullest", "prefer_closest", "prefer_first")

    def room(self, recipe: Recipe) -> tuple[int | None, int]:
        """All slots of a micro-batch, in rows of rounded or fixed width."""
        return self.budget, self.pad_to or recipe.width_unit

    # Floors --------------------------------------------------------------------------------------

    def fewest_micro_batches(self, recipe: Recipe, aligned: IntArray, bins: int) -> int:
        """By the rows that fit, and by everything that adds up."""
        widths = self._step_widths(recipe, aligned)
        return max(row_bound(self.rows_that_fit(recipe, widths)), bins)

    def least_times(
        self, recipe: Recipe, loads: Loads, per_rank: IntArray
    ) -> dict[str, FloatArray]:
        """Each segment is a row at its own width or wider; every micro-batch has a row."""
        cost, ranks = recipe.cost, recipe.topology.dp
        held = loads.size > 0
        widths = self._step_widths(recipe, loads.size)
        rows = np.where(held, cost.of_lengths(widths), 0.0)
        least = np.full(len(per_rank), self.pad_to or recipe.width_unit)
        if recipe.topology.equal_widths:
            least = np.maximum(least, widths.max(axis=1, initial=0))
        empty = cost.of_lengths(least)
        fixed = self.row_counts(0)  # rows of every micro-batch
        filled = held.sum(axis=1)
        count = np.maximum(filled, ranks * per_rank * fixed)
        if recipe.topology.equal_widths:
            count = rounded_up(count, ranks)  # all ranks run equally many rows
        largest = np.where(filled > 0, rows.max(axis=1, initial=0), empty)
        calls = per_rank * cost.per_micro_batch
        return {
            "mean": rows.sum(axis=1) / ranks + calls,
            "share": makespans(rows, ranks) + calls,
            "shape": (rows.sum(axis=1) + (count - filled) * empty) / ranks + calls,
            "sample": largest + (per_rank * fixed - 1) * empty + calls,
        }

    def least_second_times(self, recipe: Recipe, loads: Loads) -> FloatArray:
        """None: a second work needs a packed layout."""
        return np.zeros(len(loads.size))

    def _step_widths(self, recipe: Recipe, aligned: IntArray) -> IntArray:
        """The least width of each segment's row; the widest of its step if that has one width."""
        widths = self.widths(aligned, recipe.width_unit)
        if recipe.topology.equal_widths:
            widest = widths.max(axis=-1, initial=0, keepdims=True)
            return np.broadcast_to(widest, widths.shape)
        return widths


# -------------------------------------------------------------------------------------------------
# Packed: segments end to end.
# -------------------------------------------------------------------------------------------------

PackerName: TypeAlias = Literal[
    "concatenative",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "best_fit_decreasing",
    "optimal",
]
PACKER_NAMES: tuple[PackerName, ...] = get_args(PackerName)
Packer: TypeAlias = Callable[[IntArray, int, int], Ragged]
"""(lengths, capacity, seed) -> the items of each bin. Pure."""


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

    def __post_init__(self) -> None:
        one_of("layout.kind", self.kind, Literal["packed"])
        if self.packer is not None:
            _check_packer(self.packer)
        whole_field(self, "layout.rows")
        self.check_bounds("packed")
        if self.max_tokens is None and self.samples is None and self.pad_to is None:
            raise ConfigError(
                "layout.max_tokens is missing: a packed layout needs layout.max_tokens, "
                "layout.samples or layout.pad_to."
            )
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
        """The packer, if one is given."""
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

    @property
    def static(self) -> bool:
        """Whether every micro-batch has one shape."""
        return self.pad_to is not None

    @property
    def least_slots(self) -> int:
        """The slots of every micro-batch if static, else 1."""
        return self.rows * (self.pad_to or 1)

    @property
    def budget(self) -> int | None:
        """The most slots of a micro-batch."""
        return self.max_tokens if self.pad_to is None else self.rows * self.pad_to

    @property
    def packs_per_micro_batch(self) -> int:
        """Each row is a pack."""
        return self.rows

    @property
    def segments_per_row(self) -> None:
        """Unbounded."""
        return None

    def row_counts(self, held: Whole) -> Whole:
        """The same number for all."""
        return held * 0 + self.rows

    def rows_of(self, packs: list[list[Entry]]) -> list[list[Entry]]:
        """Each pack is a row."""
        return packs

    def row_numbers(self, key: IntArray, held: IntArray) -> IntArray:
        """The keys are the rows."""
        return key

    def padded(self) -> Padded:
        """The padded layout that keeps the same bounds."""
        if self.rows > 1:  # as many rows fit; `samples` is never less
            return Padded(max_tokens=self.budget, round_to=self.round_to, pad_to=self.pad_to)
        return Padded(max_tokens=self.budget, samples=self.samples, round_to=self.round_to)

    # Costs ---------------------------------------------------------------------------------------

    def segment_costs(self, recipe: Recipe, aligned: IntArray) -> FloatArray:
        """Each segment attends within its aligned length."""
        return recipe.cost.of_lengths(aligned)

    def micro_batch_costs(
        self, cost: Cost, rows: IntArray, widths: IntArray, owner: IntArray, aligned: IntArray
    ) -> FloatArray:
        """Attention costs each segment's aligned length; everything else costs every slot."""
        length = aligned.astype(np.float64)  # a square may not fit 64 bits
        pairs = sum_by(owner, length * length, len(rows))
        count = np.bincount(owner, minlength=len(rows))
        return (
            cost.per_token * (rows * widths)
            + cost.per_pair * pairs
            + cost.per_segment * count
            + cost.per_micro_batch
        )

    def limited_costs(
        self, cost: Cost, rows: IntArray, widths: IntArray, owner: IntArray, aligned: IntArray
    ) -> FloatArray:
        """What the segments cost, without the row's own padding."""
        return sum_by(owner, cost.of_lengths(aligned), len(rows)) + cost.per_micro_batch

    # Limits --------------------------------------------------------------------------------------

    def shares(self, recipe: Recipe) -> dict[str, float]:
        """What one row may hold."""
        found: dict[str, float] = {}
        if self.samples is not None:
            found["samples"] = self.samples // self.rows
        if recipe.limits.cost is not None:
            found["cost"] = self.cost_share(recipe)
        found |= self.column_shares(recipe)
        capacity = self.capacity(recipe)
        if capacity is not None:
            found["slots"] = capacity
        return found

    def measured(self, recipe: Recipe) -> frozenset[str]:
        """Slots if they are bounded, else samples."""
        return frozenset({"samples" if self.capacity(recipe) is None else "slots"})

    def pack_bounds(self, recipe: Recipe, widest: IntArray) -> tuple[int | None, IntArray]:
        """The slots of a row, and its share of the samples."""
        most = MOST if self.samples is None else self.samples // self.rows
        return self.capacity(recipe), np.full(len(widest), most)

    # Pools ---------------------------------------------------------------------------------------

    @property
    def pool_strategies(self) -> tuple[str, ...]:
        """The ways to fill a row from a pool."""
        return ("subset_sum", "greedy")

    def room(self, recipe: Recipe) -> tuple[int | None, int]:
        """The slots of a row. Aligned sizes add up, so widths are not rounded."""
        return self.capacity(recipe), 1

    # Floors --------------------------------------------------------------------------------------

    def fewest_micro_batches(self, recipe: Recipe, aligned: IntArray, bins: int) -> int:
        """Each holds `rows` packs."""
        return divided_up(bins, self.rows)

    def least_times(
        self, recipe: Recipe, loads: Loads, per_rank: IntArray
    ) -> dict[str, FloatArray]:
        """See `core.bounds.packed_times`."""
        return packed_times(self, recipe, loads, per_rank)

    def least_second_times(self, recipe: Recipe, loads: Loads) -> FloatArray:
        """The second work by itself."""
        return second_times(self, recipe, loads)


def _check_packer(packer: Any) -> None:
    """Raise unless `packer` is a known name or a function that a file can name."""
    if isinstance(packer, str):
        if packer not in PACKER_NAMES and ":" not in packer:
            raise ConfigError(
                f"unknown layout.packer {packer!r}; expected one of: {', '.join(PACKER_NAMES)}."
            )
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


# -------------------------------------------------------------------------------------------------
# Layouts: how segments lie in the rows of a micro-batch, and all arithmetic that follows from it.
#
# Padded    one segment per row        [a a a .]
#                                      [b b . .]
# Packed    segments end to end        [a a a b b c .]
# -------------------------------------------------------------------------------------------------

Layout: TypeAlias = Padded | Packed

LAYOUTS: dict[str, type[Padded] | type[Packed]] = {"padded": Padded, "packed": Packed}
