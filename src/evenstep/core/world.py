"""World: the data-parallel rank of this process and the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from evenstep.core.topology import Topology
from evenstep.core.validate import MOST_RANKS, whole_field
from evenstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """One data-parallel rank of `size`. It is passed explicitly, never looked up.

    >>> [World(rank, 2).rank for rank in range(2)]
    [0, 1]
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        whole_field(self, "world.size", most=MOST_RANKS)
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"world.rank must be in [0, {self.size}) for {self.size} ranks, got {self.rank}."
            )
        whole_field(self, "world.rank", least=0, most=MOST_RANKS)

    @classmethod
    def detect(
        cls, topology: Topology | None = None, environment: Mapping[str, str] | None = None
    ) -> World:
        """The world from the environment that a launcher sets (`torchrun`, Ray, `accelerate`).

        With a topology, the data-parallel rank within it, in Megatron's order of ranks:
        tensor-parallel ranks are adjacent, then context, data, and pipeline stages.

        >>> World.detect(Topology(dp=2, tp=2), {"RANK": "3", "WORLD_SIZE": "4"})
        World(rank=1, size=2)
        """
        found = os.environ if environment is None else environment
        try:
            rank, size = int(found.get("RANK", "0")), int(found.get("WORLD_SIZE", "1"))
        except ValueError:
            raise ConfigError(
                f"RANK and WORLD_SIZE must be integers, got {found.get('RANK')!r} and "
                f"{found.get('WORLD_SIZE')!r}. Start with torchrun, or pass a World."
            ) from None
        if topology is None:
            return cls(rank, size)
        processes = topology.dp * topology.cp * topology.tp * topology.pp
        if size != processes:
            raise ConfigError(
                f"WORLD_SIZE is {size} but the topology has {processes} processes "
                f"(dp {topology.dp} x cp {topology.cp} x tp {topology.tp} x pp {topology.pp}). "
                f"Start {processes} processes or correct the topology."
            )
        return cls(rank // (topology.tp * topology.cp) % topology.dp, topology.dp)
