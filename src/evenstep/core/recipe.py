"""Recipe: everything that determines a plan, except the lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from evenstep.core.cost import Cost
from evenstep.core.glimpse import glimpse
from evenstep.core.layout import LAYOUTS, Layout
from evenstep.core.layout.frame import Frame
from evenstep.core.rounding import rounded_up
from evenstep.core.summary import constructor
from evenstep.core.topology import Topology
from evenstep.core.validate import (
    one_of,
    real_field,
    seed_number,
    truth_field,
    whole_field,
    whole_number,
)
from evenstep.errors import ConfigError

Overflow: TypeAlias = Literal["error", "alone", "truncate", "split", "drop"]
Balance: TypeAlias = Literal["refined", "lpt", "karmarkar_karp", "stride", "none"]
SyncEvery: TypeAlias = Literal["micro_batch", "step"]
Scope: TypeAlias = Literal["micro_batch", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The size of an optimizer step in samples, tokens, or micro-batches per rank.

    A step takes the next samples in order, independent of layout, packer and balance. With none of
    the three, all samples form one step. Steps counted in micro-batches depend on the budget and
    the number of ranks. `overflow="drop"` depends on the budget too, because a dropped sample
    belongs to no step:

    lengths [5, 600, 5, 5], 2 samples per step, drop -> steps [0, -1, 0, 1] at a budget of 512 and
    [0, 0, 1, 1] at 1024

    >>> Steps(samples=512).samples, Steps(micro_batches=4).micro_batches
    (512, 4)
    """

    samples: int | None = None
    tokens: int | None = None
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        names = ("samples", "tokens", "micro_batches")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"steps takes one of samples, tokens and micro_batches, got {' and '.join(given)}."
            )
        for name in given:
            whole_field(self, f"steps.{name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Hard limits per micro-batch in addition to the bounds of the layout.

    `columns` maps the names of per-sample columns that the caller gives (image patches, loss
    tokens) to the most that one micro-batch may hold. `cost` counts segments at their aligned
    lengths; in padded rows, at the full width. Several packed rows share the limits evenly,
    and a group stays in one row.

    >>> Limits(columns={"patches": 4096}).columns["patches"]
    4096
    """

    cost: float | None = None
    columns: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = {
            name: whole_number(f"limits.columns.{name}", most)
            for name, most in dict(self.columns).items()
        }
        object.__setattr__(self, "columns", columns)
        if self.cost is not None and not 0 < real_field(self, "limits.cost") < math.inf:
            raise ConfigError(f"limits.cost must be finite and above 0, got {self.cost:g}.")

    def __hash__(self) -> int:
        return hash((self.cost, frozenset(self.columns.items())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All settings of a plan. The same recipe and lengths give the same plan on every rank.

    balance      how work is divided between ranks; `none` keeps the step's order: each micro-batch
                 takes the next samples while the bounds hold, and micro-batch k runs on rank
                 k mod dp
    sync_every   how often ranks synchronise, which is what balance minimises: `micro_batch` (FSDP,
                 ZeRO-3) or `step` (DDP)
    groups       where samples that share a group id stay together
    equal_sizes  whether ranks of a step differ by at most one segment
    overflow     what happens to a sample that is longer than a micro-batch can hold
    seed         for packers that use random numbers
    """

    layout: Layout
    topology: Topology = field(default_factory=Topology)
    steps: Steps = field(default_factory=Steps)
    cost: Cost = field(default_factory=Cost)
    limits: Limits = field(default_factory=Limits)
    balance: Balance = "refined"
    sync_every: SyncEvery = "micro_batch"
    groups: Scope = "micro_batch"
    equal_sizes: bool = False
    overflow: Overflow = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in {"layout": Frame, **_PARTS}.items():
            if not isinstance(getattr(self, name), kind):
                wanted = "Padded or Packed" if name == "layout" else kind.__name__
                raise ConfigError(f"{name} must be {wanted}, got {glimpse(getattr(self, name))}.")
        for name, words in _CHOICES.items():
            one_of(name, getattr(self, name), words)
        truth_field(self, "equal_sizes")
        object.__setattr__(self, "seed", seed_number(self.seed))
        self._check_widths()
        self._check_limits()
        self._check_options()

    def _check_widths(self) -> None:
        layout, unit = self.layout, self.width_unit
        if layout.pad_to is not None and layout.pad_to % unit:
            raise ConfigError(
                f"layout.pad_to must be a multiple of {unit} (rounding and alignment), got "
                f"{layout.pad_to}. Use {rounded_up(layout.pad_to, unit)}."
            )
        if self.capacity is not None and self.capacity < unit:
            raise ConfigError(
                f"layout.max_tokens is {layout.max_tokens}, but widths are multiples of {unit} "
                f"(rounding and alignment). Raise layout.max_tokens to {unit} or more."
            )
        if self.overflow == "alone" and layout.pad_to is not None:
            raise ConfigError(
                f"overflow='alone' needs rows of any width, but layout.pad_to={layout.pad_to} "
                f"fixes it. Use 'split', 'truncate', 'drop' or 'error'."
            )
        if self.overflow == "alone" and self.topology.equal_widths:
            raise ConfigError(
                "overflow='alone' needs rows of any width, but this pipeline needs equal widths. "
                "Use another overflow, or set topology.variable_seq_lengths."
            )

    def _check_limits(self) -> None:
        shared = self.layout.packs_per_micro_batch
        for name, most in self.limits.columns.items():
            if most < shared:
                raise ConfigError(
                    f"limits.columns.{name} must be at least layout.rows, {shared}, got {most}."
                )
        if self.limits.cost is not None and self.limits.cost <= self.cost.per_micro_batch:
            raise ConfigError(
                f"limits.cost is {self.limits.cost:g}, but an empty micro-batch costs "
                f"{self.cost.per_micro_batch:g}. Raise limits.cost."
            )

    def _check_options(self) -> None:
        self.layout.check_options(self)
        given = [*self.layout.options, *(["equal_sizes"] if self.equal_sizes else [])]
        if self.balance == "none" and given:
            raise ConfigError(
                f"balance='none' keeps the order of the samples, so {given[0]} has no effect. "
                f"Leave one of them out."
            )
        asked, multiple = self.steps.micro_batches, self.topology.multiple
        if asked is not None and asked % multiple:
            raise ConfigError(
                f"steps.micro_batches must be a multiple of {multiple} for this pipeline, got "
                f"{asked}. Use {rounded_up(asked, multiple)}."
            )

    def __repr__(self) -> str:
        """The constructor call, with the fields that differ from their defaults."""
        return constructor(self)

    @property
    def width_unit(self) -> int:
        """Widths are multiples of this: the layout's rounding and the topology's alignment."""
        return math.lcm(self.layout.round_to, self.topology.alignment)

    @property
    def capacity(self) -> int | None:
        """The slots of one row; None if unbounded."""
        return self.layout.capacity(self)

    @property
    def longest_segment(self) -> int | None:
        """The longest segment that a micro-batch can hold; None if unbounded."""
        return self.layout.longest_segment(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `Recipe.from_dict` reads it back."""
        return {
            **{name: asdict(getattr(self, name)) for name in _PARTS},
            **{name: getattr(self, name) for name in _WORDS},
            "layout": self.layout.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` wrote."""
        kind = data["layout"]["kind"]
        return cls(
            layout=LAYOUTS[kind](**data["layout"]),
            **{name: part(**data[name]) for name, part in _PARTS.items()},
            **{name: data[name] for name in _WORDS},
        )


_CHOICES: dict[str, Any] = {
    "balance": Balance,
    "sync_every": SyncEvery,
    "groups": Scope,
    "overflow": Overflow,
}
_PARTS: dict[str, Any] = {"topology": Topology, "steps": Steps, "cost": Cost, "limits": Limits}
_WORDS = ("balance", "sync_every", "groups", "equal_sizes", "overflow", "seed")
