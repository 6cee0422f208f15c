"""Preference: losses of a chosen and a rejected sequence (DPO and others, reward models)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from evenstep.core.text import one_of
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, BatchShard, View
from evenstep.tensors.head import Head, HeadOption, at_least_zero, positive, scorer
from evenstep.tensors.losses import Metric, Outcome, PerSequence, scalars, scores_of

PairFormula: TypeAlias = Callable[[Tensor, View, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(outputs, view, tiles (2, pairs)) -> loss of each pair, values (2, pairs) of both by name."""


def _per_pair(formula: PairFormula, **options: Any) -> PerSequence:
    """A loss of pairs; the slots of both sequences hold the value of their pair.

    Its metrics are the means of the values of the chosen and of the rejected sequences. The first
    values are compared: `accuracy` is how often the chosen one is greater. `options` are those of
    `PerSequence`.
    """

    def loss(outputs: Tensor, view: View) -> Outcome:
        tiles = _pair_tiles(view)
        value, values = formula(outputs, view, tiles)
        by_tile = value.new_zeros(len(view.source.seqlens))
        by_tile = by_tile.index_copy(0, tiles.flatten(), value.repeat(2))
        metrics = {
            f"{side}_{name}": each[number]
            for name, each in values.items()
            for number, side in enumerate(("chosen", "rejected"))
        }
        chosen, rejected = next(iter(values.values()))
        metrics |= {"accuracy": chosen > rejected, "margin": chosen - rejected}
        return by_tile[view.segment_ids] * view.loss_weights, {
            name: Metric.mean(each.sum(), len(value)) for name, each in metrics.items()
        }

    return PerSequence(loss, vectorised=True, unit="pair", **options)


def _pair_tiles(view: View) -> Tensor:
    """(2, pairs) int64: the tiles of the chosen and of the rejected sequence of each pair.

    Sequence-aligned extras say which sequences form a pair: `group` is equal for both (int64), and
    `chosen` is 1 for one and 0 for the other.
    """
    if isinstance(view.source, BatchShard):
        raise InputError(
            "a loss of pairs needs whole sequences, but this is a batch shard. Join the outputs "
            "of all ranks first."
        )
    if view.tile is not None:
        raise InputError(
            "a loss of pairs cannot run on one sequence at a time. Call it on the batch, not "
            "through looped()."
        )
    if view.source.exchange is not None:  # on all ranks, which would wait for each other
        raise InputError(
            "ranks share a sample in this wave, so a loss of pairs cannot run: a rank has parts of "
            "sequences. Plan without sharing and context parallelism."
        )
    view.check_whole_samples()
    real = (view.source.sample_ids >= 0).nonzero()[:, 0]
    groups, number = torch.unique(view.by_segment("group")[real], return_inverse=True)
    side = torch.where(view.by_segment("chosen")[real] > 0, 0, 1)
    tiles = torch.zeros((2, len(groups)), dtype=torch.int64, device=real.device)
    counts = torch.zeros_like(tiles)
    counts.index_put_((side, number), torch.ones_like(real), accumulate=True)
    wrong = (counts != 1).any(0)
    if bool(wrong.any()):
        chosen, rejected = counts[:, wrong][:, 0].tolist()
        raise InputError(
            f"group {groups[wrong][0].item():g} has {chosen} chosen and {rejected} rejected "
            f"sequences in this micro-batch; expected one of each. Give each pair its own `group`, "
            f"and plan with groups= and Recipe(groups='micro_batch')."
        )
    return tiles.index_put_((side, number), real)


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
    head: HeadOption = None,
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

    reference=False leaves out the reference model (with average=True and `margin`: SimPO). `head`
    is that of `cross_entropy`.

    Extras: `group` and `chosen` per sequence, see `docs/losses.md`; `reference_log_probs` per
    sequence, the sum over its loss tokens, or per token. Use `GroupMean`, the mean over pairs.

        runner = Runner(model=model, loss=dpo(beta=0.1), normalization=GroupMean(), collate=...)
    """
    one_of("loss", loss, PairLoss)
    positive("beta", beta)
    at_least_zero("label_smoothing", label_smoothing, below=0.5)
    at_least_zero("margin", margin)
    for name, value, losses in (
        ("label_smoothing", label_smoothing, _SMOOTHED),
        ("margin", margin, (*_SMOOTHED, "hinge")),
    ):
        if value and loss not in losses:
            raise ConfigError(
                f"{name} has no meaning for loss={loss!r}. Set it to 0, or use one of: "
                f"{', '.join(losses)}."
            )
    score, divided = scorer(1.0), loss == "ipo" if average is None else average

    def formula(outputs: Tensor, view: View, tiles: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = scores_of(score, outputs, view, view.labels).log_probs
        log_probs = view.sum_by_segment(log_probs)
        ratio = log_probs - _reference(view) if reference else log_probs
        if divided:
            counts = view.sum_by_segment((view.labels != IGNORE_INDEX).to(ratio))
            ratio = ratio / counts.clamp(min=1)
        rewards = beta * ratio[tiles]
        # The margin is divided between both: c - r becomes c - r - margin.
        chosen, rejected = rewards[0] - margin / 2, rewards[1] + margin / 2
        value = _LOSSES[loss](chosen, rejected, label_smoothing, beta)
        return value, {"reward": rewards, "log_probs": log_probs[tiles]}

    return _per_pair(formula, scores_slots=True, takes_hidden=True, head=Head.of(head))


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
    at_least_zero("center_weight", center_weight)

    def formula(outputs: Tensor, view: View, tiles: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last = view.source.cu_seqlens[:-1].long() + view.source.seqlens - 1  # token of each tile
        scores = scalars(outputs).index_select(0, last[tiles].flatten()).view_as(tiles)
        chosen, rejected = scores
        ahead = chosen - rejected
        if margins:
            ahead = ahead - view.by_segment("margin")[tiles[0]]
        value = -logsigmoid(ahead)
        if center_weight:
            value = value + center_weight * (chosen + rejected).square()
        return value, {"score": scores}

    return _per_pair(formula)
