"""Layouts: how segments fill the rows of a micro-batch.

padded         many rows of one segment       [a a a .]   width = the longest, rounded
                                              [b b . .]
packed         one row of many segments       [a a a b b c . ]
packed_static  R rows of a fixed width        [a a a b b .]
                                              [c c c c d d]
fixed          a given number of samples per micro-batch, packed in one row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from evenstep.core.validate import one_of, whole_field
from evenstep.errors import ConfigError

PackerName: TypeAlias = Literal[
    "concatenative",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "best_fit_decreasing",
    "optimal",
]
Cut: TypeAlias = Literal["optimal", "greedy"]
PACKER_NAMES: tuple[PackerName, ...] = get_args(PackerName)


def _positive(layout: object, *names: str) -> None:
    for name in names:
        if getattr(layout, name) is not None:
            whole_field(layout, f"layout.{name}")


def _static(layout: str, pad_to: int | None, max_tokens: int | None, round_to: int) -> None:
    if pad_to is None:
        return
    if max_tokens is not None and pad_to > max_tokens:
        raise ConfigError(
            f"layout.pad_to is {pad_to} but layout.max_tokens is {max_tokens}; every {layout} "
            f"micro-batch would break the budget. Lower pad_to or raise max_tokens."
        )
    if pad_to % round_to:
        raise ConfigError(
            f"layout.pad_to is {pad_to}, not a multiple of layout.round_to {round_to}; "
            f"the width cannot be both. Make pad_to a multiple of {round_to}."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """One segment per row; rows of similar length share a micro-batch (dynamic batching).

    `cut` is where the sorted samples are divided: `optimal` (dynamic programming: the fewest
    micro-batches, then the fewest slots) or `greedy` (the same cuts on every rank, as NeMo-RL
    and ROLL make them). Where a pipeline needs one width, no cut saves any, and rows are dealt by
    cost. `pad_to` fixes the width of every row.
    """

    kind: Literal["padded"] = "padded"
    max_tokens: int
    round_to: int = 1
    pad_to: int | None = None
    cut: Cut = "optimal"

    def __post_init__(self) -> None:
        _positive(self, "max_tokens", "round_to", "pad_to")
        _static("padded", self.pad_to, self.max_tokens, self.round_to)
        one_of("layout.cut", self.cut, Cut)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Segments end to end in one row; no padding between them.

    `round_to` rounds the row's width up; `pad_to` fixes it (static shapes).
    """

    kind: Literal["packed"] = "packed"
    max_tokens: int
    round_to: int = 1
    pad_to: int | None = None
    packer: PackerName = "best_fit_decreasing"

    def __post_init__(self) -> None:
        _positive(self, "max_tokens", "round_to", "pad_to")
        _static("packed", self.pad_to, self.max_tokens, self.round_to)
        one_of("layout.packer", self.packer, PackerName)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStatic:
    """A fixed number of rows of fixed width; no segment crosses a row. One shape for ever."""

    kind: Literal["packed_static"] = "packed_static"
    rows: int
    width: int
    packer: PackerName = "best_fit_decreasing"

    def __post_init__(self) -> None:
        _positive(self, "rows", "width")
        one_of("layout.packer", self.packer, PackerName)

    @property
    def max_tokens(self) -> int:
        """The slots of every micro-batch."""
        return self.rows * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """A given number of samples per micro-batch, packed in one row without padding.

    The budget is optional: without it a micro-batch is as wide as its samples need.
    """

    kind: Literal["fixed"] = "fixed"
    samples: int
    max_tokens: int | None = None
    round_to: int = 1
    pad_to: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "samples", "max_tokens", "round_to", "pad_to")
        _static("fixed", self.pad_to, self.max_tokens, self.round_to)


Layout: TypeAlias = Padded | Packed | PackedStatic | Fixed

LAYOUTS: dict[str, type[Padded] | type[Packed] | type[PackedStatic] | type[Fixed]] = {
    "padded": Padded,
    "packed": Packed,
    "packed_static": PackedStatic,
    "fixed": Fixed,
}
