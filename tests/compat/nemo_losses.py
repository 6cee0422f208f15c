"""A loss of one sequence in NeMo-RL's form, its data, and packed logits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.nn.functional import all_gather

from evenstep.compat.nemo_rl import BatchedDataDict, SequencePackingLossWrapper
from evenstep.tensors import join_context

VOCAB = 7


def random_data(lengths: list[int], width: int, seed: int) -> BatchedDataDict:
    made = torch.Generator().manual_seed(seed)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(VOCAB, (len(lengths), width), generator=made),
            "token_mask": torch.randint(2, (len(lengths), width), generator=made).double(),
            "advantages": torch.randn(len(lengths), width, generator=made, dtype=torch.float64),
            "sample_mask": torch.rand(len(lengths), generator=made, dtype=torch.float64),
            "names": [str(row) for row in range(len(lengths))],
        }
    )


def prepare(logits: Tensor, data: Any, loss_fn: Any, **groups: Any) -> tuple[dict[str, Any], Any]:
    """Log-probs of the next tokens, from this rank's logits of one sequence."""
    group = groups["context_parallel_group"]
    if group is not None:
        parts = all_gather(logits.contiguous(), group)
        slots = torch.tensor([0, sum(part.shape[1] for part in parts)])
        logits = join_context(parts, slots)
    targets = data["input_ids"][:, 1:]
    logits = logits[:, : targets.shape[1]]
    return {"log_probs": logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]}, data


def loss_fn(
    log_probs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """A token loss and a loss per sequence, with metrics."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    values = -log_probs * data["advantages"][:, 1:] * mask
    by_sequence = (log_probs.exp() * mask).sum() / global_valid_seqs
    ratio = log_probs.detach().exp()
    none = ratio.numel() == 0
    return values.sum() / global_valid_toks + by_sequence, {
        "tokens": mask.sum(),
        "sequences": 1,
        "probs_ratio_min": float("inf") if none else ratio.min(),
        "probs_ratio_clamped_max": float("-inf") if none else ratio.max().item(),
    }


NO_GROUPS: dict[str, Any] = {
    "vocab_parallel_rank": None,
    "vocab_parallel_group": None,
    "context_parallel_group": None,
}


def one_by_one(
    logits: Tensor, data: BatchedDataDict, lengths: list[int]
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The loss and the metrics of each sequence from its own unpadded tensors."""
    loss, every = logits.new_zeros(()), []
    for row, length in enumerate(lengths):
        if length == 0:
            continue
        own: dict[str, Any] = {
            key: value[row : row + 1, :length] if value.ndim > 1 else value[row : row + 1]
            for key, value in data.items()
            if isinstance(value, Tensor)
        }
        inputs, own = prepare(logits[row : row + 1, :length], own, loss_fn, **NO_GROUPS)
        found, metrics = loss_fn(
            data=own, global_valid_seqs=torch.tensor(3.0), global_valid_toks=torch.tensor(11.0),
            **inputs,
        )  # fmt: skip
        loss = loss + found
        every.append(metrics)
    return loss, every


def packed_logits(logits: Tensor, lengths: list[int], padded: list[int]) -> Tensor:
    """(1, slots, vocab): each sequence at its padded boundary; padding is not 0."""
    rows = []
    for row, (start, end) in enumerate(pairwise(padded)):
        length = lengths[row] if row < len(lengths) else 0
        filler = torch.full((end - start - length, VOCAB), 3.0, dtype=logits.dtype)
        rows.append(torch.cat((logits[min(row, len(lengths) - 1), :length], filler)))
    return torch.cat(rows)[None]


def offsets(lengths: list[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def on_context_ranks(rank: int, size: int, lengths: list[int], seed: int) -> tuple[Any, ...]:
    """(loss, gradient summed over ranks, metrics) of packed logits sharded over `size` ranks."""
    data = random_data(lengths, max(lengths), seed)
    made = torch.Generator().manual_seed(seed)
    leaf = torch.randn(len(lengths), max(lengths), VOCAB, generator=made, dtype=torch.float64)
    leaf.requires_grad_()
    padded = offsets([-(-length // (2 * size)) * 2 * size for length in lengths])
    padded[-1] += 4 * size  # the tail belongs to the last sequence, as in NeMo-RL
    whole, parts = packed_logits(leaf, lengths, padded), []
    for start, end in pairwise(padded):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            parts.append(whole[:, start + number * chunk : start + (number + 1) * chunk])
    wrapper = SequencePackingLossWrapper(
        loss_fn, prepare, offsets(lengths), padded, context_parallel_group=distributed.group.WORLD
    )
    loss, metrics = wrapper(torch.cat(parts, 1), data, torch.tensor(3.0), torch.tensor(11.0))
    (loss / size).backward()  # every rank computes the whole loss
    distributed.all_reduce(leaf.grad)
    return loss.detach(), leaf.grad, metrics
