"""Loss functions of padded batches, run on packed logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from torch import Tensor, distributed

from evenstep.compat.nemo_rl.batched_data_dict import BatchedDataDict

Boundaries: TypeAlias = Tensor | Sequence[int]
LossAndMetrics: TypeAlias = tuple[Tensor, dict[str, Any]]


class SequencePackingLossWrapper:
    """Runs a loss function on each sequence of a pack and sums losses and metrics.

    Sequence i has the tokens of row i of `data`. Its logits are the slots between two entries of
    `cu_seqlens_q_padded`, of which each context-parallel rank holds its share. `prepare_fn(logits=,
    data=, loss_fn=, vocab_parallel_rank=, vocab_parallel_group=, context_parallel_group=)` turns
    them into what the loss function takes. Sequences without tokens, such as the padding at the end
    of a pack, are left out.

        wrapper = SequencePackingLossWrapper(loss_fn, prepare_loss_input, (0, 3, 5), (0, 4, 8))
        loss, metrics = wrapper(logits, data, global_valid_seqs, global_valid_toks)
    """

    def __init__(
        self,
        loss_fn: Callable[..., tuple[Tensor, Mapping[str, Any]]],
        prepare_fn: Callable[..., tuple[Mapping[str, Any], Any]],
        cu_seqlens_q: Boundaries,
        cu_seqlens_q_padded: Boundaries | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: Any = None,
        context_parallel_group: Any = None,
    ) -> None:
        self.loss_fn, self.prepare_fn = loss_fn, prepare_fn
        padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        self.cu_seqlens_q, self.cu_seqlens_q_padded = cu_seqlens_q, padded
        self.groups = {
            "vocab_parallel_rank": vocab_parallel_rank,
            "vocab_parallel_group": vocab_parallel_group,
            "context_parallel_group": context_parallel_group,
        }

    def __call__(
        self,
        next_token_logits: Tensor,
        data: BatchedDataDict,
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> LossAndMetrics:
        """The sum over sequences of the loss, and the metrics."""
        group = self.groups["context_parallel_group"]
        size = 1 if group is None else distributed.get_world_size(group)
        lengths = [end - start for start, end in pairwise(_numbers(self.cu_seqlens_q))]
        loss = next_token_logits[:, :0].sum()  # a pack without tokens has a backward too
        every: list[Mapping[str, Any]] = []
        for row, (start, end) in enumerate(pairwise(_numbers(self.cu_seqlens_q_padded))):
            if lengths[row] == 0:
                continue
            inputs, prepared = self.prepare_fn(
                logits=next_token_logits.narrow(1, start // size, (end - start) // size),
                data=_cut(data, row, lengths[row]),
                loss_fn=self.loss_fn,
                **self.groups,
            )
            found, metrics = self.loss_fn(
                data=prepared,
                global_valid_seqs=global_valid_seqs,
                global_valid_toks=global_valid_toks,
                **inputs,
            )
            loss = loss + found
            every.append(metrics)
        return loss, _merged(every)


class SequencePackingFusionLossWrapper(SequencePackingLossWrapper):
    """Runs a loss function once on all sequences of a pack.

    `prepare_fn` also gets `cu_seqlens_q` and `cu_seqlens_q_padded`, and turns the packed logits
    into what the loss function takes for the whole batch.

        wrapper = SequencePackingFusionLossWrapper(loss_fn, prepare_packed_loss_input, cu_seqlens)
    """

    def __call__(
        self,
        next_token_logits: Tensor,
        data: BatchedDataDict,
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> LossAndMetrics:
        """The loss and the metrics of the pack."""
        inputs, prepared = self.prepare_fn(
            logits=next_token_logits,
            data=data,
            loss_fn=self.loss_fn,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_q_padded=self.cu_seqlens_q_padded,
            **self.groups,
        )
        loss, metrics = self.loss_fn(
            data=prepared,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            **inputs,
        )
        return loss, dict(metrics)


def _numbers(boundaries: Boundaries) -> list[int]:
    """As plain numbers."""
    return boundaries.tolist() if isinstance(boundaries, Tensor) else list(boundaries)


def _cut(data: BatchedDataDict, row: int, length: int) -> dict[str, Any]:
    """One row, with per-token tensors cut to its tokens. (1, 1) tensors are per sequence."""
    return {
        key: value[:, :length]
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] > 1
        else value
        for key, value in data.slice(row, row + 1).items()
    }


def _merged(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name; the least or largest of `probs_ratio*_min` and `probs_ratio*_max`."""
    merged: dict[str, Any] = {}
    for metrics in every:
        for name, value in metrics.items():
            number = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
            kept = merged.get(name)
            extreme = name.rpartition("_")[2] if name.startswith("probs_ratio") else ""
            if kept is None:
                merged[name] = number
            elif extreme in ("min", "max"):
                merged[name] = (min if extreme == "min" else max)(kept, number)
            else:
                merged[name] = kept + number
    return merged
