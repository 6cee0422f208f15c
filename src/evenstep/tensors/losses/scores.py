"""Scores: log-probs of labels, and entropies, from logits or from hidden states and a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.losses.head import Head, Wanted, head_scores


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Numbers per label, (n) each, in float32 or wider; 0 where the label is ignored."""

    log_probs: Tensor
    entropy: Tensor
    """0 if it was not requested, as the following."""
    mean_log_probs: Tensor
    """The mean of the log-probs of the whole vocabulary."""
    log_normalizer: Tensor
    """logsumexp of the logits."""


def score(
    outputs: Tensor,
    labels: Tensor,
    *,
    head: Head | None = None,
    temperature: float = 1.0,
    wanted: Wanted = frozenset(),
) -> Scores:
    """(n, vocabulary) logits, or (n, hidden) states with `head`, and (n) labels -> scores.

    Logits are divided by `temperature` first. `wanted` names the fields that are computed besides
    the log-probs.
    """
    if head is not None:
        return Scores(*head_scores(outputs, labels, head, temperature, wanted))
    logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    if not wanted:
        nothing = logits.new_zeros(len(labels))
        nll = functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
        return Scores(-nll, nothing, nothing, nothing)
    return Scores(*_all_scores(logits, labels, wanted))


def _all_scores(logits: Tensor, labels: Tensor, wanted: Wanted) -> tuple[Tensor, ...]:
    counts = labels != IGNORE_INDEX
    everything = logits.log_softmax(-1)
    nothing = logits.new_zeros(len(labels))
    entropy = mean = normalizer = nothing
    if "entropy" in wanted:
        # A token of probability 0 adds 0, not 0 * -inf.
        finite = everything.masked_fill(everything == -torch.inf, 0.0)
        entropy = -(everything.exp() * finite).sum(-1)
    if "mean_log_probs" in wanted:
        mean = everything.mean(-1)
    if "log_normalizer" in wanted:
        normalizer = logits.logsumexp(-1)
    log_probs = everything.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return tuple(
        torch.where(counts, each, nothing) for each in (log_probs, entropy, mean, normalizer)
    )


def label_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    head: Head | nn.Linear | Tensor | None = None,
) -> Tensor:
    """(n, vocabulary) logits and (n) labels -> (n) log-probs of the labels, in float32 or wider.

    It is 0 where the label is ignored. Slot i holds the log-prob of token i + 1;
    `restore_tokens(..., shifted=True)` moves it to slot i + 1. With `head`, `logits` are hidden
    states, (n, hidden).

    >>> label_log_probs(torch.zeros(2, 4), torch.tensor([3, -100])).exp().tolist()
    [0.25, 1.0]
    """
    return score(logits, labels, head=Head.of(head), temperature=temperature).log_probs
