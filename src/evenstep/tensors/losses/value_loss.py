"""value_loss: the squared error of predicted values, clipped as in PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.losses.options import positive
from evenstep.tensors.metrics import Metric
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View


def value_loss(*, clip: float | None = 0.2) -> PerSequence:
    """The weighted sum of the squared error of a critic.

    Per token: max((v - R)², (clip(v, o - clip, o + clip) - R)²) / 2, where v is the new value, o
    the old one and R the return; (v - R)² / 2 if `clip` is None. The output of a slot is the value
    before its next token, so the value of token i, as a sample holds it, is predicted one slot
    earlier, as a log-prob is.

    The model returns one number per token, (rows, width) or (rows, width, 1). Extras, per token:
    `returns` and, with `clip`, `old_values`. Entry i of these belongs to token i.

        losses = {"value": Loss(function=value_loss(), weight=0.5)}
    """
    if clip is not None:
        positive("clip", clip)

    def loss(outputs: Tensor, view: View) -> Outcome:
        counts = view.labels != IGNORE_INDEX
        value = torch.where(counts, scalars(outputs), 0.0)
        target = torch.where(counts, view.ahead("returns"), 0.0)
        error = (value - target).square()
        total = counts.sum()
        metrics = {
            "value": Metric.mean(value.sum(), total),
            "value_error": Metric.mean(error.sum(), total),
        }
        if clip is not None:
            old = torch.where(counts, view.ahead("old_values"), 0.0)
            near = torch.maximum(torch.minimum(value, old + clip), old - clip)
            far = (near - target).square()
            metrics["clipped"] = Metric.mean((far > error).sum(), total)
            error = torch.maximum(error, far)
        return error / 2 * view.loss_weights, metrics

    return PerSequence(loss, vectorised=True)


def scalars(outputs: Tensor) -> Tensor:
    """(n) or (n, 1) outputs -> (n), in float32 or wider."""
    if outputs.ndim > 2 or (outputs.ndim == 2 and outputs.shape[1] != 1):
        raise InputError(
            f"the model returned {tuple(outputs.shape[1:])} numbers per token; expected one. Use a "
            f"model with a scalar head, such as one for token classification with one label."
        )
    return outputs.reshape(len(outputs)).to(torch.promote_types(outputs.dtype, torch.float32))
