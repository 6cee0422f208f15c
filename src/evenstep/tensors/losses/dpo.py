"""dpo: DPO and other losses of a chosen and a rejected sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from evenstep.core.text import one_of
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.losses.head import Head
from evenstep.tensors.losses.options import at_least, positive, share
from evenstep.tensors.losses.pairs import Pairs
from evenstep.tensors.losses.scores import label_log_probs
from evenstep.tensors.metrics import Metric
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View

PairLoss: TypeAlias = Literal[
    "sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard"
]

# (rewards c and r of the chosen and the rejected sequence, label smoothing e, beta) -> loss
_LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": lambda c, r, e, _: -(1 - e) * logsigmoid(c - r) - e * logsigmoid(r - c),
    "robust": lambda c, r, e, _: (
        (e * logsigmoid(r - c) - (1 - e) * logsigmoid(c - r)) / (1 - 2 * e)
    ),
    "hinge": lambda c, r, *_: (1 - (c - r)).relu(),
    "ipo": lambda c, r, _, beta: ((c - r - 0.5) / beta).square(),
    "apo_zero": lambda c, r, *_: 1 - c.sigmoid() + r.sigmoid(),
    "apo_down": lambda c, r, *_: c.sigmoid() + 1 - (c - r).sigmoid(),
    "sppo_hard": lambda c, r, _, beta: ((c - 0.5) / beta).square() + ((r + 0.5) / beta).square(),
}
_SMOOTHED = ("sigmoid", "robust")


def dpo(
    *,
    beta: float = 0.1,
    loss: PairLoss = "sigmoid",
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    average: bool | None = None,
    reference: bool = True,
    head: Head | nn.Linear | Tensor | None = None,
) -> PerSequence:
    """A loss of pairs of a chosen and a rejected sequence; `sigmoid` is DPO.

    The log-ratio of a sequence is the sum of the log-probs of its loss tokens minus that of the
    reference model; `average` divides it by their number (default: for `ipo` only). With
    c and r for beta times the log-ratio of the chosen and of the rejected sequence:

    sigmoid    -(1 - e) log sigmoid(c - r - margin) - e log sigmoid(r - c + margin); e is
               `label_smoothing`
    robust     -((1 - e) log sigmoid(c - r - margin) - e log sigmoid(r - c + margin)) / (1 - 2 e)
    hinge      max(0, 1 - (c - r - margin))
    ipo        ((c - r - 1 / 2) / beta)²
    apo_zero   1 - sigmoid(c) + sigmoid(r)
    apo_down   sigmoid(c) + 1 - sigmoid(c - r)
    sppo_hard  ((c - 1 / 2) / beta)² + ((r + 1 / 2) / beta)²

    reference=False leaves out the reference model (with average=True and `margin`: SimPO).

    Extras: `group` and `chosen` per sequence, see `docs/losses.md`; `reference_log_probs` per
    sequence, the sum over its loss tokens, or per token. Use `GroupMean`, the mean over pairs.

        runner = Runner(model=model, loss=dpo(beta=0.1), normalization=GroupMean(), collate=...)
    """
    one_of("loss", loss, PairLoss)
    positive("beta", beta)
    share("label_smoothing", label_smoothing, 0.5)
    at_least("margin", margin, 0)
    if label_smoothing and loss not in _SMOOTHED:
        raise ConfigError(
            f"label_smoothing has no meaning for loss={loss!r}. Set it to 0, or use one of: "
            f"{', '.join(_SMOOTHED)}."
        )
    if margin and loss not in (*_SMOOTHED, "hinge"):
        raise ConfigError(
            f"margin has no meaning for loss={loss!r}. Set it to 0, or use one of: "
            f"{', '.join((*_SMOOTHED, 'hinge'))}."
        )
    last, divided = Head.of(head), loss == "ipo" if average is None else average

    def function(outputs: Tensor, view: View) -> Outcome:
        pairs = Pairs.of(view)
        log_probs = label_log_probs(outputs, view.labels, head=last)
        by_tile = view.sum_by_segment(log_probs)
        counts = view.sum_by_segment((view.labels != IGNORE_INDEX).to(by_tile)).clamp(min=1)
        ratio = by_tile - _reference(view) if reference else by_tile
        rewards = beta * (ratio / counts if divided else ratio)
        chosen, rejected = rewards[pairs.chosen], rewards[pairs.rejected]
        # The margin is divided between both: c - r becomes c - r - margin.
        c, r = chosen - margin / 2, rejected + margin / 2
        value = _LOSSES[loss](c, r, label_smoothing, beta)
        return pairs.spread(value), _metrics(chosen, rejected, by_tile, pairs)

    return PerSequence(function, vectorised=True, unit="pair")


def _reference(view: View) -> Tensor:
    """(tiles): log-probs of the reference model, summed over loss tokens."""
    aligned = view.source.aligned.get("reference_log_probs")
    if aligned == "sequence":
        return view.by_segment("reference_log_probs")
    if aligned is None:
        raise InputError(
            "dpo needs the extra 'reference_log_probs' per sequence or per token. Compute it with "
            "compute_log_probs and declare it in Collator(extras=...), or set reference=False."
        )
    given = torch.where(view.labels != IGNORE_INDEX, view.ahead("reference_log_probs"), 0.0)
    return view.sum_by_segment(given)


def _metrics(
    chosen: Tensor, rejected: Tensor, log_probs: Tensor, pairs: Pairs
) -> dict[str, Metric]:
    count = len(pairs)
    return {
        "chosen_reward": Metric.mean(chosen.sum(), count),
        "rejected_reward": Metric.mean(rejected.sum(), count),
        "chosen_log_probs": Metric.mean(log_probs[pairs.chosen].sum(), count),
        "rejected_log_probs": Metric.mean(log_probs[pairs.rejected].sum(), count),
        "accuracy": Metric.mean((chosen > rejected).sum(), count),
        "margin": Metric.mean((chosen - rejected).sum(), count),
    }
