"""Gpu: the speed and memory of a device, by name."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.glimpse import glimpse
from evenstep.core.validate import real_field, whole_field
from evenstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a device can do, as its vendor states it, and what connects it to others.

    flops      dense bfloat16 FLOPs per second
    memory     bytes
    bandwidth  bytes per second of its memory
    link       bytes per second to another device of its node, in one direction
    network    bytes per second to another node
    per_node   devices of a node

    >>> Gpu.named("h200").flops
    989000000000000.0
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_node: int = 8

    def __post_init__(self) -> None:
        for field in ("flops", "memory", "bandwidth", "link", "network"):
            if not 0 < real_field(self, f"gpu.{field}") < float("inf"):
                raise ConfigError(f"gpu.{field} must be finite and above 0.")
        whole_field(self, "gpu.per_node")

    @classmethod
    def named(cls, name: str) -> Gpu:
        """A well-known device; a wrong name raises an error that lists the names."""
        found = GPUS.get(str(name).lower())
        if found is None:
            raise ConfigError(f"unknown GPU {glimpse(name)}; expected one of: {', '.join(GPUS)}.")
        return found


def _gpu(
    name: str, tflops: float, mebibytes: int, bandwidth: float, link: float, network: float
) -> Gpu:
    """Bandwidth in TB/s, links in GB/s; the memory as the driver reports it."""
    return Gpu(
        name=name,
        flops=tflops * 1e12,
        memory=mebibytes * 2**20,
        bandwidth=bandwidth * 1e12,
        link=link * 1e9,
        network=network * 1e9,
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 2250, 183_359, 8.0, 900, 50),
        _gpu("h200", 989, 143_771, 4.8, 450, 50),
        _gpu("h100", 989, 81_559, 3.35, 450, 50),
        _gpu("a100", 312, 81_920, 2.04, 300, 25),
        _gpu("l40s", 362, 46_068, 0.864, 32, 12.5),
        _gpu("a10g", 70, 23_028, 0.6, 32, 12.5),
    )
}
