"""find_budget: the largest micro-batch that fits into the memory of a device, by a few steps."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.plan import MicroBatch
from evenstep.core.text import counted, line
from evenstep.errors import ConfigError, InputError, MicroBatchError
from evenstep.tensors.batch import Batch
from evenstep.train.collectives import gather_values
from evenstep.train.framework import Framework, device_of
from evenstep.train.gradients import local_tensor
from evenstep.train.runner import Runner

Point: TypeAlias = tuple[int, float]
"""The slots of a micro-batch, and the peak of a step of such."""
_SMALLEST = 2048  # slots of the first probe, if no sample is longer
_TRIES = 6  # steps at the limit, each smaller than the one before
_LINES = 2  # the first one bends where logits begin to be divided into chunks
_CLIMBS = 16  # steps below the limit, each larger than the one before
_STEPS = 3  # of each size: the later ones find memory in the pieces that the first one leaves
_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_FRAGMENTS = (
    f"steps of this budget may run out of memory, because torch reserves memory in pieces that "
    f"cannot grow. Set {_CONF[0]}={_EXPANDABLE} before the first tensor is on the GPU."
)


class MemoryMeter(Protocol):
    """What `find_budget` asks about the memory of a device."""

    def total(self) -> float:
        """Bytes that this process may allocate, those that it has allocated included."""
        ...

    def restart(self) -> None:
        """Forget the peak so far."""
        ...

    def peak(self) -> float:
        """The most bytes that were allocated at once since the last `restart`."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """The memory of a GPU, without what other processes use of it."""

    device: torch.device

    def total(self) -> float:
        """What is free, and what torch has reserved, up to what torch may use."""
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(self.device)
        allowed = float(torch.cuda.get_per_process_memory_fraction(self.device) * whole)
        return min(float(free + torch.cuda.memory_reserved(self.device)), allowed)

    def restart(self) -> None:
        """Also returns memory that is reserved in pieces of other sizes, or held in cycles."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> float:
        """Of allocated memory, which a line fits."""
        torch.cuda.synchronize(self.device)
        return float(torch.cuda.max_memory_allocated(self.device))

    def fragments(self) -> bool:
        """Whether torch reserves memory in pieces that cannot grow."""
        pieces = torch.cuda.memory_snapshot()
        return bool(pieces) and not any(each.get("is_expandable") for each in pieces)


