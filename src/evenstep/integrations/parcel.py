"""Parcel: a step on its way from one process to another, with all its tensors in one piece.

torch sends every tensor as shared memory of its own, which takes an open file and a handshake each:
half a millisecond, and a step of a few hundred micro-batches runs out of files. So a step has its
tensors laid into one, one after the other; on the other side each is a tensor of its own over the
same memory.
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

_ALIGN = 64  # bytes: where a tensor of any type may begin, and a line of the cache does
_KINDS = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


def register() -> None:
    """Let steps go through queues of `torch.multiprocessing` in one piece."""
    ForkingPickler.register(Step, lambda step: Parcel(step).__reduce__())


class Parcel:
    """A step, wrapped. Sent, it arrives as the step.

    Wrapping is what can fail, for want of memory or because something cannot be pickled. A queue
    would do it in a thread of its own, which prints the error and drops the step.
    """

    def __init__(self, step: Step) -> None:
        file = io.BytesIO()
        wrapper = _Wrapper(file)
        wrapper.dump({field.name: getattr(step, field.name) for field in fields(step)})
        contents = torch.empty(wrapper.size, dtype=torch.uint8, device="cpu")
        if wrapper.size:
            contents.share_memory_()
        for slip, tensor in zip(wrapper.slips, wrapper.tensors, strict=True):
            slip.of(contents).copy_(tensor)
        self._parts = (file.getvalue(), wrapper.slips, contents)

    def __reduce__(self) -> tuple[Callable[..., Step], tuple[bytes, list[Slip], Tensor]]:
        return opened, self._parts


def opened(wrapped: bytes, slips: list[Slip], contents: Tensor) -> Step:
    """The step of a parcel."""
    return Step(**_Opener(wrapped, [slip.of(contents) for slip in slips]).load())


@dataclass(frozen=True, slots=True)
class Slip:
    """Where a tensor lies in the parcel."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, contents: Tensor) -> Tensor:
        """The tensor itself. No view: whoever pickles one would pickle the whole parcel."""
        count = math.prod(self.shape)
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        memory = contents.numpy()
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


class _Wrapper(ForkingPickler):
    """Pickles as torch's queues do, but takes plain tensors out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.slips: list[Slip] = []
        self.size = 0

    def reducer_override(self, value: Any) -> Any:
        """Asked once for each object that is not of a built-in type."""
        if not _is_plain(value):
            return NotImplemented
        self.slips.append(Slip(self.size, value.dtype, tuple(value.shape)))
        self.tensors.append(value)
        self.size += math.ceil(value.nbytes / _ALIGN) * _ALIGN
        return _tensor, (len(self.tensors) - 1,)


class _Opener(pickle.Unpickler):
    def __init__(self, wrapped: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(wrapped))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        here = (module, name) == (__name__, _tensor.__name__)
        return self._tensors.__getitem__ if here else super().find_class(module, name)


def _tensor(number: int) -> Tensor:
    raise AssertionError(f"tensor {number} is outside its parcel")


def _is_plain(value: Any) -> bool:
    """Whether the numbers say it all: an expanded tensor would grow, and a transposed one, a
    subclass or a leaf would come as something else."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dtype in _KINDS
        and not (value.requires_grad or value.is_nested)
        and (value.is_contiguous() or _is_slice(value))
    )


def _is_slice(value: Tensor) -> bool:
    """Whether it is in order of memory, with gaps at most, as x[:, 1:] is."""
    strides = value.stride()
    return strides[-1] == 1 and all(outer >= inner for outer, inner in pairwise(strides))
