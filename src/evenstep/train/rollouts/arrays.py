"""Tensors as arrays and back, so that pickling need not copy them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Stored: TypeAlias = NDArray[Any] | tuple[NDArray[np.uint8], torch.dtype, tuple[int, ...]]


def array_of(tensor: Tensor) -> Stored:
    """A tensor on the host as an array, or its bytes, dtype and shape (numpy has no bfloat16)."""
    held = tensor.contiguous()
    try:
        return np.asarray(held.numpy(force=True))
    except TypeError:
        return held.view(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def tensor_of(stored: Stored) -> Tensor:
    """The tensor over the same memory.

    >>> tensor_of(array_of(torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16))).tolist()
    [[1.5], [2.5]]
    """
    if isinstance(stored, np.ndarray):
        return over(stored)
    held, dtype, shape = stored
    return over(held).view(dtype).view(shape) if held.size else torch.empty(shape, dtype=dtype)


def over(array: NDArray[Any]) -> Tensor:
    """A tensor over the memory of an array, which may be read-only: torch cannot mark it so."""
    _warn_now()
    return torch.from_numpy(array)


@cache
def _warn_now() -> None:
    """torch warns of read-only memory once, and never after this."""
    held = np.zeros(1)
    held.flags.writeable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        torch.from_numpy(held)
