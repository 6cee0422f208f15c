"""Layers that carry state from token to token, run on rows of one segment each.

A causal layer does not look to the right, so it is exact on right-padded rows. Outside of such a
layer, a mixer, the batch stays packed; its inputs are gathered into rows, its outputs are put back:

    packed   a a a b c c .        rows   a a a
                                         b - -
                                         c c -

Where the kernels of a mixer can keep packed segments apart, it runs packed instead: by their own
keyword arguments, or because `packed_kernels` has one that does.

`run_on_rows` wraps the mixers of a model. The segments belong to the call: the outermost module
reads them from its arguments, and a layer that a checkpoint recomputes in the backward finds those
of its own forward by the storages of its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FrameType, FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from evenstep.errors import ConfigError
from evenstep.integrations.packed_kernels import (
    CHUNK,
    Chunks,
    chunks_of,
    convolve,
    delta_rule,
    spaced,
)

KEYWORD = "segment_slots"
"""The keyword argument with the segments of a batch: (2, segments), first slot and length. The
outermost module takes it away before its forward runs."""
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

_REGISTERED: dict[str, bool] = {}


def register_mixer(name: str | type, *, equal_lengths: bool = False) -> None:
    """Run all modules of this class on rows of one segment each, in every model that is packed.

    For layers whose state a few small forwards do not show. With `equal_lengths`, rows are not
    padded: for layers that select tokens, where padding may change what is selected.

    >>> register_mixer("MyRecurrence")
    """
    _REGISTERED[name if isinstance(name, str) else name.__name__] = equal_lengths


def without_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without what tells kernels where packed segments end, which does not hold on rows."""
    return {name: value for name, value in kwargs.items() if name not in _BOUNDARIES}


def class_of(module: nn.Module) -> type:
    """The class of a module as it was written, not the one that fully_shard makes of it."""
    bases = type(module).__mro__
    return next(base for base in bases if "torch.distributed" not in base.__module__)


def registered_in(model: nn.Module) -> list[str]:
    """The registered classes that a model has modules of."""
    kinds = {class_of(module).__name__ for module in model.modules()} if _REGISTERED else set()
    return [name for name in _REGISTERED if name in kinds]


def equal_lengths(name: str) -> bool:
    """Whether the class was registered to run on rows of equal length."""
    return _REGISTERED.get(name, False)


# Rows of segments ---------------------------------------------------------------------------------

STEP_SLOTS = 4
"""Padded slots that take as long as one token more in the longest row of a call: a recurrence runs
token after token, or chunk after chunk, however many rows there are."""


