"""Parcel: a step on its way from one process to another, with all its tensors in one piece.

torch sends every tensor as shared memory of its own, which takes an open file and a handshake each:
half a millisecond, and a step of a few hundred micro-batches runs out of files. So a step that
goes through a queue of torch's has its tensors laid into one, one after the other, and on the
other side they are views of it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from evenstep.core.step import Step

_ALIGN = 64  # bytes: where a tensor of any type may begin, and a line of the cache does


def register() -> None:
    """Let steps go through queues of `torch.multiprocessing` in one piece."""
    ForkingPickler.register(Step, _wrap)


@dataclass(frozen=True, slots=True)
class Slip:
    """Where a tensor lies in the parcel."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, contents: Tensor) -> Tensor:
        """The tensor itself, as a view."""
        size = self.dtype.itemsize * torch.Size(self.shape).numel()
        return contents[self.start : self.start + size].view(self.dtype).view(self.shape)


class _Wrapper(ForkingPickler):
    """Pickles as torch's queues do, but takes plain tensors out, each of them once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.slips: list[Slip] = []
        self.size = 0
        self._numbers: dict[int, int] = {}  # by id, which holds while the tensor is in the list

    def persistent_id(self, value: Any) -> int | None:
        if not _is_plain(value):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.slips.append(Slip(self.size, value.dtype, tuple(value.shape)))
            self.size += -(-value.nbytes // _ALIGN) * _ALIGN
        return self._numbers[id(value)]


class _Opener(pickle.Unpickler):
    def __init__(self, wrapped: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(wrapped))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _is_plain(value: Any) -> bool:
    """Whether nothing is lost when the numbers alone are copied, and nothing gained."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_quantized
    )


def _wrap(step: Step) -> Any:
    file = io.BytesIO()
    wrapper = _Wrapper(file)
    wrapper.dump({field.name: getattr(step, field.name) for field in fields(step)})
    contents = torch.empty(wrapper.size, dtype=torch.uint8)
    for slip, tensor in zip(wrapper.slips, wrapper.tensors, strict=True):
        slip.of(contents).copy_(tensor)
    return _open, (file.getvalue(), wrapper.slips, contents)


def _open(wrapped: bytes, slips: list[Slip], contents: Tensor) -> Step:
    return Step(**_Opener(wrapped, [slip.of(contents) for slip in slips]).load())
