"""cross_entropy with its options, and the same from hidden states and a head."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Packed, Padded
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Head, cross_entropy, label_log_probs, policy_gradient
from tests.examples import examples
from tests.internals import Factors, Layout, Wanted, score
from tests.tensors.scored import (
    VOCABULARY,
    batch_with,
    batches_of,
    close,
    collator_of,
    flat_logits,
    samples_with,
)

ALL: Wanted = frozenset({"entropy", "mean_log_probs", "log_normalizer"})
LAYOUTS: list[Layout] = [Packed(max_tokens=8), Packed(samples=1), Padded(max_tokens=24, round_to=4)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"temperature": 2.0, "label_smoothing": 0.2, "z_loss": 1e-2},
]


def by_hand(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    kept = labels != -100
    scaled = logits[kept] / options.get("temperature", 1.0)
    smoothing = options.get("label_smoothing", 0.0)
    value = nn.functional.cross_entropy(
        scaled, labels[kept], label_smoothing=smoothing, reduction="none"
    )
    return (value + options.get("z_loss", 0.0) * scaled.logsumexp(-1) ** 2).sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@examples(10)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_loss_and_gradient_are_those_of_torch_in_any_layout(
    options: dict[str, Any], lengths: list[int], seed: int
) -> None:
    samples = samples_with(lengths, seed=seed)
    table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)
    expected = table.sum() * 0
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"])
        labels = ids.masked_fill(~torch.as_tensor(sample["loss_mask"]), -100)[1:]
        expected = expected + by_hand(table[ids[:-1]], labels, **options)
    (gradient,) = torch.autograd.grad(expected, table)
    loss = cross_entropy(**options)
    for layout in LAYOUTS:
        for way in (loss, loss.looped()):
            found = [
                way(table[b.tokens], b).loss for b in batches_of(samples, collator_of(), layout)
            ]
            close(torch.stack(found).sum(), expected)
            close(torch.autograd.grad(torch.stack(found).sum(), table)[0], gradient)


# Hidden states and a head -----------------------------------------------------------------------


def head_of(bias: bool = True, dtype: torch.dtype = torch.float64, **options: Any) -> Head:
    torch.manual_seed(1)
    return Head(nn.Linear(5, VOCABULARY, bias=bias, dtype=dtype), **options)


def logits_by_hand(hidden: Tensor, head: Head) -> Tensor:
    weight, bias = head.weight_and_bias
    logits = nn.functional.linear(hidden, weight, bias) * head.scale
    cap = head.soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


HEADS: list[dict[str, Any]] = [
    {},
    {"bias": False, "chunk": 1},
    {"chunk": 3, "scale": 0.25},
    {"chunk": 4, "soft_cap": 2.0},
    {"chunk": 2, "scale": -1.5, "soft_cap": 0.5},
]


@pytest.mark.parametrize("wanted", [frozenset(), ALL], ids=["log-probs", "all"])
@pytest.mark.parametrize("options", HEADS, ids=str)
@examples(8)
@given(count=st.integers(0, 11), seed=st.integers(0, 99), temperature=st.sampled_from([1.0, 0.6]))
def test_chunked_scores_are_those_of_the_logits_with_gradients(
    options: dict[str, Any], wanted: Wanted, count: int, seed: int, temperature: float
) -> None:
    head, random = head_of(**options), torch.Generator().manual_seed(seed)
    hidden = torch.randn((count, 5), generator=random, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(-2, VOCABULARY, (count,), generator=random)
    labels = torch.where(labels < 0, -100, labels)
    found = score(hidden, labels, head=head, temperature=temperature, wanted=wanted)
    logits = logits_by_hand(hidden, head)
    expected = score(logits, labels, temperature=temperature, wanted=ALL)
    names = ["log_probs", *sorted(wanted)]
    parameters = [hidden, *(each for each in head.weight_and_bias if each is not None)]
    mix = torch.randn((len(names), count), generator=random, dtype=torch.float64)
    totals = []
    for scores in (found, expected):
        values = torch.stack([getattr(scores, name) for name in names])
        totals.append((values * mix).sum())
        totals.append(torch.cat([g.flatten() for g in torch.autograd.grad(totals[-1], parameters)]))
    close(totals[0], totals[2])
    close(totals[1], totals[3])


def test_gradients_of_chunked_scores_pass_gradcheck() -> None:
    head = head_of(chunk=2, soft_cap=3.0)
    weight, bias = head.weight_and_bias
    hidden = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([2, -100, 0])

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        found = score(hidden, labels, head=head, temperature=0.8, wanted=ALL)
        return found.log_probs, found.entropy, found.mean_log_probs, found.log_normalizer

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


@pytest.mark.parametrize(
    "make",
    [
        lambda head: cross_entropy(head=head, label_smoothing=0.1, z_loss=0.01),
        lambda head: policy_gradient(head=head, entropy_weight=0.1, temperature=0.7),
    ],
)
def test_losses_of_hidden_states_are_those_of_logits(make: Any) -> None:
    batch = batch_with([5, 1, 3], ("old_log_probs", "advantages"))
    head = head_of(chunk=3)
    hidden = flat_logits(batch, size=5).double().requires_grad_()
    weight, bias = head.weight_and_bias
    results = []
    for loss, outputs in ((make(head), hidden), (make(None), logits_by_hand(hidden, head))):
        for way in (loss, loss.looped()):
            total = way(outputs, batch).loss
            gradients = torch.autograd.grad(total, (hidden, weight, bias), retain_graph=True)
            results.append((total, gradients))
    for total, gradients in results[1:]:
        close(total, results[0][0])
        for found, expected in zip(gradients, results[0][1], strict=True):
            close(found, expected)


def test_the_weight_gradient_of_bfloat16_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(4096, 8, dtype=torch.bfloat16)
    labels = torch.randint(0, 16, (4096,))
    weight = linear.weight.detach().double().requires_grad_()
    logits = hidden.double() @ weight.T
    (exact,) = torch.autograd.grad(label_log_probs(logits, labels).sum(), weight)
    for chunk in (4096, 16):
        linear.zero_grad()
        label_log_probs(hidden, labels, head=Head(linear, chunk=chunk)).sum().backward()
        error = (linear.weight.grad.double() - exact).abs().max() / exact.abs().max()
        assert error < 0.01


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("how", ["sum", "each", "twice"])
def test_gradients_of_the_forward_are_those_of_the_logits(smoothing: float, how: str) -> None:
    torch.manual_seed(0)
    head = head_of(chunk=3, soft_cap=4.0, scale=1.5)
    weight, bias = head.weight_and_bias
    hidden = torch.randn(10, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -100, 3, 0, 2, 2, -100, 5, 6, 1])
    weights, other = torch.rand(2, 10, dtype=torch.float64)
    factors = Factors(weights, log_prob=smoothing - 1, mean=-smoothing)
    wanted = frozenset({"mean_log_probs"})
    gradients = []
    for outputs, last in ((hidden, head), (logits_by_hand(hidden, head), None)):
        scores = score(outputs, labels, head=last, temperature=0.7, wanted=wanted, factors=factors)
        value = scores.times(factors)
        total = (value * other).sum() if how == "each" else 3 * value.sum()
        parameters = [hidden, weight, bias]
        if how == "twice":
            torch.autograd.grad(total, parameters, retain_graph=True)
        gradients.append(torch.autograd.grad(total, parameters))
    for ours, expected in zip(*gradients, strict=True):
        close(ours, expected, 1e-12)


@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e-5, 0.0])
def test_small_weights_keep_their_gradients_in_half_precision(weight: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 5000, bias=False, dtype=torch.float16)
    hidden = torch.randn(20, 8, dtype=torch.float16, requires_grad=True)
    labels, weights = torch.randint(0, 5000, (20,)), torch.full((20,), weight)
    factors = Factors(weights, log_prob=-1.0, mean=0.0)
    scores = score(hidden, labels, head=Head(linear, chunk=7), factors=factors)
    (1024 * scores.times(factors).sum()).backward()
    exact = hidden.detach().double().requires_grad_()
    logits = exact @ linear.weight.detach().double().T
    nll = nn.functional.cross_entropy(logits, labels, reduction="none")
    (1024 * weight * nll.sum()).backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    error = (hidden.grad.double() - exact.grad).norm() / exact.grad.norm().clamp(min=1e-30)
    assert float(error) < 5e-3


def test_the_forward_computes_gradients_only_where_they_are_needed() -> None:
    head, hidden = head_of(), torch.randn(6, 5, dtype=torch.float64)
    factors = Factors(torch.ones(6), log_prob=-1.0, mean=0.0)
    labels = torch.tensor([1, 2, 3, 0, 1, 2])
    with torch.no_grad():
        value = score(hidden, labels, head=head, factors=factors).times(factors)
    assert not value.requires_grad
    value = score(hidden, labels, head=head, factors=factors).times(factors)
    value.sum().backward()
    weight, _ = head.weight_and_bias
    assert weight.grad is not None
    assert hidden.grad is None


def test_autocast_applies_to_the_head() -> None:
    head, hidden = head_of(dtype=torch.float32), torch.randn(6, 5, requires_grad=True)
    labels = torch.tensor([1, 2, 3, 4, 5, 6])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = label_log_probs(hidden, labels, head=head)
        expected = label_log_probs(logits_by_hand(hidden, head), labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    for total in (found, expected):
        assert torch.autograd.grad(total.sum(), hidden, retain_graph=True)[0].dtype == torch.float32


def test_probabilities_of_zero_leave_entropy_and_gradient_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1])
    p = torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(-1)
    expected = -(p * p.log()).sum()
    weight = torch.zeros(3, 1, dtype=torch.float64)
    linear = nn.Linear(1, 3, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(logits[0])
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    wanted: Wanted = frozenset({"entropy"})
    for found, leaf in (
        (score(logits, labels, wanted=wanted), logits),
        (score(hidden, labels, head=Head(linear), wanted=wanted), hidden),
    ):
        close(found.entropy[0], expected)
        total = found.entropy.sum() + found.log_probs.sum()
        assert torch.autograd.grad(total, leaf)[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("headed", [True, False])
def test_a_weight_of_zero_hides_a_token_of_probability_zero(
    options: dict[str, Any], headed: bool
) -> None:
    head = head_of(chunk=2)
    weight, bias = head.weight_and_bias
    batch = batch_with([4, 3])
    hidden = torch.randn(batch.rows, batch.width, 5, dtype=torch.float64, requires_grad=True)
    label = int(batch.labels[0, 0])
    least = -torch.inf if "label_smoothing" not in options else -1e30  # its mean is -inf else
    assert bias is not None
    with torch.no_grad():
        bias[label] = least
    batch = replace(batch, loss_weights=batch.loss_weights * (batch.labels != label))
    hidden_slots = torch.where(batch.labels == label, -100, batch.labels)
    rest = replace(batch, labels=hidden_slots)
    found = []
    for each in (batch, rest):
        loss = cross_entropy(**options, head=head if headed else None)
        total = loss(hidden if headed else logits_by_hand(hidden, head), each).loss
        found.append((total, *torch.autograd.grad(total, (hidden, weight, bias))))
    for with_zero, without in zip(*found, strict=True):
        assert with_zero.isfinite().all()
        close(with_zero, without)


@pytest.mark.parametrize("how", ["factors", "scores"])
def test_second_derivatives_of_a_head_are_refused(how: str) -> None:
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    factors = Factors(torch.ones(2), log_prob=-1.0, mean=0.0) if how == "factors" else None
    scores = score(hidden.tanh(), torch.tensor([1, 2]), head=Head(weight), factors=factors)
    total = scores.log_probs.sum() if scores.weighted is None else scores.weighted.sum()
    with pytest.raises(ConfigError, match=r"create_graph=True asks for it.*from logits"):
        torch.autograd.grad(total, hidden, create_graph=True)


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, 7])
@pytest.mark.parametrize("wanted", [frozenset(), frozenset({"mean_log_probs"})])
def test_labels_that_are_no_token_are_never_scored(label: int, wanted: Wanted) -> None:
    logits, labels = torch.zeros(2, 7), torch.tensor([1, label])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        score(logits, labels, wanted=wanted)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        score(torch.zeros(2, 5), labels, head=Head(torch.zeros(7, 5)), wanted=wanted)


def test_faults_say_what_to_do() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
        ({"z_loss": -1.0}, "z_loss must be finite and at least 0"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            cross_entropy(**options)
    heads: list[tuple[Any, dict[str, Any], str]] = [
        (nn.Sequential(), {}, "head must be a plain nn.Linear"),
        (nn.Linear(2, 3), {"chunk": 0}, "chunk must be an integer"),
        (nn.Linear(2, 3), {"soft_cap": 0.0}, "soft_cap must be positive"),
    ]
    for linear, options, message in heads:
        with pytest.raises(ConfigError, match=message):
            Head(linear, **options)
    batch = batch_with([3])
    with pytest.raises(InputError, match="7 numbers per token, but the head takes 5"):
        cross_entropy(head=head_of())(flat_logits(batch).double(), batch)


def test_named_outputs_are_read_and_others_refused() -> None:
    batch = batch_with([3])
    logits = flat_logits(batch)
    expected = cross_entropy()(logits, batch).loss
    assert torch.equal(cross_entropy()({"logits": logits, "loss": None}, batch).loss, expected)
    for outputs in ((logits,), {"hidden": logits}, None):
        with pytest.raises(InputError, match="without 'logits'"):
            cross_entropy()(outputs, batch)
