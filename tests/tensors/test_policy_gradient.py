"""policy_gradient against its definition, and with tokens whose probability changed absurdly."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from evenstep.tensors.batch import Batch
from evenstep.tensors.losses import policy_gradient
from tests.tensors.scored import batch_with, flat_logits

EXTRAS = ("old_log_probs", "advantages", "reference_log_probs", "rollout_log_probs")


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    return batch_with(lengths, EXTRAS, seed=seed)


def at(batch: Batch, name: str, slot: int, value: float) -> Batch:
    """The batch with one value of a token-aligned extra replaced."""
    extras: dict[str, Any] = dict(batch.extras)
    extras[name] = extras[name].clone()
    extras[name][0, slot] = value
    return replace(batch, extras=extras)


# Outliers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("old", [-95.0, -19.0, -12.0, 0.0, 95.0, float("-inf")])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_an_outlier_token_gives_finite_gradients(
    dtype: torch.dtype, advantage: float, old: float, ratio: Any
) -> None:
    batch = at(at(batch_of([4, 3]), "old_log_probs", 2, old), "advantages", 2, advantage)
    logits = flat_logits(batch).to(dtype).requires_grad_()
    sums = policy_gradient(ratio=ratio)(logits, batch)
    sums.loss.backward()
    assert sums.loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reference", [-95.0, 95.0, 15.0, 0.0, float("-inf")])
def test_the_kl_term_of_an_outlier_token_is_finite(dtype: torch.dtype, reference: float) -> None:
    batch = at(batch_of([4, 3]), "reference_log_probs", 2, reference)
    for estimator in ("k1", "k2", "k3"):
        logits = flat_logits(batch).to(dtype).requires_grad_()
        sums = policy_gradient(kl_weight=1.0, kl_estimator=estimator)(logits, batch)
        sums.loss.backward()
        assert sums.loss.isfinite()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()


def test_beyond_the_bound_a_token_has_no_gradient() -> None:
    batch = at(at(batch_of([4]), "old_log_probs", 2, -95.0), "advantages", 2, -1.0)
    logits = flat_logits(batch).requires_grad_()
    policy_gradient(clip_low=1.0, clip_high=1e3)(logits, batch).loss.backward()
    assert logits.grad is not None
    assert not logits.grad[0, 1].any()  # slot 1 predicts token 2
    assert logits.grad.any()
