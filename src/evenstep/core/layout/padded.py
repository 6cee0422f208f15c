"""Padded: one segment per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from evenstep.core.bounds import row_bound
from evenstep.core.layout.frame import Entry, Frame, Whole
from evenstep.core.makespan import makespans
from evenstep.core.ragged import FloatArray, IntArray, offsets_of
from evenstep.core.rounding import rounded_up
from evenstep.core.validate import MOST, one_of
from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.core.cost import Cost
    from evenstep.core.loads import Loads
    from evenstep.core.recipe import Recipe

Cut: TypeAlias = Literal["optimal", "greedy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded(Frame):
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
