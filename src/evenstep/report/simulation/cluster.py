"""Cluster: how fast devices compute and what they send to each other."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.cost import Cost
from evenstep.core.text import real_field, truth_field, whole_field
from evenstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The devices of a recipe's topology.

    cost        seconds of a micro-batch, forward and backward, on the cp * tp devices that share
                it, before the pipeline divides it
    least       seconds that a micro-batch takes at least, however small: the host launches kernels
    update      seconds of the optimizer's update and what else happens once per step
    link        bytes per second from a device to another node
    inside      bytes per second from a device to another one of its node
    per_node    devices of a node
    parameters  of the model; 0: ranks exchange nothing
    hidden      numbers of a token that one stage sends to the next; 0: stages send nothing
    overlap     whether ranks exchange parameters and gradients while they compute
    scattered   whether sharded ranks scatter gradients at every micro-batch, not at the last

    >>> Cluster(cost=Cost(per_token=1e-6)).link
    50000000000.0
    """

    cost: Cost
    least: float = 0.0
    update: float = 0.0
    link: float = 50e9
    inside: float = 450e9
    per_node: int = 8
    parameters: int = 0
    hidden: int = 0
    overlap: bool = True
    scattered: bool = False

    def __post_init__(self) -> None:
        for name in ("least", "update"):
            if not 0 <= real_field(self, f"cluster.{name}") < float("inf"):
                raise ConfigError(f"cluster.{name} must be finite and not negative.")
        for name in ("link", "inside"):
            if not real_field(self, f"cluster.{name}") > 0:
                raise ConfigError(f"cluster.{name} must be above 0.")
        whole_field(self, "cluster.per_node")
        for name in ("parameters", "hidden"):
            whole_field(self, f"cluster.{name}", least=0)
        for name in ("overlap", "scattered"):
            truth_field(self, f"cluster.{name}")

    def bus(self, ranks: int, apart: int) -> float:
        """Bytes per second of a collective over `ranks` devices, with `apart` devices between two.

        All devices of a node send at once, so several nodes share the links of one.

        >>> Cluster(cost=Cost()).bus(64, 1), Cluster(cost=Cost()).bus(8, 1)
        (400000000000.0, 450000000000.0)
        """
        if ranks * apart <= self.per_node:
            return self.inside
        together = max(1, self.per_node // apart)  # devices of the group in one node
        return min(self.inside, together * self.link)
