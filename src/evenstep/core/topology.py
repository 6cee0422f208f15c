"""Topology: the data-parallel ranks, and what the other parallel axes need from a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from evenstep.core.validate import MOST_RANKS, one_of, truth_field, whole_field
from evenstep.errors import ConfigError

Fp8Recipe: TypeAlias = Literal["tensorwise", "mxfp8", "blockwise"]
_FP8: dict[Fp8Recipe, int] = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The sizes of the data-, context-, tensor- and pipeline-parallel groups.

    dp   data-parallel ranks
    cp   context-parallel ranks, which share the tokens of a sample
    tp   tensor-parallel ranks
    pp   pipeline stages
    vpp  virtual stages per pipeline stage
    sequence_parallel     tensor-parallel ranks share the tokens as well
    variable_seq_lengths  pipeline stages exchange the shape of each micro-batch, so widths may
                          differ

    >>> Topology(dp=8, cp=2, tp=2).alignment, Topology(dp=8, pp=4, vpp=2).multiple
    (8, 4)
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    variable_seq_lengths: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp", "vpp"):
            whole_field(self, f"topology.{name}", most=MOST_RANKS)
        for name in ("sequence_parallel", "variable_seq_lengths"):
            truth_field(self, f"topology.{name}")
        for name, axis in (("sequence_parallel", "tp"), ("variable_seq_lengths", "pp")):
            if getattr(self, name) and getattr(self, axis) == 1:
                raise ConfigError(
                    f"topology.{name} has no effect, because topology.{axis} is 1. Set {axis} "
                    f"above 1, or leave it out."
                )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f"topology.vpp is {self.vpp} but topology.pp is 1; virtual stages need a pipeline. "
                f"Set pp above 1 or vpp to 1."
            )

    @property
    def alignment(self) -> int:
        """The multiple that each segment's slots are rounded up to.

        Two chunks per context-parallel rank, each divisible by tp; tp alone with sequence
        parallelism.
        """
        if self.cp > 1:
            return 2 * self.cp * self.tp
        return self.tp if self.sequence_parallel else 1

    def fp8_multiple(self, recipe: Fp8Recipe) -> int:
        """The multiple that a pack's slots are rounded up to for FP8; set it as `layout.round_to`.

        16, 32 or 128 by the recipe, times two chunks per context-parallel rank, times tp with
        sequence parallelism: each rank's part is a multiple by itself.

        >>> Topology().fp8_multiple("mxfp8"), Topology(cp=4, tp=2).fp8_multiple("blockwise")
        (32, 1024)
        """
        one_of("fp8 recipe", recipe, Fp8Recipe)
        chunks = 2 * self.cp if self.cp > 1 else 1
        return _FP8[recipe] * chunks * (self.tp if self.sequence_parallel else 1)

    @property
    def multiple(self) -> int:
        """The divisor of the number of micro-batches per rank (interleaved stages)."""
        return self.pp if self.vpp > 1 else 1

    @property
    def equal_widths(self) -> bool:
        """Whether all micro-batches of a step have one shape (fixed pipeline buffers)."""
        return self.pp > 1 and not self.variable_seq_lengths
