"""Preference: losses of a chosen and a rejected sequence (DPO and others, reward models)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from evenstep.core.text import one_of
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, BatchShard, View
from evenstep.tensors.head import Head, at_least, label_log_probs, positive, share
from evenstep.tensors.losses import Metric, Outcome, PerSequence, scalars


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a batch, by tile.

    Sequence-aligned extras say which sequences form a pair: `group` is equal for both (int64), and
    `chosen` is 1 for one and 0 for the other.
    """

    view: View
    chosen: Tensor  # (pairs) int64: a tile
    rejected: Tensor  # (pairs) int64: a tile

    @classmethod
    def of(cls, view: View) -> Pairs:
        """The pairs of a whole batch; raises if a sequence has no partner in it."""
        if isinstance(view.source, BatchShard):
            raise InputError(
                "a loss of pairs needs whole sequences, but this is a batch shard. Join the "
                "outputs of all ranks first."
            )
        if view.tile is not None:
            raise InputError(
                "a loss of pairs cannot run on one sequence at a time. Call it on the batch, not "
                "through looped()."
            )
        view.check_whole_samples()
        real = (view.source.sample_ids >= 0).nonzero()[:, 0]
        group = view.by_segment("group")[real]
        side = view.by_segment("chosen")[real]
        ids, number = torch.unique(group, return_inverse=True)
        tiles = torch.zeros((2, len(ids)), dtype=torch.int64, device=real.device)
        counts = torch.zeros_like(tiles)
        first = torch.where(side > 0, 0, 1)
        tiles.index_put_((first, number), real)
        counts.index_put_((first, number), torch.ones_like(real), accumulate=True)
        wrong = (counts != 1).any(0)
        if bool(wrong.any()):
            _refuse(ids[wrong][0], counts[:, wrong][:, 0])
        return cls(view, tiles[0], tiles[1])

    def __len__(self) -> int:
        return len(self.chosen)

    def spread(self, values: Tensor) -> Tensor:
        """(pairs) values -> (n): the value of a pair in each slot of both, times its weight."""
        view, count = self.view, len(self.view.source.seqlens)
        tiles = torch.cat((self.chosen, self.rejected))
        by_tile = values.new_zeros(count).index_copy(0, tiles, torch.cat((values, values)))
        return by_tile[view.segment_ids] * view.loss_weights


def _refuse(group: Tensor, counts: Tensor) -> None:
    chosen, rejected = counts.tolist()
    raise InputError(
        f"group {group.item():g} has {chosen} chosen and {rejected} rejected sequences in this "
        f"micro-batch; expected one of each. Give each pair its own `group`, and plan with "
        f"groups= and Recipe(groups='micro_batch')."
    )


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
    for name, value, losses in (
        ("label_smoothing", label_smoothing, _SMOOTHED),
        ("margin", margin, (*_SMOOTHED, "hinge")),
    ):
        if value and loss not in losses:
            raise ConfigError(
                f"{name} has no meaning for loss={loss!r}. Set it to 0, or use one of: "
                f"{', '.join(losses)}."
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
        value = _LOSSES[loss](chosen - margin / 2, rejected + margin / 2, label_smoothing, beta)
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
    per_token = view.ahead("reference_log_probs")
    return view.sum_by_segment(torch.where(view.labels != IGNORE_INDEX, per_token, 0.0))


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
