"""What a failed step needs: ranks that ran out of memory, numbers that are not finite, token ids
outside of the vocabulary, and a model that is ready for the next step again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.core.ragged import IntArray
from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.losses import Sums
from evenstep.train.checks import check_counts
from evenstep.train.collectives import Collective
from evenstep.train.framework import Framework, fsdp_groups, groups_of, unwrapped
from evenstep.train.gradients import local_tensor, square_of

# Out of memory -----------------------------------------------------------------------------------

_DIVISIBLE, _SEGMENT, _GROUP = 1, 2, 3  # what ran out of memory; 0 if nothing did
_INDIVISIBLE = {
    _SEGMENT: "ran out of memory with a single segment, which cannot be divided. Lower max_tokens, "
    "set overflow='split', or use context parallelism.",
    _GROUP: "ran out of memory with a single group, which groups='micro_batch' keeps together. "
    "Lower max_tokens or the samples per group, or plan with groups='step'.",
}


class TooLargeError(Exception):
    """A micro-batch ran out of memory on some rank and can be divided; raised on every rank."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def out_of_memory(
    ranks: Collective, count: int, failed: tuple[int, int] | None
) -> tuple[int, str | None] | None:
    """(a rank that ran out of memory, why its micro-batch cannot be divided); None if none did.

    One exchange, after which all ranks know the same. `failed` is (segments, parts) of the
    micro-batch that this rank could not run; groups that stay together are one part. `count` is
    the number of its micro-batches, which must be the same on all ranks.
    """
    flags = torch.zeros(2, ranks.size)
    if failed is not None:
        segments, parts = failed
        whole = _SEGMENT if segments < 2 else _GROUP
        flags[0, ranks.rank] = _DIVISIBLE if parts > 1 else whole
    flags[1, ranks.rank] = count
    states, counts = ranks.all_reduce_sum(flags).tolist()
    check_counts(counts)
    indivisible = [rank for rank, state in enumerate(states) if state > _DIVISIBLE]
    if indivisible:
        rank = ranks.rank if ranks.rank in indivisible else indivisible[0]
        return rank, _INDIVISIBLE[int(states[rank])]
    return (states.index(_DIVISIBLE), None) if any(states) else None


# Numbers that are not finite ---------------------------------------------------------------------

_PLACES = ("the loss", "the gradient of the model's outputs", "the gradient of the parameters")
_SHOWN = 6  # samples named per rank
_NOWHERE = 2.0**40


@dataclass(slots=True)
class _Traces:
    """The numbers of one micro-batch; values per tile come with a mask of real tiles."""

    sample_ids: IntArray  # of its segments
    exchanged: bool
    losses: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    outputs: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    square: Tensor | None = None


