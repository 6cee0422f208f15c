"""Boundaries from what a transformers model hands to its attention."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import ConfigError
from evenstep.tensors.batch import Boundaries

PLANES = (3, 4)
"""Leading sizes of the position ids of multimodal RoPE: temporal, height, width; text before."""


@dataclass(frozen=True, slots=True, eq=False)
class Hints:
    """What says where segments begin and end in rows × width slots.

    cu_seqlens  boundaries over all slots, row by row
    longest     at least the length of the longest segment, or None
    padding     (rows, width) True for tokens, False for padding
    positions   (rows, width) or (planes, rows, width); they restart with each segment
    """

    rows: int
    width: int
    device: torch.device
    cu_seqlens: Tensor | None = None
    longest: int | None = None
    padding: Tensor | None = None
    positions: Tensor | None = None

    def boundaries(self) -> Boundaries:
        """The boundaries, computed once per batch: all layers pass the same tensors."""
        self._check()
        if torch.compiler.is_compiling():
            return _traced(self)
        given = (self.cu_seqlens, self.padding, self.positions)
        found = _recall(given, self.rows, self.width)
        if found is None:
            found = _read(self)
            _remember(given, found)
        return found

    def _check(self) -> None:
        shape = (self.rows, self.width)
        if self.padding is not None and tuple(self.padding.shape) != shape:
            raise ConfigError(
                f"the attention mask has shape {tuple(self.padding.shape)}, but the queries are "
                f"{self.rows} rows of {self.width} tokens. Pass a mask of that shape, without a "
                f"cache or a prefix."
            )
        at = self.positions
        if at is None:
            return
        fits = at.ndim in (2, 3) and at.shape[-1] == self.width and at.shape[-2] in (1, self.rows)
        if not fits or (at.ndim == 3 and at.shape[0] not in PLANES):
            raise ConfigError(
                f"position_ids has shape {tuple(at.shape)}, expected {shape} or 3 or 4 planes of "
                f"that. Pass one position per token."
            )

    def restarts(self) -> Tensor:
        """(rows, width) bool: slots whose position does not continue that of the slot before."""
        assert self.positions is not None
        at = self.positions
        if at.ndim == 3 and at.shape[0] == 4:
            at = at[0]  # text positions
        if at.ndim == 3:
            # Within a sample the planes of an image stand still and jump. They are all 0 only at
            # the beginning, and time never runs backwards.
            begins = (at == 0).all(0)
            begins[:, 1:] |= at[0].diff(dim=1) < 0
        else:
            begins = torch.zeros_like(at, dtype=torch.bool)
            begins[:, 1:] = at.diff(dim=1) != 1
        return begins.expand(self.rows, -1)


def _whole_rows(hints: Hints) -> Boundaries:
    ends = torch.arange(hints.rows + 1, device=hints.device, dtype=torch.int32) * hints.width
    return Boundaries(hints.rows, hints.width, ends, hints.width)


def _read(hints: Hints) -> Boundaries:
    """Boundaries with the number of segments read on the host."""
    rows, width, ends = hints.rows, hints.width, hints.cu_seqlens
    if ends is not None:
        ends = ends.to(hints.device, torch.int32)
        _check_ends(ends, rows, width)
        if hints.padding is None:
            return Boundaries(rows, width, ends, hints.longest or int(ends.diff().max()))
    if hints.padding is None and hints.positions is None:
        return _whole_rows(hints)
    begins = torch.zeros(rows, width, dtype=torch.bool, device=hints.device)
    begins[:, 0] = True
    if ends is not None:
        begins.view(-1)[ends[:-1][ends.diff() > 0].long()] = True
    elif hints.positions is not None and hints.padding is None:
        begins |= hints.restarts()
    real = None
    if hints.padding is not None:
        begins, real = _split_padding(hints, begins)
    first = begins.view(-1).nonzero().flatten()
    real = None if real is None else real.reshape(-1)[first]
    ends = torch.cat((first, first.new_tensor([rows * width]))).to(torch.int32)
    return Boundaries(rows, width, ends, int(ends.diff().max()), real)


def _split_padding(hints: Hints, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Padding becomes tiles of its own. Refuses tokens of one segment on both sides of padding."""
    assert hints.padding is not None
    real = hints.padding.bool()
    if hints.positions is not None and hints.cu_seqlens is None:
        # A position that goes back, or stays at the first of its row, begins a segment. A jump need
        # not, nor a repetition: some models pass the temporal plane, which stands still in images.
        at = hints.positions[0] if hints.positions.ndim == 3 else hints.positions
        both = real[:, 1:] & real[:, :-1]
        if hints.positions.ndim == 3 and len(hints.positions) == 3:
            begins[:, 1:] |= hints.restarts()[:, 1:] & both
        else:
            at, step = at.expand_as(real), at.diff(dim=1)
            first = at.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
            begins[:, 1:] |= ((step < 0) | ((step == 0) & (at[:, 1:] == first))) & both
    segment = begins.view(-1).cumsum(0)
    changes = torch.zeros_like(begins)
    changes[:, 1:] = real[:, 1:] != real[:, :-1]
    tiles = begins | changes
    runs = torch.bincount(segment[(tiles & real).view(-1)])
    if bool((runs > 1).any()):
        raise ConfigError(
            "the attention mask has padding between the tokens of a sequence. Pad on the left or "
            "on the right."
        )
    return tiles, real


