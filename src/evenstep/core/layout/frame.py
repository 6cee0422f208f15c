"""Frame: the bounds of a micro-batch, and the arithmetic that both layouts share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import rounded_up
from evenstep.core.validate import MOST, whole_field
from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.core.cost import Cost
    from evenstep.core.loads import Loads
    from evenstep.core.recipe import Recipe

Whole = TypeVar("Whole", int, NDArray[np.int64])
Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame(ABC):
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