class Suspects:
    """Finds the micro-batch and samples that made the loss or gradient of a step inf or NaN.

    Each micro-batch leaves a few numbers on the device: the loss of each segment, the gradient of
    the model's outputs summed over each segment, and the squared norm of all gradients so far.
    They are read only if the reduced loss or gradient of the step is not finite, which all ranks
    see alike.
    """

    def __init__(self) -> None:
        self._traces: list[_Traces] = []

    def before_backward(
        self,
        sample_ids: IntArray,
        exchanged: bool,
        outputs: Any,
        batch: Any,
        losses: Mapping[str, Sums | Tensor],
    ) -> None:
        """Record the losses of a micro-batch, and the gradient of its outputs once it is there.

        `exchanged` if gradients of all ranks are mixed in its backward.
        """
        traces = _Traces(sample_ids, exchanged)
        self._traces.append(traces)
        for loss in losses.values():
            if isinstance(loss, Sums) and loss.by_tile is not None:
                traces.losses.append((loss.by_tile.detach(), loss.real))
            total = loss.loss if isinstance(loss, Sums) else loss
            traces.losses.append((total.detach(), None))
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            return

        def note(gradient: Tensor) -> None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            if isinstance(batch, Batch) and gradient.shape[:2] == batch.tokens.shape:
                by_slot = gradient.flatten(2).sum(-1, dtype=wide).flatten()
                tiles = by_slot.new_zeros(len(batch.sample_ids))
                by_tile = tiles.index_add_(0, batch.segment_ids.flatten(), by_slot)
                traces.outputs.append((by_tile, batch.sample_ids >= 0))
            else:
                traces.outputs.append((gradient.sum(dtype=wide), None))

        outputs.register_hook(note)

    def after_backward(self, gradients: Iterable[Tensor], framework: Framework) -> None:
        """Record the norm of the gradients so far, exchanged or not."""
        so_far = [*gradients, *_not_exchanged(framework)]
        self._traces[-1].square = square_of(map(local_tensor, so_far))

    def source(self, collective: Collective, count: int | None) -> str:
        """Where the first non-finite number of all ranks appeared, for an error message.

        A collective call.
        """
        rows = torch.zeros(collective.size, 4 + _SHOWN, dtype=torch.float64)
        rows[collective.rank] = torch.tensor(self._first(), dtype=torch.float64)
        table = collective.all_reduce_sum(rows).cpu().tolist()
        # A gradient that was exchanged is not finite on all ranks, so it does not tell the rank.
        order = [(row[2], row[0], row[1], rank) for rank, row in enumerate(table)]
        unsure, position, place, rank = min(order)
        if position == _NOWHERE:
            return "no micro-batch shows where it came from"
        of = "" if count is None else f" of {count}"
        where = f"{_PLACES[int(place)]} of micro-batch {int(position)}{of}"
        if unsure:
            return f"{where} on one of the ranks"
        return f"{where} on rank {rank} ({_name_samples(table[rank])})"

    def _first(self) -> list[float]:
        """[position, place, 1 if the rank is unsure, number of samples, their ids]."""
        for position, traces in enumerate(self._traces):
            for place, values_of_tiles in enumerate((traces.losses, traces.outputs)):
                bad = [_bad_samples(v, real, traces.sample_ids) for v, real in values_of_tiles]
                if any(ids is not None for ids in bad):
                    known = [ids for ids in bad if ids is not None and len(ids)]
                    return _row(position, place, False, known[0] if known else traces.sample_ids)
            if traces.square is not None and not bool(traces.square.isfinite()):
                return _row(position, 2, traces.exchanged, traces.sample_ids)
        return _row(_NOWHERE, 0, True, ())


def _bad_samples(values: Tensor, real: Tensor | None, ids: IntArray) -> IntArray | None:
    """Samples whose value is not finite; empty if only their sum tells, None if all are finite."""
    bad = ~values.isfinite()
    if not bool(bad.any()):
        return None
    if values.ndim == 0:
        return ids[:0]
    bad = bad if real is None else bad[real]
    return np.unique(ids[bad.cpu().numpy()])


def _row(position: float, place: int, unsure: bool, ids: Sequence[int] | IntArray) -> list[float]:
    shown = [float(number) for number in ids[:_SHOWN]]
    return [position, place, unsure, len(ids), *shown, *[-1.0] * (_SHOWN - len(shown))]


def _name_samples(row: Sequence[float]) -> str:
    """sample 4, or samples 4, 7 and 5 more"""
    number, ids = int(row[3]), [str(int(each)) for each in row[4:] if each >= 0]
    if not ids:
        return "no sample"
    more = f" and {number - len(ids)} more" if number > len(ids) else ""
    return f"sample{'s' if number > 1 else ''} {', '.join(ids)}{more}"


# Token ids outside of the vocabulary -------------------------------------------------------------


class TokenIds:
    """The token ids of batches, compared with the vocabulary of a model once a forward fails.

    Not before: some models replace ids outside of their embedding, such as those of images. On a
    GPU, torch only says that an assertion failed, some operations later, and nothing can be read
    from it any more, so ids are noted on the host before they are moved there.
    """

    def __init__(self, model: Any) -> None:
        self.size = _vocabulary_size(model)
        self.outside: tuple[int, str, int] | None = None
        """(sample, "token id" or "label", the number) of the first one outside."""

    def note(self, batch: Batch) -> None:
        """Look at the ids of a batch."""
        if self.size is None or self.outside is not None or not batch.tokens.numel():
            return
        labels = batch.labels.masked_fill(batch.labels == IGNORE_INDEX, 0)
        for what, ids in (("token id", batch.tokens), ("label", labels)):
            outside = ((ids < 0) | (ids >= self.size)).flatten().nonzero()
            if len(outside):
                tile = batch.segment_ids.flatten()[outside[0]]
                number = int(ids.flatten()[outside[0]])
                self.outside = int(batch.sample_ids[tile]), what, number
                return

    def explain(self, error: Exception) -> InputError | None:
        """What to raise instead of an error of a forward, if ids outside may be its cause."""
        message = str(error)
        by_an_index = isinstance(error, IndexError) or "device-side assert" in message
        by_an_index = by_an_index or "out of bounds" in message
        if self.outside is None or self.size is None or not by_an_index:
            return None
        sample, what, number = self.outside
        return InputError(
            f"sample {sample} has the {what} {number}, but the model's vocabulary has {self.size} "
            f"tokens (0 to {self.size - 1}). Use the tokenizer of the model, or "
            f"resize its embeddings."
        )


