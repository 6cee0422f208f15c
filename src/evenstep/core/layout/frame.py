"""Frame: the bounds of a micro-batch, and the arithmetic that both layouts share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.rounding import rounded_up
from evenstep.core.validate import MOST, whole_field
from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.core.cost import Cost
    from evenstep.core.recipe import Recipe

Whole = TypeVar("Whole", int, NDArray[np.int64])
Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame(ABC):
    """Bounds of a micro-batch; all that are given hold.

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
        """Refuse bounds that are no numbers or contradict each other."""
        for name in ("max_tokens", "samples", "round_to", "pad_to"):
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
                f"layout.max_tokens is {self.max_tokens}, but every {kind} micro-batch has {least} "
                f"slots. Raise max_tokens or lower pad_to."
            )

    @property
    @abstractmethod
    def options(self) -> dict[str, object]:
        """What was given beside the bounds, by path; only plans can use it."""

    @abstractmethod
    def check_options(self, recipe: Recipe) -> None:
        """Refuse options that have no effect in this recipe."""

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
        """The slots of an empty micro-batch as far as the layout fixes them, else 1."""

    @property
    @abstractmethod
    def budget(self) -> int | None:
        """The most slots of a micro-batch, given or implied; None if nothing bounds them."""

    @property
    @abstractmethod
    def packs_per_micro_batch(self) -> int:
        """How many packs, each filled by itself, make a micro-batch and share its limits."""

    @property
    @abstractmethod
    def segments_per_row(self) -> int | None:
        """The most segments in a row; None for any number."""

    @abstractmethod
    def row_counts(self, held: Whole) -> Whole:
        """Rows of micro-batches that hold so many segments."""

    @abstractmethod
    def rows_of(self, packs: list[list[Entry]]) -> list[list[Entry]]:
        """What was chosen for each pack -> what lies in each row."""

    @abstractmethod
    def row_numbers(self, key: IntArray, held: IntArray) -> IntArray:
        """The row of each segment in its micro-batch. Segments are sorted by micro-batch, then by
        `key`; `held` counts those of each micro-batch."""

    def widths(self, used: Whole, unit: int) -> Whole:
        """The widths of micro-batches whose fullest row uses so many slots.

        `used` may be an int or an array; an empty row is one unit wide.
        """
        if self.pad_to is not None:
            return used * 0 + self.pad_to
        return rounded_up(used + (used == 0), unit)

    def capacity(self, recipe: Recipe) -> int | None:
        """The slots that one row offers its segments; None where nothing bounds them.

        max_tokens 100 with widths in multiples of 16 offers 96.
        """
        most = self.max_tokens if self.pad_to is None else self.pad_to
        return None if most is None else most // recipe.width_unit * recipe.width_unit

    # Costs ---------------------------------------------------------------------------------------

    @abstractmethod
    def segment_costs(self, recipe: Recipe, aligned: IntArray) -> FloatArray:
        """What each segment counts against `limits.cost`."""

    @abstractmethod
    def micro_batch_costs(
        self, cost: Cost, rows: IntArray, widths: IntArray, owner: IntArray, aligned: IntArray
    ) -> FloatArray:
        """The modelled work of micro-batches, padding included. `owner` is the micro-batch of each
        segment, `aligned` its aligned length."""

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
        """What one pack may hold of everything that adds up over its segments, by name: `slots`,
        `samples`, `cost`, `columns.NAME`."""

    @abstractmethod
    def measured(self, recipe: Recipe) -> frozenset[str]:
        """Which of the shares planning keeps by measuring packs or rows; the others it keeps as
        further limits."""

    def taken(
        self, recipe: Recipe, aligned: IntArray, columns: Mapping[str, IntArray]
    ) -> dict[str, NDArray[Any]]:
        """What each segment takes of the shares, by name; `columns` are per segment."""
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
        """The longest segment that any micro-batch can hold, or None if nothing limits it.

        max_tokens 100 at alignment 16 holds a segment of 96; a limit on cost may allow less.
        """
        unit, capacity = recipe.topology.alignment, self.capacity(recipe)
        if recipe.limits.cost is None:
            return None if capacity is None else capacity // unit * unit
        most = (MOST if capacity is None else capacity) // unit
        share = self.cost_share(recipe)
        # The cost of one segment grows with its length: bisect for the longest within the limit.
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
        """(the slots of a pack, None where they are not added up; the most segments of a pack that
        holds each unit). `widest` is the longest aligned segment of each unit."""

    # Pools ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def pool_strategies(self) -> tuple[str, ...]:
        """The ways to choose a micro-batch from a pool; the first is the default."""

    @abstractmethod
    def room(self, recipe: Recipe) -> tuple[int | None, int]:
        """(the most slots of one pack, the unit that selecting rounds widths to)."""

    # Floors --------------------------------------------------------------------------------------

    @abstractmethod
    def fewest_micro_batches(self, recipe: Recipe, aligned: IntArray, bins: int) -> int:
        """At least so many micro-batches hold these segments, of which `bins` packs are needed by
        everything that adds up."""

    @abstractmethod
    def least_time(
        self, recipe: Recipe, aligned: IntArray, units: IntArray, per_rank: int
    ) -> float:
        """No plan takes less modelled time for a step of these segments when each rank runs at
        least `per_rank` micro-batches. `units` are the slots of what stays together."""