class Rows(NamedTuple):
    """Some segments in rows of one width. `slots` are those of the packed batch that each place
    holds, (rows, width); padding repeats the first of its row."""

    slots: Tensor
    inside: Tensor  # (rows, width) bool
    first: Tensor  # (rows,) the first slot of each
    places: Tensor  # (tokens,) of all real places, row by row

    @classmethod
    def of(cls, begins: Tensor, lengths: Tensor, width: int) -> Rows:
        """From first slots and lengths."""
        place = torch.arange(width, device=begins.device)
        inside = place < lengths[:, None]
        slots = torch.where(inside, begins[:, None] + place, begins[:, None])
        return cls(slots, inside, begins, inside.flatten().nonzero()[:, 0])

    def token_slots(self) -> Tensor:
        """(tokens,) the slots of all real places."""
        return self.slots.flatten()[self.places]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRows:
    """Where the segments of a packed batch of rows × width slots lie."""

    rows: int
    width: int
    begins: list[int]
    lengths: list[int]
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, make: Callable[..., Any], *key: Any) -> Any:
        """What `make(self, *key)` returns, made once."""
        if (make, *key) not in self._made:
            self._made[make, *key] = make(self, *key)
        return self._made[make, *key]

    @classmethod
    def read(cls, segments: Tensor, rows: int, width: int) -> SegmentRows:
        """From (2, segments), first slots and lengths. Segments without tokens are left out."""
        begins, lengths = segments.tolist()
        pairs = [(b, n) for b, n in zip(begins, lengths, strict=True) if n > 0]
        return cls(rows, width, [b for b, _ in pairs], [n for _, n in pairs])

    @property
    def whole(self) -> bool:
        """Whether every segment is a row of its own already."""
        return all(b % self.width == 0 for b in self.begins)

    def groups(self, device: torch.device, equal: bool, single: bool) -> list[Rows]:
        """All segments in groups of rows: without padding if `equal`, all in one if `single`."""
        lengths, begins = torch.tensor([self.lengths, self.begins], device=device)
        parts = row_groups(self.lengths, self.rows * self.width, equal, single)
        return [Rows.of(begins[part], lengths[part], self.lengths[part[0]]) for part in parts]

    def chunks(self, device: torch.device) -> Chunks:
        """All segments in chunks, for the delta rule."""
        return chunks_of(self.begins, self.lengths, self.rows * self.width, device)

    def spaced(self, device: torch.device, space: int) -> tuple[Tensor, int]:
        """Where slots are with empty places before each segment, and how many places there are."""
        places = spaced(self.begins, self.lengths, self.rows * self.width, space)
        return places.to(device), int(places[-1]) + 1

    def keywords(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments that tell fast kernels of one row where segments end. Padding is a
        segment as well."""
        slots = self.rows * self.width
        places = spaced(self.begins, self.lengths, slots, 1) - torch.arange(slots) - 1
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), places.bincount().cumsum(0)))
        longest = int(ends.diff().max())
        ends = ends.to(device, torch.int32)
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": places.to(device, torch.int32)[None],
        }


def row_groups(
    lengths: list[int], most: int, equal: bool = False, single: bool = False
) -> list[list[int]]:
    """Segments by group, the longest first. A group takes its padded slots, and `STEP_SLOTS` for
    each token of its longest; all groups together take the least, none above `most` slots.

    >>> row_groups([900, 3, 2, 880], 2000)
    [[0, 3], [1, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
    if single:
        return [order]
    if equal:
        by_length: dict[int, list[int]] = {}
        for k in order:
            by_length.setdefault(lengths[k], []).append(k)
        return list(by_length.values())
    widths = np.array([lengths[k] for k in order], np.int64)
    least = np.zeros(len(order) + 1)  # of the segments from each on
    ends = np.zeros(len(order), np.int64)
    for begin in range(len(order) - 1, -1, -1):
        counts = np.arange(1, len(order) - begin + 1)
        counts = counts[: max(1, most // widths[begin])]
        total = (counts + STEP_SLOTS) * widths[begin] + least[begin + counts]
        best = int(total.argmin())
        least[begin], ends[begin] = total[best], begin + counts[best]
    groups, begin = [], 0
    while begin < len(order):
        groups.append(order[begin : ends[begin]])
        begin = int(ends[begin])
    return groups


# The segments of a call ---------------------------------------------------------------------------


class _Frame(NamedTuple):
    segments: SegmentRows | None  # None inside mixers, and for a call without boundaries
    outer: _Frame | None
    backward: int  # the one that it belongs to, or `_NOT`
    call: FrameType | None = None  # of Python; no hook follows one that is interrupted
    packed: bool = False  # inside a mixer whose kernels get packed rows


_NOT = -1

_FRAME: ContextVar[_Frame | None] = ContextVar("segments", default=None)
_CALLS: dict[int, tuple[StorageWeakRef, SegmentRows | None, bool]] = {}
"""By storage of an argument: the segments of its call, and whether other calls had it as well.
A weak reference keeps the address from being used again."""


def _backward() -> int:
    """The number of the backward that runs, or `_NOT`."""
    return int(torch._C._current_graph_task_id())


def _python_calls() -> Iterator[FrameType]:
    """The Python calls around this module, the innermost first."""
    call: FrameType | None = sys._getframe(1)
    while call is not None:
        if call.f_globals.get("__name__") not in (__name__, "torch._dynamo.eval_frame"):
            yield call
        call = call.f_back


def _current() -> _Frame | None:
    """The frame of the innermost call that still runs."""
    frame = _FRAME.get()
    if frame is None:
        return None
    calls = set(_python_calls())
    while frame is not None and frame.call not in calls:
        frame = frame.outer
    return frame


def _frame_of(*values: Any) -> _Frame | None:
    """The frame of a module with these arguments. In a backward it is that of a forward which runs
    in there, else that of its own forward, which is recomputed."""
    frame, backward = _current(), _backward()
    if frame is not None and frame.backward == backward:
        _remember(frame.segments, *values)
        return frame
    return None if backward == _NOT else _recall(*values)


def _push(segments: SegmentRows | None, backward: int, packed: bool = False) -> None:
    _FRAME.set(_Frame(segments, _current(), backward, next(_python_calls()), packed))


def _pop() -> None:
    frame = _FRAME.get()
    _FRAME.set(None if frame is None else frame.outer)


def _storages(*values: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(values):
        if type(leaf) in (Tensor, nn.Parameter) and leaf.device.type != "meta":
            yield leaf.untyped_storage()


def _remember(segments: SegmentRows | None, *values: Any) -> None:
    for storage in _storages(*values):
        known = _CALLS.get(storage._cdata)
        shared = known is not None and (known[2] or known[1] is not segments)
        _CALLS[storage._cdata] = (StorageWeakRef(storage), segments, shared)


def _recall(*values: Any) -> _Frame | None:
    """The frame of the forward that had these arguments."""
    for storage in _storages(*values):
        known = _CALLS.get(storage._cdata)
        if known is not None and not known[2]:
            return _Frame(known[1], None, _backward())
    return None


def _forget() -> None:
    """Drop what belongs to tensors that are gone."""
    for key, (weak, _, _) in list(_CALLS.items()):  # other threads add and drop as well
        if weak.expired():
            _CALLS.pop(key, None)


def _segments_given(args: Any, kwargs: dict[str, Any]) -> SegmentRows | None:
    """The segments that a call is given. Takes the keyword away."""
    segments = kwargs.pop(KEYWORD, None)
    ends, mask = kwargs.get("cu_seq_lens_q"), kwargs.get("attention_mask")
    if segments is None and ends is not None and mask is None:
        segments = torch.stack((ends[:-1], ends.diff()))
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if segments is None or not isinstance(tokens, Tensor):
        return None
    return SegmentRows.read(segments, *tokens.shape[:2])


def _enter(args: Any, kwargs: dict[str, Any], outermost: bool = False) -> tuple[Any, Any]:
    """The segments of a call of a module around mixers: those that it is given, those of the call
    around it, or of its own forward if that is recomputed."""
    given, backward = KEYWORD in kwargs, _backward()
    frame = None if given else _frame_of(args, kwargs)
    if frame is not None:
        _push(frame.segments, frame.backward)
    elif given or outermost or backward == _NOT:
        segments = _segments_given(args, kwargs)
        _forget()
        _push(segments, backward)
        _remember(segments, args, kwargs)
    else:  # a frame of no backward: what is inside looks for its own forward
        _push(None, _NOT)
    return args, kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter_model(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _enter(args, kwargs, outermost=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave_model(module: nn.Module, args: Any, output: Any) -> None:
    _pop()


def _enter_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """A base model may be called by itself, and a recomputation may begin at any module."""
    if not torch.compiler.is_compiling():
        return _enter(args, kwargs)
    if KEYWORD in kwargs:
        raise ConfigError(
            f"{class_of(module).__name__} is compiled and called by itself with {KEYWORD}. "
            f"Compile and call the whole model."
        )
    return None


def _leave_layer(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        _pop()


# Mixers -------------------------------------------------------------------------------------------


class Axes(NamedTuple):
    """Which axes of a tensor are those of rows (None if slots are flat) and of slots in a row."""

    row: int | None
    width: tuple[int, ...]

    @classmethod
    def of(cls, shape: Iterable[int], width: int) -> Axes | None:
        """Of a tensor of one row; None if no axis has the width."""
        sizes = list(shape)
        at = tuple(axis for axis, size in enumerate(sizes) if size == width)
        if not at:
            return None
        if at[0] == 0:
            return cls(None, at[:1])
        return cls(0 if sizes[0] == 1 else at[0] - 1, at[:2])


Mode: TypeAlias = Literal["keywords", "kernels", "rows"]
"""How a mixer keeps segments apart: its kernels take boundaries as keyword arguments, they are
replaced by those of `packed_kernels`, or it runs on rows of one segment each."""


@dataclass(slots=True, eq=False)
class Mixer:
    """How a module runs: on rows, by the axes of its arguments and results (by their paths), or
    packed."""

    axes: dict[str, Axes | None] = field(default_factory=dict)
    equal: bool = False  # rows of equal lengths only
    mode: Mode = "rows"

    def axes_of(self, path: str, tensor: Tensor, segments: SegmentRows) -> Axes | None:
        """The axes that a small forward showed, else those that have the sizes of the batch."""
        known = self.axes.get(path)
        if known is not None and tensor.shape[known.width[0]] in (
            segments.width,
            segments.rows * segments.width,
        ):
            return known
        return Axes.of(tensor.shape, segments.width) if path not in self.axes else None


def leaves_of(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """All leaves of nested tuples, lists and dicts with their paths, and how they are nested."""
    leaves, spec = pytree.tree_flatten_with_path(value)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves], spec


def _runs_once(module: nn.Module, mixer: Mixer) -> bool:
    """Whether parts of a mixer communicate: groups differ between ranks, so they must run once."""
    once = any(isinstance(part, FSDPModule) for part in module.modules() if part is not module)
    if once and mixer.equal:
        raise ConfigError(
            f"fully_shard must be called on whole layers, not on parts of "
            f"{class_of(module).__name__}: it selects tokens, so it runs once for each length of "
            f"segments, and all ranks must run sharded parts equally often."
        )
    return once


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward_on_rows(module: Any, mixer: Mixer, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a mixer. It is not compiled: the shapes of rows differ from batch to batch,
    and recurrences would be unrolled."""
    if getattr(module, "_evenstep_mixer", None) is not mixer:  # it was released
        return forward(*args, **kwargs)
    frame = _frame_of(args, kwargs)
    if frame is None and _backward() != _NOT:
        raise ConfigError(
            f"{class_of(module).__name__} is recomputed in the backward, and its boundaries are "
            f"not found: its layer gets none of the tensors of its forward. Checkpoint whole "
            f"layers, without moving their inputs to another device."
        )
    if frame is None or frame.segments is None:
        return forward(*args, **kwargs)
    kwargs, segments = without_boundaries(kwargs), frame.segments
    if segments.begins and mixer.mode == "kernels":
        return _with_kernels(module, forward, frame, args, kwargs)
    single = _runs_once(module, mixer)
    if not segments.begins or (segments.whole and not mixer.equal):
        return forward(*args, **kwargs)
    if mixer.mode == "keywords" and segments.rows == 1:
        device = next(module.parameters()).device
        return forward(*args, **kwargs, **segments.once(SegmentRows.keywords, device))
    leaves, spec = leaves_of((args, kwargs))
    axes = [
        mixer.axes_of(path, leaf, segments) if isinstance(leaf, Tensor) else None
        for path, leaf in leaves
    ]
    device = next((leaf.device for _, leaf in leaves if isinstance(leaf, Tensor)), None)
    if device is None or not any(axes):
        return forward(*args, **kwargs)
    groups: list[Rows] = segments.once(SegmentRows.groups, device, mixer.equal, single)
    results = []
    _push(None, frame.backward)  # what is inside gets rows
    try:
        for number, rows in enumerate(groups):
            gathered = [
                leaf.tensors[number]
                if isinstance(leaf, RowResults) and leaf.groups is groups
                else (leaf if axis is None else _gather(leaf, axis, rows, segments))
                for (_, leaf), axis in zip(leaves, axes, strict=True)
            ]
            row_args, row_kwargs = pytree.tree_unflatten(gathered, spec)
            results.append(forward(*row_args, **row_kwargs))
    finally:
        _pop()
    return _put_back(module, mixer, results, groups, segments)


def _gather(tensor: Tensor, axes: Axes, rows: Rows, segments: SegmentRows) -> Tensor:
    """A tensor of packed slots as one of rows."""
    if axes.row is None:
        return tensor.index_select(0, rows.slots.flatten())
    if len(axes.width) == 2:
        return _gather_pairs(tensor, axes, rows, segments)
    tensor = tensor.movedim((axes.row, axes.width[0]), (0, 1))
    slots = rows.slots % segments.width if tensor.shape[0] == 1 else rows.slots
    taken = tensor.flatten(0, 1).index_select(0, slots.flatten()).unflatten(0, slots.shape)
    taken = taken.movedim((0, 1), (axes.row, axes.width[0]))
    return _ruled(taken, tensor)


def _gather_pairs(tensor: Tensor, axes: Axes, rows: Rows, segments: SegmentRows) -> Tensor:
    """A tensor of pairs of slots, as a mask of attention; real tokens do not see padding."""
    moved = tensor.movedim((axes.row or 0, *axes.width), (0, 1, 2))
    row, at = rows.first // segments.width % moved.shape[0], rows.slots % segments.width
    taken = moved[row[:, None, None], at[:, :, None], at[:, None, :]]
    hidden = (rows.inside[:, :, None] & ~rows.inside[:, None, :]).view(
        *taken.shape[:3], *[1] * (taken.ndim - 3)
    )
    if tensor.dtype == torch.bool or tensor.is_floating_point():
        least = torch.finfo(tensor.dtype).min if tensor.is_floating_point() else False
        taken = taken.masked_fill(hidden, least)
    return taken.movedim((0, 1, 2), (axes.row or 0, *axes.width))


def _ruled(taken: Tensor, tensor: Tensor) -> Tensor:
    """With the rule that a mask of our attention carries."""
    rule = getattr(tensor, "_evenstep_rule", None)
    if rule is not None:
        taken._evenstep_rule = rule
    return taken


@dataclass(frozen=True, slots=True, eq=False)
class RowResults:
    """What a mixer returned for each group of rows and other code only hands on, such as indices of
    tokens in a row for the next mixer, weights of attention, or a last state."""

    tensors: list[Tensor]
    groups: list[Rows]


def is_of_tokens(tensor: Tensor, axes: Axes | None) -> bool:
    """Whether a result holds values of each token, which can be put back into packed rows."""
    return tensor.is_floating_point() and axes is not None and len(axes.width) == 1


def _put_back(
    module: Any, mixer: Mixer, results: list[Any], groups: list[Rows], segments: SegmentRows
) -> Any:
    """The results of all groups at the slots of their tokens, zeros elsewhere."""
    slots = torch.cat([rows.token_slots() for rows in groups])
    leaves, spec = leaves_of(results[0])
    others = [leaves_of(result)[0] for result in results]
    merged = []
    for number, (path, leaf) in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            merged.append(leaf)
            continue
        axes = mixer.axes.get(f"result{path}")
        if axes is None or not is_of_tokens(leaf, axes):
            merged.append(RowResults([other[number][1] for other in others], groups))
            continue
        tokens = torch.cat(
            [
                _tokens_of(other[number][1], axes, rows)
                for other, rows in zip(others, groups, strict=True)
            ]
        )
        packed = tokens.new_zeros((segments.rows * segments.width, *tokens.shape[1:]))
        packed = packed.index_copy_(0, slots, tokens)
        if axes.row is not None:
            packed = packed.unflatten(0, (segments.rows, segments.width))
            packed = packed.movedim((0, 1), (axes.row, axes.width[0]))
        merged.append(packed)
    return pytree.tree_unflatten(merged, spec)


def _tokens_of(tensor: Tensor, axes: Axes, rows: Rows) -> Tensor:
    """(tokens, ...) of the real places of rows."""
    if axes.row is not None:
        tensor = tensor.movedim((axes.row, axes.width[0]), (0, 1)).flatten(0, 1)
    return tensor.index_select(0, rows.places)


# Kernels for packed rows --------------------------------------------------------------------------


def _with_kernels(module: Any, forward: Any, frame: _Frame, args: Any, kwargs: Any) -> Any:
    """The forward of a mixer whose kernels read the segments of its call."""
    home = sys.modules[class_of(module).__module__]
    for name, packed in _KERNELS.items():
        kernel = getattr(home, name, None)
        if isinstance(kernel, FunctionType) and not hasattr(kernel, "_evenstep_kernel"):
            setattr(home, name, _reads_segments(kernel, packed))
    _push(frame.segments, frame.backward, packed=True)
    try:
        return forward(*args, **kwargs)
    finally:
        _pop()


def _reads_segments(kernel: Callable[..., Any], packed: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which inside of a packed mixer is another function."""

    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        frame = None if torch.compiler.is_compiling() else _current()
        if frame is None or not frame.packed:
            return kernel(*args, **kwargs)
        return packed(kernel, frame.segments, *args, **kwargs)

    run._evenstep_kernel = packed  # type: ignore[attr-defined]
    return run


def _packed_convolution(
    kernel: Callable[..., Tensor], segments: SegmentRows, inputs: Tensor, weight: Tensor,
    bias: Tensor | None = None, activation: str | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    places, end = segments.once(SegmentRows.spaced, inputs.device, weight.shape[-1] - 1)
    run = partial(kernel, weight=weight, bias=bias, activation=activation)
    return convolve(run, inputs, places, end)


def _packed_delta_rule(
    kernel: Callable[..., Any], segments: SegmentRows, query: Tensor, key: Tensor, value: Tensor,
    g: Tensor, beta: Tensor, chunk_size: int = CHUNK, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if initial_state is not None or output_final_state:
        raise ConfigError("packed segments have no state before or after them. Use no cache.")
    chunks = segments.once(SegmentRows.chunks, query.device)
    return delta_rule(query, key, value, g, beta, chunks, use_qk_l2norm_in_kernel), None


_KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _packed_convolution,
    "torch_chunk_gated_delta_rule": _packed_delta_rule,
}
"""Functions of transformers, which many of its modules have, and ours for packed rows."""


# Wrapping -----------------------------------------------------------------------------------------


def mixers_of(model: Any) -> dict[str, Any]:
    """The modules of a transformers model that run on rows, by name."""
    return {
        name: module for name, module in model.named_modules() if hasattr(module, "_evenstep_mixer")
    }


def has_mixers(model: Any) -> bool:
    """Whether modules of a transformers model, or of a part of one, run on rows."""
    return "_evenstep_handles" in model.__dict__


def run_on_rows(model: Any, mixers: Mapping[str, Mixer]) -> None:
    """Run these modules of a model on rows of one segment each whenever a batch is packed."""
    release(model)
    around = {model: (_enter_model, _leave_model)}
    for name, mixer in mixers.items():
        module = model.get_submodule(name)
        _runs_once(module, mixer)
        module._evenstep_mixer = mixer
        module.forward = partial(_forward_on_rows, module, mixer, module.forward)
        while name := name.rpartition(".")[0]:
            around.setdefault(model.get_submodule(name), (_enter_layer, _leave_layer))
    for module, (enter, leave) in around.items():
        module._evenstep_handles = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]


def release(model: Any) -> None:
    """Undo `run_on_rows`. A forward that others put around ours stays, and ours runs the one inside
    of it."""
    for module in mixers_of(model).values():
        wrapped = module.__dict__.get("forward")
        if isinstance(wrapped, partial) and wrapped.func is _forward_on_rows:
            forward = wrapped.args[2]
            if getattr(forward, "__func__", None) is getattr(type(module), "forward", 0):
                del module.__dict__["forward"]
            else:
                module.forward = forward
        del module._evenstep_mixer
    for module in model.modules():
        for handle in module.__dict__.pop("_evenstep_handles", ()):
            handle.remove()
