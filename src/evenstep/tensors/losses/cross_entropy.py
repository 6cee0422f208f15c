"""cross_entropy: the negative log-likelihood of the labels."""

from __future__ import annotations

from torch import Tensor, nn

from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.losses.head import Head, Wanted
from evenstep.tensors.losses.options import at_least, positive, share
from evenstep.tensors.losses.scores import score
from evenstep.tensors.metrics import Metric
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View


def cross_entropy(
    *,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    head: Head | nn.Linear | Tensor | None = None,
) -> PerSequence:
    """The weighted sum of the negative log-likelihood of the labels.

    Per token: -(1 - e) log p(label) - e * mean of log p over the vocabulary + z * logsumexp², where
    e is `label_smoothing` and z is `z_loss`. Logits are divided by `temperature` first. With
    `head`, the model returns hidden states; see `Head`. The metric `nll` is -log p(label).

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> import torch
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> cross_entropy()(torch.zeros(1, 3, 4), batch).by_sequence.exp().tolist()
    [4.0, 1.0]
    """
    positive("temperature", temperature)
    share("label_smoothing", label_smoothing)
    at_least("z_loss", z_loss, 0)
    last, wanted = Head.of(head), _wanted(label_smoothing, z_loss)

    def loss(outputs: Tensor, view: View) -> Outcome:
        labels = view.labels
        found = score(outputs, labels, head=last, temperature=temperature, wanted=wanted)
        nll = value = -found.log_probs
        counts = (labels != IGNORE_INDEX).sum()
        metrics = {"nll": Metric.mean(nll.sum(), counts), "loss_tokens": Metric.sum(counts)}
        if label_smoothing:
            value = (1 - label_smoothing) * nll - label_smoothing * found.mean_log_probs
        if z_loss:
            squares = found.log_normalizer.square()
            value = value + z_loss * squares
            metrics["z_loss"] = Metric.mean(z_loss * squares.sum(), counts)
        return value * view.loss_weights, metrics

    return PerSequence(loss, vectorised=True)


def _wanted(label_smoothing: float, z_loss: float) -> Wanted:
    smoothed: Wanted = frozenset({"mean_log_probs"} if label_smoothing else ())
    return smoothed | frozenset({"log_normalizer"} if z_loss else ())