def expand_segments() -> None:
    """Let torch reserve GPU memory in pieces that grow, unless the environment says how.

    Micro-batches of a plan differ in width. In pieces that cannot grow, what one leaves often holds
    nothing of the next. Has an effect before the first tensor is on a GPU.
    """
    if not any(name in os.environ for name in _CONF):
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)(_EXPANDABLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBudget:
    """What `find_budget` has measured.

    >>> MeasuredBudget(max_tokens=8192, fixed=2.0**30, per_slot=2.0**20, total=10 * 2.0**30)
    MeasuredBudget(8,192 slots, 1.0 GiB and 1.000 MiB per slot, of 10.0 GiB)
    """

    max_tokens: int
    """The largest budget that fits on every rank, with the margin."""
    fixed: float
    """Bytes of this rank that do not depend on the budget."""
    per_slot: float
    """Further bytes for each slot of a micro-batch."""
    total: float
    """Bytes that are available on this rank."""

    def __repr__(self) -> str:
        each = f"{self.fixed / 2**30:.1f} GiB and {self.per_slot / 2**20:.3f} MiB per slot"
        of = f"of {self.total / 2**30:.1f} GiB"
        return line("MeasuredBudget", (counted(self.max_tokens, "slot"), each, of))


def find_budget(
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    lengths: Sequence[int],
    margin: float = 0.04,
    *,
    meter: MemoryMeter | None = None,
    make_sample: Callable[[int], Any] | None = None,
) -> MeasuredBudget:
    """The largest `Packed(max_tokens=...)` whose steps fit into the memory of every rank.

    Tries a small size, two more, and one or two near the limit that a line through their peaks
    gives. Each begins as training does, without new states of the optimizer: three steps of two
    packed micro-batches of samples of these lengths, the longest included, and updates. Afterwards
    the model, optimizer, gradients and random state of torch are as before, also after an error;
    copies are on the host meanwhile. All ranks must call it with the same arguments. Several ranks
    of fully_shard, which would hang if one ran out of memory, come near the limit from below in up
    to 16 tries; the smallest must fit. Warns if torch reserves memory in pieces that cannot grow,
    which takes more than the margin from planned steps.

    margin       the budget is smaller than the predicted limit by this share, for fragments of
                 memory; and no larger than a step that fitted
    meter        how memory is measured; None: `torch.cuda`
    make_sample  length -> a sample, if the runner's collator needs more than input_ids

        budget = find_budget(runner, optimizer, lengths).max_tokens
        recipe = Recipe(layout=Packed(max_tokens=budget))
    """
    if not 0 <= margin < 1:
        raise ConfigError(f"margin must be in [0, 1), got {margin}.")
    order = np.sort(np.asarray(lengths, np.int64))[::-1]
    if not len(order) or order[-1] < 1:
        raise InputError("lengths must be one or more positive numbers.")
    if meter is None:
        device = device_of(runner.model) if runner.device is None else torch.device(runner.device)
        if device is None or device.type != "cuda":
            raise ConfigError(
                f"find_budget measures the memory of a GPU, but the model is on {device or 'none'}."
                f" Move it to the GPU first."
            )
        meter = CudaMemory(device)
    probe = Probe(runner, optimizer, order, meter, make_sample or _tokens)
    smallest = max(int(order[0]), _SMALLEST)
    with unchanged(runner.model, optimizer):
        probe.peak(smallest)  # compiles layers and loads kernels, which take memory, too
        total = meter.total()
        first = smallest, probe.peak(smallest)
        if runner.collective.size > 1 and Framework.of(runner.model).locks_step:
            before, last = first, probe.climb(total * (1 - margin), first)
        else:
            before, last = probe.near_limit(total, margin, first)
        limit = probe.limit(total, before, last)
        if isinstance(meter, CudaMemory) and meter.fragments():
            warnings.warn(_FRAGMENTS, stacklevel=2)
    fixed, per_slot = _line(before, last)
    most = min(last[0], int(limit * (1 - margin)))  # has run, and leaves the margin
    return MeasuredBudget(max_tokens=most, fixed=fixed, per_slot=per_slot, total=total)


def _line(first: Point, second: Point) -> tuple[float, float]:
    """(bytes at 0 slots, bytes per slot) through two points."""
    (few, low), (many, high) = first, second
    per_slot = (high - low) / (many - few) if many != few else 0.0
    if not per_slot > 0:
        raise InputError(
            f"steps of {few} and of {many} slots took {low:.0f} and {high:.0f} bytes, so memory "
            f"does not grow with the budget. Pass lengths of real samples."
        )
    return low - few * per_slot, per_slot


def _tokens(length: int) -> Any:
    return {"input_ids": torch.zeros(length, dtype=torch.int64)}


class Probe:
    """Runs steps of given sizes and measures their peaks."""

    def __init__(
        self, runner: Runner, optimizer: Any, order: Any, meter: MemoryMeter,
        make_sample: Callable[[int], Any],
    ) -> None:  # fmt: skip
        # A scaler would count the probes as steps.
        self.runner = replace(runner, on_memory="raise", on_nonfinite=None, scaler=None, keep=None)
        self.optimizer, self.order, self.meter = optimizer, order, meter
        self.make_sample, self.known = make_sample, set(optimizer.state)

    def peak(self, slots: int) -> float:
        """The peak of steps of two micro-batches of so many slots, and of their updates.

        As in training, new states of the optimizer come to lie between what the first step used.
        """
        _forget_others(self.optimizer, self.known)
        self.meter.restart()
        for _ in range(_STEPS):
            self.runner.run([self._batch(slots), self._batch(slots)])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.meter.peak()

    def near_limit(self, total: float, margin: float, first: Point) -> tuple[Point, Point]:
        """Two points, the last one as near to the limit as fits."""
        before, last = first, self.largest([first[0] * quarters // 4 for quarters in (8, 6, 5)])
        for _ in range(_LINES):
            most = self.limit(total, before, last) * (1 - margin)
            # Each try after one that does not fit is smaller by the margin.
            tries = [int(most * (1 - max(margin, 0.01)) ** n) for n in range(_TRIES)]
            tries = [slots for slots in tries if slots > 1.01 * last[0]]
            if not tries:
                break
            nearer = self.largest([*tries, last[0]])
            if nearer[0] > last[0]:
                before, last = last, nearer
            if nearer[0] < tries[0]:
                break
        return before, last

    def climb(self, total: float, first: Point) -> Point:
        """The last of steps that come nearer to the limit and never reach it, and its peak.

        Each has the slots that fit if all memory grew with them. One rank of fully_shard that runs
        out of memory leaves the others waiting inside the model, where they cannot agree.
        """
        (slots, peak), smallest = first, first[0]
        for _ in range(_CLIMBS):
            more = int(self.least(slots * total / peak))
            if more < slots * 1.01:
                break
            slots, peak = more, self.peak(more)
        if slots == smallest:
            raise self.no_room(smallest, "take nearly all memory of a rank")
        return slots, peak

    def largest(self, sizes: Sequence[int]) -> Point:
        """The first of these sizes, in descending order, that fits on all ranks, and its peak."""
        for slots in sizes:
            peak, failure = None, None
            try:
                peak = self.peak(slots)
            except (MicroBatchError, torch.OutOfMemoryError) as error:
                if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                    raise
                failure = error.with_traceback(None)  # its frames keep the memory alive
            self.optimizer.zero_grad()
            if self.least(float(peak is not None)) and peak is not None:
                return slots, peak
        raise self.no_room(sizes[-1], "run out of memory") from failure

    def no_room(self, slots: int, why: str) -> MicroBatchError:
        """The error for micro-batches that are too large, however small."""
        return MicroBatchError(
            f"micro-batches of {slots} slots, with a sample of {self.order[0]} tokens, {why}. "
            f"Recompute activations, shard the model over more ranks, or split long samples."
        )

    def limit(self, total: float, first: Point, second: Point) -> float:
        """The slots at which the line through two points reaches the memory of a rank."""
        fixed, per_slot = _line(first, second)
        return self.least((total - fixed) / per_slot)

    def least(self, value: float) -> float:
        """The smallest value of all ranks."""
        return float(min(each for (each,) in gather_values(self.runner.collective, [value])))

    def _batch(self, slots: int) -> Batch:
        """The longest sample, then others in turn, up to exactly so many slots."""
        every = np.resize(self.order, slots)  # each has one token at least
        ends = np.cumsum(every)
        count = int(np.searchsorted(ends, slots)) + 1
        every = every[:count].copy()
        every[-1] -= ends[count - 1] - slots
        samples = {number: self.make_sample(int(n)) for number, n in enumerate(every)}
        return self.runner.collate(MicroBatch.one_row(every.tolist()), samples)


@contextmanager
def unchanged(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Weights, buffers, gradients, the optimizer's states and torch's random state are afterwards
    as they were. Copies are on the host."""
    parameters = list(model.parameters())
    tensors = [local_tensor(each) for each in (*parameters, *model.buffers())]
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [parameter.grad for parameter in parameters]
    copies = [None if g is None else local_tensor(g).to("cpu", copy=True) for g in gradients]
    states = {each: _on_host(state) for each, state in optimizer.state.items()}
    groups = [{k: copy.copy(v) for k, v in group.items()} for group in optimizer.param_groups]
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    for parameter in parameters:
        parameter.grad = None
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
                for parameter, gradient, value in zip(parameters, gradients, copies, strict=True):
                    parameter.grad = gradient
                    if gradient is not None:
                        local_tensor(gradient).copy_(value)
                _restore(optimizer, states)
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
            gc.collect()
            with suppress(Exception):
                torch.cuda.empty_cache()


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: local_tensor(value).detach().to("cpu", copy=True)
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for name, value in state.items()
    }


def _forget_others(optimizer: torch.optim.Optimizer, known: Container[Any]) -> None:
    """Take away the states of parameters that are not known."""
    for parameter in [each for each in optimizer.state if each not in known]:
        del optimizer.state[parameter]


def _restore(optimizer: torch.optim.Optimizer, states: Mapping[Any, dict[str, Any]]) -> None:
    """Give each parameter its former state; those that had none lose theirs."""
    _forget_others(optimizer, states)
    for parameter, state in optimizer.state.items():
        values = states[parameter]
        for name in list(state):
            if name not in values:
                del state[name]
            elif isinstance(state[name], Tensor):
                local_tensor(state[name]).copy_(values[name])
            else:
                state[name] = values[name]
