"""reward_model: the Bradley-Terry loss of a score per sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from evenstep.tensors.losses.options import at_least
from evenstep.tensors.losses.pairs import Pairs
from evenstep.tensors.losses.value_loss import scalars
from evenstep.tensors.metrics import Metric
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View


def reward_model(*, center_weight: float = 0.0, margins: bool = False) -> PerSequence:
    """The Bradley-Terry loss of pairs of a chosen and a rejected sequence.

    The score of a sequence is the output of its last token. Per pair, with scores c and r:
    -log sigmoid(c - r) + center_weight * (c + r)². With `margins`, it is -log sigmoid(c - r - m),
    where m is the extra `margin` of the chosen sequence.

    The model returns one number per token, (rows, width) or (rows, width, 1). Extras per sequence:
    `group` and `chosen`, and `margin` with `margins`. Use `GroupMean`, the mean over pairs with at
    least one loss token.

        runner = Runner(model=scorer, loss=reward_model(), normalization=GroupMean(), collate=...)
    """
    at_least("center_weight", center_weight, 0)

    def loss(outputs: Tensor, view: View) -> Outcome:
        pairs = Pairs.of(view)
        scores = scalars(outputs)
        chosen, rejected = (_last(scores, view, tiles) for tiles in (pairs.chosen, pairs.rejected))
        ahead = chosen - rejected
        if margins:
            ahead = ahead - view.by_segment("margin")[pairs.chosen]
        value = -logsigmoid(ahead)
        if center_weight:
            value = value + center_weight * (chosen + rejected).square()
        count = len(pairs)
        return pairs.spread(value), {
            "chosen_score": Metric.mean(chosen.sum(), count),
            "rejected_score": Metric.mean(rejected.sum(), count),
            "accuracy": Metric.mean((chosen > rejected).sum(), count),
            "margin": Metric.mean((chosen - rejected).sum(), count),
        }

    return PerSequence(loss, vectorised=True, unit="pair")


def _last(scores: Tensor, view: View, tiles: Tensor) -> Tensor:
    """The score at the last token of each tile."""
    batch = view.source
    slots = batch.cu_seqlens[:-1][tiles].to(torch.int64) + batch.seqlens[tiles] - 1
    return scores.index_select(0, slots)
