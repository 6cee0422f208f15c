"""Peak FLOPs of the device of a run."""

from __future__ import annotations

from typing import Any

from evenstep.core.cost import GPUS


def peak_flops(device: Any, precision: str) -> float | None:
    """FLOPs per second of a device in bfloat16; None if unknown or in another precision."""
    if device.type != "cuda" or precision != "bfloat16":
        return None
    import torch

    name = torch.cuda.get_device_name(device).lower()
    return next((gpu.flops for gpu in GPUS.values() if gpu.name in name), None)