def _check_ends(ends: Tensor, rows: int, width: int) -> None:
    slots = rows * width
    if ends.ndim != 1 or len(ends) < 2:
        raise ConfigError(
            f"cu_seq_lens_q has shape {tuple(ends.shape)}, expected (segments + 1,). Pass "
            f"Batch.cu_seqlens."
        )
    if ends.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    begins = torch.arange(rows, device=ends.device) * width
    inside = torch.isin(begins, ends).all() & (ends.diff() >= 0).all()
    # One transfer from the device.
    first, last, fits = torch.stack((ends[0], ends[-1], inside.to(ends.dtype))).tolist()
    if first != 0 or last != slots:
        raise ConfigError(
            f"cu_seq_lens_q ends at {last}, but there are {slots} tokens ({rows} × {width}). Give "
            f"boundaries of all tokens that the model sees, virtual ones of prompt tuning "
            f"included, or use the padded layout."
        )
    if not fits:
        raise ConfigError(
            "cu_seq_lens_q must not decrease, and every row must begin a segment. Pass "
            "Batch.cu_seqlens."
        )


# Compiled ------------------------------------------------------------------------------------


def _traced(hints: Hints) -> Boundaries:
    """Boundaries of a fixed number of tiles, some of them empty, without reading the device."""
    rows, width = hints.rows, hints.width
    slots = rows * width
    if hints.cu_seqlens is not None:
        if hints.padding is not None:
            raise ConfigError(
                "a compiled model takes cu_seq_lens_q or an attention mask, not both. Leave out "
                "the attention mask of packed rows."
            )
        torch._assert_async(
            hints.cu_seqlens[-1] == slots, "cu_seq_lens_q must end at the number of tokens"
        )
        ends = hints.cu_seqlens.to(hints.device, torch.int32)
        return Boundaries(rows, width, ends, hints.longest or width)
    if hints.padding is not None:
        real = hints.padding.bool()
        count = real.sum(1)
        first = real.long().argmax(1)
        run = torch.arange(width, device=hints.device)
        run = (run >= first[:, None]) & (run < (first + count)[:, None])
        torch._assert_async((run == real).all(), "the attention mask has padding between tokens")
        row = torch.arange(rows, device=hints.device) * width
        ends = torch.stack((row + first, row + first + count, row + width), dim=1).flatten()
        ends = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
        return Boundaries(rows, width, ends, width)
    if hints.positions is not None:
        begins = hints.restarts().clone()
        begins[:, 0] = True
        ends = torch.nonzero_static(begins.flatten(), size=slots + 1, fill_value=slots)
        return Boundaries(rows, width, ends.flatten().to(torch.int32), width)
    return _whole_rows(hints)


# Remembered ----------------------------------------------------------------------------------

_Given: TypeAlias = tuple[Tensor | None, ...]
_MOST = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """Boundaries and the tensors that they were read from, which it does not keep alive."""

    sources: tuple[Any, ...]
    versions: tuple[int, ...]
    bounds: Boundaries

    def matches(self, given: _Given) -> bool:
        same = (
            source is None if tensor is None else source is not None and source() is tensor
            for source, tensor in zip(self.sources, given, strict=True)
        )
        return all(same) and self.versions == _versions(given)


_memories: list[_Memory] = []


def _versions(given: _Given) -> tuple[int, ...]:
    """How often each tensor was changed in place."""
    return tuple(0 if t is None or t.is_inference() else t._version for t in given)


def _recall(given: _Given, rows: int, width: int) -> Boundaries | None:
    for memory in tuple(_memories):
        if (memory.bounds.rows, memory.bounds.width) == (rows, width) and memory.matches(given):
            return memory.bounds
    return None


def _remember(given: _Given, bounds: Boundaries) -> None:
    if all(tensor is None for tensor in given):
        return
    sources = tuple(None if tensor is None else weakref.ref(tensor) for tensor in given)
    alive = [m for m in _memories if all(s is None or s() is not None for s in m.sources)]
    _memories[:] = [*alive[1 - _MOST :], _Memory(sources, _versions(given), bounds)]