def _vocabulary_size(model: Any) -> int | None:
    """The rows of the model's token embedding; None if it is unknown which one it is."""
    inner, embedding = unwrapped(model), None
    if hasattr(inner, "get_input_embeddings"):
        with suppress(NotImplementedError):
            embedding = inner.get_input_embeddings()
    elif isinstance(inner, nn.Module):
        embeddings = [module for module in inner.modules() if isinstance(module, nn.Embedding)]
        embedding = embeddings[0] if len(embeddings) == 1 else None
    size = getattr(embedding, "num_embeddings", None)
    return None if size is None else int(size)


# Recovery ----------------------------------------------------------------------------------------


def recover(framework: Framework) -> None:
    """Make the model ready for the next step, as if the failed one had not run.

    DDP and fully_shard keep state between a forward and the end of its backward, outside `.grad`.
    fully_shard also keeps gradients that it has not exchanged yet, and would add them to the next
    step. No communication; call it on every rank on which the step failed.

    Collectives that a rank started alone are not undone: if only some ranks failed, the group of
    processes has to be started again (see `Watch`).
    """
    if framework.kind == "ddp":
        # On every rank that failed, wherever it failed: DDP exchanges the order of its buckets in
        # the second step after a reset, on all ranks or none.
        reset = getattr(framework.model.reducer, "_reset_state", None)
        if reset is not None:
            reset()
    if framework.kind == "fsdp":
        _recover_sharded(framework.model)


def _not_exchanged(framework: Framework) -> list[Tensor]:
    """Gradients of this step that fully_shard has not exchanged yet."""
    if framework.kind != "fsdp":
        return []
    gradients = [
        gradient
        for group in fsdp_groups(framework.model)
        for parameter in group.fsdp_params
        for gradient in (
            getattr(parameter, "unsharded_accumulated_grad", None),
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        )
    ]
    return [gradient for gradient in gradients if gradient is not None]


def _recover_sharded(model: Any) -> None:
    root = model._get_fsdp_state()
    if root._is_root is not None:  # it ran a forward
        reset = getattr(model, "reset_iter_state", None)  # torch >= 2.13
        if reset is None:
            _reset_state(root)
        else:
            reset()
    for group in fsdp_groups(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            event = getattr(parameter, "grad_offload_event", None)
            if event is not None:
                event.synchronize()
                parameter.grad_offload_event = None


def _reset_state(root: Any) -> None:
    """What `FSDPModule.reset_iter_state` does since torch 2.13: end all that is in flight."""
    context, shared = root._comm_ctx, root._state_ctx
    stream = root._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        state = getattr(context, name, None)
        if state is not None:
            _wait(stream, getattr(state, "event", None))
            setattr(context, name, None)
    for state in getattr(context, "reduce_scatter_states", ()):
        _wait(stream, state.event)
    for name in ("reduce_scatter_states", "post_forward_order"):
        getattr(context, name, []).clear()
    for state in shared.all_states:
        getattr(state, "_modules_to_run_forward", set()).clear()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        for group in groups_of(state):
            _reset_group(group, idle, stream)
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _reset_group(group: Any, idle: Any, stream: Any) -> None:
    gathered = group._all_gather_result
    if gathered is not None:
        _wait(stream, gathered.all_gather_event)
        if hasattr(gathered.all_gather_work, "wait"):
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    for name in ("_post_reduce_event", "_reshard_after_forward_event"):
        _wait(stream, getattr(group, name, None))
        setattr(group, name, None)
    _wait(stream, getattr(getattr(group, "_all_reduce_state", None), "event", None))
    group._all_reduce_state = None
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = idle
    group._to_sharded()


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)
