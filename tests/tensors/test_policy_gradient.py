"""policy_gradient against its definition, and with tokens whose probability changed absurdly."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Recipe, make_plan
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, policy_gradient
from tests.examples import examples
from tests.tensors.scored import batch_with, close, collator_of, flat_logits, samples_with

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


# The definition ---------------------------------------------------------------------------------


def by_hand(logits: Tensor, batch: Batch, **options: Any) -> Tensor:
    """The sum of the loss, token by token, in plain terms."""
    total = logits.sum() * 0
    begins, sizes = batch.cu_seqlens.tolist(), batch.seqlens.tolist()
    for begin, size in zip(begins, sizes, strict=False):
        tokens = range(begin + 1, begin + size)
        scaled = logits[0] / options.get("temperature", 1.0)
        new = {i: scaled[i - 1].log_softmax(-1)[batch.tokens[0, i]] for i in tokens}
        extras: Any = {name: batch.extras[name][0] for name in EXTRAS}  # type: ignore[index]
        change = {i: new[i] - extras["old_log_probs"][i] for i in tokens}
        mean = sum(change.values(), start=logits.new_zeros(())) / max(len(change), 1)
        for i in tokens:
            log_ratio = mean if options.get("ratio") == "sequence" else change[i]
            r, a = log_ratio.clamp(-20, 20).exp(), extras["advantages"][i]
            low, high = 1 - options.get("clip_low", 0.2), 1 + options.get("clip_high", 0.2)
            value = torch.maximum(-r * a, -r.clamp(low, high) * a)
            if options.get("dual_clip") and a < 0:
                value = torch.minimum(value, -options["dual_clip"] * a)
            if options.get("importance_cap"):
                weight = (extras["old_log_probs"][i] - extras["rollout_log_probs"][i]).exp()
                value = value * min(float(weight), options["importance_cap"])
            if options.get("kl_weight"):
                d = extras["reference_log_probs"][i] - new[i]
                which = options.get("kl_estimator", "k3")
                estimate = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[which]
                value = value + options["kl_weight"] * estimate
            if options.get("entropy_weight"):
                p = scaled[i - 1].softmax(-1)
                value = value + options["entropy_weight"] * (p * p.log()).sum()
            total = total + value
    return total


OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0},
    {"importance_cap": 2.0},
    {"kl_weight": 0.3},
    {"kl_weight": 0.3, "kl_estimator": "k1"},
    {"kl_weight": 0.3, "kl_estimator": "k2"},
    {"entropy_weight": 0.2},
    {"temperature": 0.6, "entropy_weight": 0.2},
    {"ratio": "sequence", "dual_clip": 1.5, "importance_cap": 0.9, "kl_weight": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@examples(10)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float16]),
)
def test_loss_and_gradient_are_those_of_the_definition(
    options: dict[str, Any], lengths: list[int], seed: int, dtype: torch.dtype
) -> None:
    batch, narrow = batch_of(lengths, seed), {}
    for name in EXTRAS:
        value: Any = batch.extras[name]
        narrow[name] = value.to(dtype)
    batch = replace(batch, extras={name: each.double() for name, each in narrow.items()})
    logits = flat_logits(batch, seed).double().requires_grad_()
    expected = by_hand(logits, batch, **options)
    (gradient,) = torch.autograd.grad(expected, logits)
    batch = replace(batch, extras=narrow)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    for way in (policy_gradient(**options), policy_gradient(**options).looped()):
        found = way(logits, batch).loss
        close(found, expected, tolerance)
        close(torch.autograd.grad(found, logits)[0], gradient, tolerance)


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    budget=st.integers(2, 12),
    looped=st.booleans(),
)
def test_a_ratio_of_sequences_does_not_depend_on_the_cut_or_is_refused(
    lengths: list[int], budget: int, looped: bool
) -> None:
    samples = samples_with(lengths, EXTRAS)
    loss = policy_gradient(ratio="sequence")
    loss = loss.looped() if looped else loss
    whole = batch_of(lengths)
    table = flat_logits(whole).double()[0]  # (slots, vocabulary)
    first = dict(zip(whole.sample_ids.tolist(), whole.cu_seqlens[:-1].tolist(), strict=True))
    recipe = Recipe(layout=Packed(max_tokens=budget), overflow="split")
    plan = make_plan(lengths, recipe)
    total = torch.zeros((), dtype=torch.float64)
    for micro in plan[0, 0]:
        batch = collator_of(EXTRAS)(micro, samples)
        if any(
            n < lengths[i]
            for i, n in zip(micro.segments.sample, micro.segments.length, strict=True)
        ):
            with pytest.raises(InputError, match="was split, but this loss is of whole sequences"):
                loss(torch.zeros((1, batch.width, table.shape[-1])), batch)
            return
        slots = [
            torch.arange(int(n)) + first[int(i)]
            for i, n in zip(micro.segments.sample, micro.segments.length, strict=True)
        ]
        total = total + loss(table[torch.cat(slots)][None], batch).loss
    close(total, loss(table[None], whole).loss)


def test_extras_with_more_than_one_number_are_refused() -> None:
    batch = batch_of([4, 3])
    column: Any = batch.extras["advantages"]
    batch = replace(batch, extras={**batch.extras, "advantages": column[..., None]})
    with pytest.raises(InputError, match=r"'advantages' has entries of shape \(1,\); expected one"):
        policy_gradient()(flat_logits(batch), batch)


def test_shares_and_entropy_are_metrics() -> None:
    batch = at(at(batch_of([4, 3]), "old_log_probs", 2, -19.0), "advantages", 2, -1.0)
    batch = at(batch, "rollout_log_probs", 2, -25.0)
    loss = policy_gradient(dual_clip=3.0, importance_cap=100.0, entropy_weight=0.0)
    plain = policy_gradient(dual_clip=3.0, importance_cap=100.0)
    logits = flat_logits(batch).double()
    for way in (loss, loss.looped()):
        metrics = way(logits, batch).metrics
        assert float(metrics["dual_clipped"].value) >= 1 / 5
        assert float(metrics["truncated"].value) == pytest.approx(1 / 5)
        slots = (batch.labels[0] != -100).nonzero()[:, 0]
        p = logits[0, slots].softmax(-1)
        expected = float(-(p * p.log()).sum(-1).mean())
        assert float(metrics["entropy"].value) == pytest.approx(expected)
    close(loss(logits, batch).loss, plain(logits, batch).loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip must be greater than 1"),
        ({"importance_cap": 0.0}, "importance_cap must be positive"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"clip_low": -0.1}, "clip_low must be finite and at least 0"),
        ({"kl_estimator": "k4"}, "unknown kl_estimator 'k4'"),
        ({"head": "lm_head"}, "head must be a plain nn.Linear"),
    ],
)
def test_wrong_options_are_refused_where_they_are_given(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_gradient(**options)
