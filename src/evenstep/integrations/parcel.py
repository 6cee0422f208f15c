"""Parcel: sends a step to another process with all its tensors in one block of shared memory.

torch sends every tensor in shared memory of its own. Each needs an open file and a handshake (half
a millisecond), and a step of a few hundred micro-batches exceeds the limit on open files. A parcel
copies all tensors into one block. The receiver gets separate tensors over the same memory.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from evenstep.core.step import Step

_ALIGN = 64  # bytes: suits any dtype, and the size of a cache line
_DTYPES = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


def register() -> None:
    """Let queues of `torch.multiprocessing` send steps as parcels, in this process.

    Loaders call it in their workers, so that importing this module has no effect on pickling.
    """
    ForkingPickler.register(Step, lambda step: Parcel(step).__reduce__())


class Parcel:
    """A pickled step. Unpickling it gives the step.

    The constructor pickles, so that its errors (out of memory, something that cannot be pickled)
    are raised to the caller. A queue pickles in a thread, which prints errors and drops the step.
    """

    def __init__(self, step: Step) -> None:
        file = io.BytesIO()
        pickler = _TensorPickler(file)
        pickler.dump({field.name: getattr(step, field.name) for field in fields(step)})
        memory = torch.empty(pickler.size, dtype=torch.uint8, device="cpu")
        if pickler.size:
            memory.share_memory_()
        for span, tensor in zip(pickler.spans, pickler.tensors, strict=True):
            span.of(memory).copy_(tensor)
        self._arguments = (file.getvalue(), pickler.spans, memory)

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[bytes, list[TensorSpan], Tensor]]:
        return unpacked, self._arguments


def unpacked(pickled: bytes, spans: list[TensorSpan], memory: Tensor) -> Step:
    """The step in a parcel."""
    return Step(**_TensorUnpickler(pickled, [span.of(memory) for span in spans]).load())


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor is in the memory of a parcel."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """The tensor over this memory. Not a view: pickling a view would pickle all of it."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


class _TensorPickler(ForkingPickler):
    """Pickles as torch's queues do, but collects plain tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.spans: list[TensorSpan] = []
        self.size = 0

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle once for each object that is not of a built-in type."""
        if not _is_plain(value):
            return NotImplemented
        self.spans.append(TensorSpan(self.size, value.dtype, tuple(value.shape)))
        self.tensors.append(value)
        self.size += math.ceil(value.nbytes / _ALIGN) * _ALIGN
        return _tensor, (len(self.tensors) - 1,)


class _TensorUnpickler(pickle.Unpickler):
    """Puts the collected tensors back."""

    def __init__(self, pickled: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        here = (module, name) == (__name__, _tensor.__name__)
        return self._tensors.__getitem__ if here else super().find_class(module, name)


def _tensor(number: int) -> Tensor:
    raise AssertionError(f"tensor {number} was unpickled without its parcel")


def _is_plain(value: Any) -> bool:
    """Whether copying the values preserves the tensor. Not so for expanded tensors, which would
    grow, nor for transposed ones, subclasses and leaves, which would change."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype in _DTYPES
        and not (value.requires_grad or value.is_nested)
        and (value.is_contiguous() or _is_slice(value))
    )


def _is_slice(value: Tensor) -> bool:
    """Whether its elements are in memory order, possibly with gaps, as in x[:, 1:]."""
    strides = value.stride()
    return strides[-1] == 1 and all(outer >= inner for outer, inner in pairwise(strides))
