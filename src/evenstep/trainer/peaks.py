"""Peak FLOPs of GPUs by name, dense, as their vendors state them."""

from __future__ import annotations

from typing import Any

_BFLOAT16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
}


def peak_flops(device: Any, precision: str) -> float | None:
    """FLOPs per second of a device in bfloat16; None if unknown or in another precision."""
    if device.type != "cuda" or precision != "bfloat16":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for gpu, peak in _BFLOAT16.items() if gpu in name), None)
