"""Recipe: everything that decides a plan except the lengths themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from evenstep.core.cost import Cost
from evenstep.core.layout import LAYOUTS, Layout, PackedStatic, Padded
from evenstep.core.summary import constructor
from evenstep.core.topology import Topology
from evenstep.core.validate import MOST, one_of, real_field, whole_field, whole_number
from evenstep.errors import ConfigError

Overflow: TypeAlias = Literal["error", "alone", "truncate", "split", "drop"]
Balance: TypeAlias = Literal["refined", "lpt", "karmarkar_karp", "stride"]
Clock: TypeAlias = Literal["micro_batch", "step"]
Scope: TypeAlias = Literal["micro_batch", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What stays fixed per optimizer step: so many samples, or tokens, or micro-batches a rank.

    A step takes the next samples in order, whatever the layout, packer or balance. With none of
    the three, all samples form one step. Two things do depend on the budget: steps counted in
    micro-batches, by their nature (and on the number of ranks), and which samples
    `overflow="drop"` leaves out, since a dropped sample counts for no step.

    lengths [5, 600, 5, 5], 2 samples a step, drop: steps [0, -1, 0, 1] at a budget of 512 and
    [0, 0, 1, 1] at 1024
    """

    samples: int | None = None
    tokens: int | None = None
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        names = ("samples", "tokens", "micro_batches")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"steps fixes {' and '.join(given)} at once, and both cannot hold. Keep one."
            )
        for name in given:
            whole_field(self, f"steps.{name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Hard limits per micro-batch beside the token budget.

    `columns` names further per-sample numbers that the caller brings (image patches, trained
    tokens) and the most of each that one micro-batch may hold. Cost counts segments at their
    aligned lengths; in padded rows, at the full width. A packed_static micro-batch shares its
    limits evenly between its rows, and keeps a group in one row.
    """

    segments: int | None = None
    cost: float | None = None
    columns: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.segments is not None:
            whole_field(self, "limits.segments")
        columns = {
            name: whole_number(f"limits.columns.{name}", most)
            for name, most in dict(self.columns).items()
        }
        object.__setattr__(self, "columns", columns)
        if self.cost is not None and not 0 < real_field(self, "limits.cost") < math.inf:
            raise ConfigError(
                f"limits.cost is {self.cost:g}, which is no limit that a sample could keep. Set it "
                f"above 0."
            )

    def __hash__(self) -> int:
        return hash((self.segments, self.cost, frozenset(self.columns.items())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a plan is asked to be. The same recipe and lengths give the same plan on every rank.

    `clock` is what balance minimises: `micro_batch` where ranks meet at every micro-batch
    (FSDP, ZeRO-3), `step` where they meet once per step (DDP). `groups` says where samples that
    share a group id stay together. `equal_sizes` gives every rank the same number of
    segments of a step, or one fewer.
    """

    layout: Layout
    topology: Topology = field(default_factory=Topology)
    steps: Steps = field(default_factory=Steps)
    cost: Cost = field(default_factory=Cost)
    limits: Limits = field(default_factory=Limits)
    balance: Balance = "refined"
    clock: Clock = "micro_batch"
    groups: Scope = "micro_batch"
    equal_sizes: bool = False
    overflow: Overflow = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, words in _CHOICES.items():
            one_of(name, getattr(self, name), words)
        whole_field(self, "seed", least=0, most=2**64)
        layout, unit = self.layout, self.width_unit
        for name in ("pad_to", "width"):
            fixed = getattr(layout, name, None)
            if fixed is not None and fixed % unit:
                raise ConfigError(
                    f"layout.{name} is {fixed}, not a multiple of {unit} as rounding and the "
                    f"topology need it; ranks could not share it. Use {-(-fixed // unit) * unit}."
                )
        if self.capacity is not None and self.capacity < unit:
            raise ConfigError(
                f"a row holds {layout.max_tokens} tokens but widths come in multiples of {unit}; "
                f"nothing would fit. Raise layout.max_tokens or lower the rounding."
            )
        if self.overflow == "alone" and self.topology.equal_widths:
            raise ConfigError(
                "overflow='alone' lets one micro-batch be wider than the budget, but this pipeline "
                "needs equal widths, so all would be. Choose another overflow, or set "
                "topology.variable_seq_lengths."
            )
        if self.overflow == "alone" and isinstance(layout, PackedStatic):
            raise ConfigError(
                "overflow='alone' needs a wider micro-batch, but packed_static has one shape. "
                "Choose 'split', 'truncate', 'drop' or 'error'."
            )

    def __repr__(self) -> str:
        """The call that makes it, with what differs from the defaults."""
        return constructor(self)

    @property
    def width_unit(self) -> int:
        """Every width is a multiple of this: the layout's rounding and the topology's alignment."""
        return math.lcm(getattr(self.layout, "round_to", 1), self.topology.alignment)

    @property
    def capacity(self) -> int | None:
        """The slots that one row can offer its segments; None where nothing limits it.

        Budget 100 with widths in multiples of 16 offers 96.
        """
        layout = self.layout
        if isinstance(layout, PackedStatic):
            return layout.width
        limit = layout.pad_to or layout.max_tokens
        return None if limit is None else limit // self.width_unit * self.width_unit

    @property
    def longest_segment(self) -> int | None:
        """The longest segment that any micro-batch can hold, or None if nothing limits it.

        Budget 100 at alignment 16 holds a segment of 96; a limit on cost may allow less.
        """
        unit = self.topology.alignment
        if self.limits.cost is None:
            return None if self.capacity is None else self.capacity // unit * unit
        fits = MOST if self.capacity is None else self.capacity
        # The cost of one segment grows with its length: bisect for the longest within the limit.
        low, high = 0, fits // unit
        while low < high:
            middle = (low + high + 1) // 2
            if self._alone_cost(middle * unit) <= self.cost_limit:
                low = middle
            else:
                high = middle - 1
        return None if self.capacity is None and low == fits // unit else low * unit

    @property
    def cost_limit(self) -> float:
        """What the segments of one row may cost together; those of all rows, if padded."""
        if self.limits.cost is None:
            return math.inf
        rows = self.layout.rows if isinstance(self.layout, PackedStatic) else 1
        return (self.limits.cost - self.cost.per_micro_batch) / rows

    def _alone_cost(self, length: int) -> float:
        if isinstance(self.layout, Padded):
            unit = self.width_unit
            length = self.layout.pad_to or -(-length // unit) * unit
        return float(self.cost.of_lengths(np.array([length]))[0])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `Recipe.from_dict` reads it back."""
        return {
            **{name: asdict(getattr(self, name)) for name in _PARTS},
            **{name: getattr(self, name) for name in _WORDS},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` described."""
        kind = data["layout"]["kind"]
        return cls(
            layout=LAYOUTS[kind](**data["layout"]),
            topology=Topology(**data["topology"]),
            steps=Steps(**data["steps"]),
            cost=Cost(**data["cost"]),
            limits=Limits(**data["limits"]),
            **{name: data[name] for name in _WORDS},
        )


_CHOICES: dict[str, Any] = {
    "balance": Balance,
    "clock": Clock,
    "groups": Scope,
    "overflow": Overflow,
}
_PARTS = ("layout", "topology", "steps", "cost", "limits")
_WORDS = ("balance", "clock", "groups", "equal_sizes", "overflow", "seed")
