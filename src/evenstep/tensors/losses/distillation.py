"""distillation: the divergence of a model's distribution from a teacher's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.core.text import one_of
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.losses.options import positive
from evenstep.tensors.metrics import Metric
from evenstep.tensors.outputs import select_output
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View

Divergence: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd"]
Rest: TypeAlias = Literal["bucket", "renormalize"]


def distillation(
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    rest: Rest = "bucket",
    teacher: Callable[[Any], Any] | None = None,
) -> PerSequence:
    """The weighted sum of the divergence between a teacher's and the model's distribution.

    Per loss token, with t for the teacher's and s for the model's distribution:

    forward_kl  KL(t, s) = sum of t log(t / s)
    reverse_kl  KL(s, t)
    jsd         beta KL(t, m) + (1 - beta) KL(s, m), where m = beta t + (1 - beta) s

    `temperature` divides the logits of both; the loss is not multiplied by its square.

    The teacher's distribution is one of:

    teacher            a function of the batch that returns logits, called without gradients
    teacher_logits     a token-aligned extra, Extra(aligned="token", shape=(vocabulary,)): what a
                       model returns for the sample. As in its output, entry i predicts token i + 1
    teacher_log_probs  a token-aligned extra of the k most likely tokens, computed at `temperature`,
                       with their ids in the extra `teacher_ids` (dtype=torch.int64). As in all
                       extras of log-probs, entry i is of token i given the tokens before it. All
                       other tokens are one bucket, or rest="renormalize" leaves them out of both

        loss = distillation(divergence="jsd", teacher=lambda batch: teacher_model(batch))
    """
    one_of("divergence", divergence, Divergence)
    one_of("rest", rest, Rest)
    positive("temperature", temperature)
    if not 0 < beta < 1:
        raise ConfigError(
            f"beta must be between 0 and 1, got {beta}. For the limits use forward_kl (0) or "
            f"reverse_kl (1)."
        )

    def loss(outputs: Tensor, view: View) -> Outcome:
        counts = view.labels != IGNORE_INDEX
        student = (_wide(outputs) / temperature).log_softmax(-1)
        if teacher is not None:
            known = _log_probs(_called(teacher, view), temperature, student)
        elif "teacher_logits" in view.source.aligned:
            known = _log_probs(_stored(view), temperature, student)
        else:
            known, student = _top(view, student, counts, rest)
        # Slots without a label may hold anything, also NaN.
        known = torch.where(counts[:, None], known, student.detach())
        value = torch.where(counts, _divergence(known, student, divergence, beta), 0.0)
        return value * view.loss_weights, {divergence: Metric.mean(value.sum(), counts.sum())}

    return PerSequence(loss, vectorised=True)


def _divergence(t: Tensor, s: Tensor, which: Divergence, beta: float) -> Tensor:
    if which == "forward_kl":
        return _kl(t, s)
    if which == "reverse_kl":
        return _kl(s, t)
    absent = (t == -torch.inf) & (s == -torch.inf)
    parts = t.masked_fill(absent, 0.0) + math.log(beta), s.masked_fill(absent, 0.0)
    mixed = torch.logaddexp(parts[0], parts[1] + math.log(1 - beta))
    return beta * _kl(t, mixed) + (1 - beta) * _kl(s, mixed)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Log-probs (n, k) each -> (n); a probability of 0 in the first adds 0."""
    ratio = torch.where(first == -torch.inf, 0.0, first - second)
    return (first.exp() * ratio).sum(-1)


def _called(teacher: Callable[[Any], Any], view: View) -> Tensor:
    with torch.no_grad():
        batch = view.source
        return view.flat(select_output(teacher(batch), "logits", batch.rows, batch.width))


def _stored(view: View) -> Tensor:
    if view.source.aligned["teacher_logits"] != "token":
        raise InputError(
            "'teacher_logits' must be a token-aligned extra: like the model's logits, they are "
            "those of the slot that predicts a token. Do not shift them with at_labels()."
        )
    return view.extra("teacher_logits")


def _log_probs(logits: Tensor, temperature: float, student: Tensor) -> Tensor:
    if logits.shape[-1] != student.shape[-1]:
        raise InputError(
            f"the teacher has {logits.shape[-1]} logits per token and the model "
            f"{student.shape[-1]}. Use a teacher with the same vocabulary."
        )
    return (_wide(logits) / temperature).log_softmax(-1)


def _top(view: View, student: Tensor, counts: Tensor, rest: Rest) -> tuple[Tensor, Tensor]:
    """Log-probs of the teacher's k tokens and of the rest, of the teacher and of the model."""
    missing = {"teacher_log_probs", "teacher_ids"} - view.source.aligned.keys()
    if missing:
        raise InputError(
            f"distillation needs teacher=, the extra 'teacher_logits', or 'teacher_log_probs' and "
            f"'teacher_ids'; the batch has no {min(missing)!r}. Declare it in Collator(extras=...)."
        )
    known, ids = view.ahead("teacher_log_probs"), view.ahead("teacher_ids")
    if ids.is_floating_point() or ids.shape != known.shape or ids.ndim != 2:
        raise InputError(
            f"'teacher_ids' is {ids.dtype} of shape {tuple(ids.shape)} and 'teacher_log_probs' has "
            f"shape {tuple(known.shape)}; expected k integers and k log-probs per token. Declare "
            f"both with shape=(k,), and the ids with dtype=torch.int64."
        )
    known, ids = _wide(known), torch.where(counts[:, None], ids, 0)
    chosen = student.gather(-1, ids)
    if rest == "renormalize":
        return known.log_softmax(-1), chosen.log_softmax(-1)
    if ids.shape[-1] == student.shape[-1]:
        return known, chosen
    least = torch.finfo(known.dtype).eps  # rounding of a sum that should be at most 1
    left = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=least).log()
    others = student.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((known, left), -1), torch.cat((chosen, others), -1)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
