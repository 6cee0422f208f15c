"""distillation: the ways to give a teacher agree; impossible tokens and wrong extras."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, distillation
from tests.tensors.scored import VOCABULARY, batch_with, close, flat_logits

DIVERGENCES: list[Any] = ["forward_kl", "reverse_kl", "jsd"]


def with_extra(batch: Batch, **columns: Tensor) -> Batch:
    """The batch with token-aligned extras."""
    aligned: dict[str, Any] = {**batch.aligned, **dict.fromkeys(columns, "token")}
    return replace(batch, extras={**batch.extras, **columns}, aligned=aligned)


def to_tokens(values: Tensor) -> Tensor:
    """Outputs at the slot that predicts a token -> at the token itself."""
    return torch.cat((torch.zeros_like(values[:, :1]), values[:, :-1]), dim=1)


def teacher_of(batch: Batch) -> Tensor:
    return flat_logits(batch, seed=5).double()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_teacher_that_runs_is_the_same_as_its_logits(divergence: Any) -> None:
    batch = batch_with([4, 1, 3])
    logits = flat_logits(batch).double().requires_grad_()
    options: dict[str, Any] = {"divergence": divergence, "temperature": 1.7}
    called = distillation(**options, teacher=teacher_of)
    stored = with_extra(batch, teacher_logits=teacher_of(batch))
    top = (teacher_of(batch) / 1.7).log_softmax(-1).topk(VOCABULARY)
    whole = with_extra(
        batch, teacher_log_probs=to_tokens(top.values), teacher_ids=to_tokens(top.indices)
    )
    expected = called(logits, batch).loss
    (gradient,) = torch.autograd.grad(expected, logits)
    named = distillation(**options, teacher=lambda given: {"logits": teacher_of(given)})
    ways = [(named, batch), (distillation(**options), stored), (distillation(**options), whole)]
    narrow = with_extra(whole, teacher_ids=whole.extras["teacher_ids"].to(torch.int16))
    ways.append((distillation(**options), narrow))
    ways += [(distillation(**options, rest="renormalize"), whole), (ways[1][0].looped(), stored)]
    for loss, given in ways:
        found = loss(logits, given).loss
        close(found, expected)
        close(torch.autograd.grad(found, logits)[0], gradient)
    assert float(called(teacher_of(batch), batch).loss) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_tokens_that_both_exclude_leave_the_gradient_finite(divergence: Any) -> None:
    batch = batch_with([4, 3])
    hidden = torch.zeros(VOCABULARY).index_fill_(0, torch.tensor([2]), -torch.inf)
    logits = (flat_logits(batch) + hidden).requires_grad_()
    loss = distillation(divergence=divergence, teacher=lambda b: teacher_of(b).float() + hidden)
    found = loss(logits, batch).loss
    (gradient,) = torch.autograd.grad(found, logits)
    assert found.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_weight_of_zero_hides_what_the_teacher_excludes(divergence: Any) -> None:
    batch = batch_with([4, 3])
    logits = flat_logits(batch).double().requires_grad_()
    weights = batch.loss_weights.clone()
    weights[0, 1] = 0
    batch = replace(batch, loss_weights=weights)

    def odd(given: Batch) -> Tensor:
        return (
            teacher_of(given)
            .index_fill(-1, torch.tensor([2]), -torch.inf)
            .where(given.loss_weights[..., None] == 0, teacher_of(given))
        )

    loss = distillation(divergence=divergence, teacher=teacher_of)(logits, batch).loss
    other = distillation(divergence=divergence, teacher=odd)(logits, batch).loss
    close(other, loss)
    gradients = [torch.autograd.grad(total, logits)[0] for total in (other, loss)]
    close(*gradients)


def test_values_of_ignored_slots_do_not_matter() -> None:
    batch = batch_with([4, 3])
    ignored = (batch.labels == -100)[..., None]
    logits = flat_logits(batch).double().requires_grad_()

    def odd(given: Batch) -> Tensor:
        return teacher_of(given).masked_fill(ignored, torch.nan)

    totals = [distillation(teacher=teacher)(logits, batch).loss for teacher in (teacher_of, odd)]
    gradients = [torch.autograd.grad(total, logits)[0] for total in totals]
    close(totals[1], totals[0])
    close(gradients[1], gradients[0])


def test_faults_say_what_to_do() -> None:
    batch = batch_with([4])
    logits = flat_logits(batch)
    for options, message in (
        ({"divergence": "kl"}, "unknown divergence 'kl'"),
        ({"beta": 1.0}, "beta must be between 0 and 1"),
        ({"rest": "drop"}, "unknown rest 'drop'"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            distillation(**options)
    with pytest.raises(InputError, match="the batch has no 'teacher_ids'"):
        distillation()(logits, batch)
    two = torch.zeros(1, batch.width, 2)
    floats = with_extra(batch, teacher_log_probs=two, teacher_ids=two)
    with pytest.raises(InputError, match=r"the ids with dtype=torch\.int64"):
        distillation()(logits, floats)
    shifted = with_extra(batch, teacher_logits=logits).at_labels("teacher_logits")
    with pytest.raises(InputError, match=r"Do not shift them with at_labels\(\)"):
        distillation()(logits, shifted)
    with pytest.raises(InputError, match="the teacher has 3 logits per token and the model 7"):
        distillation(teacher=lambda b: flat_logits(b, size=3))(logits, batch)
