"""Packed: segments end to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from inspect import isfunction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from evenstep.core.layout.frame import Entry, Frame, Whole
from evenstep.core.layout.padded import Padded
from evenstep.core.packed_floor import packed_times, second_times
from evenstep.core.ragged import FloatArray, IntArray, Ragged, sum_by
from evenstep.core.rounding import divided_up, rounded_up
from evenstep.core.validate import MOST, one_of, whole_field
from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.core.cost import Cost
    from evenstep.core.loads import Loads
    from evenstep.core.recipe import Recipe

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
class Packed(Frame):
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
        """See `core.packed_floor`."""
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
