"""Random steps, run on fake ranks as a trainer does, and by definition, one segment at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from evenstep import Packed, Padded, Plan, Recipe, Topology, make_plan
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import Batch, Collator, Extra, cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import (
    Collective,
    Constant,
    Custom,
    FixedLength,
    GroupMean,
    Normalization,
    SampleWeights,
    SequenceMean,
    TokenMean,
)
from tests.internals import (
    Bundle,
    Gradients,
    Layout,
    LossValues,
    StepLoss,
    errors_of_parameters,
    weighted,
)

torch.set_num_threads(1)

VOCABULARY, LIMIT = 11, 8
SHAPE = DecoderShape(vocab=VOCABULARY, hidden=8, layers=1, heads=2, kv_heads=1, ffn=8)
COLLATOR = Collator(
    extras={
        "group": Extra(aligned="sequence", dtype=torch.int64),
        "group_tokens": Extra(aligned="sequence"),
        "weight": Extra(aligned="sequence", dtype=torch.float64),
        "token_weight": Extra(aligned="token", dtype=torch.float64),
    }
)


def by_token(batch: Batch) -> Tensor:
    """Weights between 0 and 1 per token."""
    return batch.ahead("token_weight")


NORMALIZATIONS: dict[str, Normalization] = {
    "token mean": TokenMean(),
    "sequence mean": SequenceMean(),
    "group mean": GroupMean(),
    "constant": Constant(7.0),
    "fixed length": FixedLength(5.0),
    "sample weights": SampleWeights(),
    "token weights": Custom("token_weights", by_token),
}


@dataclass(frozen=True)
class Work:
    """A plan of one step, and its samples."""

    plan: Plan
    samples: list[dict[str, Any]] = field(repr=False)

    def batches(self, rank: int) -> list[Batch]:
        return [COLLATOR(micro, self.samples) for micro in self.plan[0, rank]]

    @property
    def totals(self) -> dict[str, float]:
        """The totals of the step, counted by definition."""
        masks = [sample["loss_mask"][1:] for sample in self.samples]
        counts = [int(mask.sum()) for mask in masks]
        groups = {s["group"] for s, n in zip(self.samples, counts, strict=True) if n}
        by_token = [s["token_weight"][1:][s["loss_mask"][1:]] for s in self.samples]
        weights = [float(s["weight"]) * n for s, n in zip(self.samples, counts, strict=True)]
        return {
            "loss_tokens": sum(counts),
            "sequences": sum(n > 0 for n in counts),
            "groups": len(groups),
            "samples": len(self.samples),
            "sample_weights(weight)": sum(weights),
            "token_weights": float(sum(each.sum() for each in by_token)),
        }


def make_work(
    lengths: list[int], recipe: Recipe, seed: int = 0, groups: int = 3, masked: float = 0.3
) -> Work:
    rng = np.random.default_rng(seed)
    samples: list[dict[str, Any]] = []
    for length in lengths:
        kept = rng.random() > masked  # some samples have no loss tokens
        samples.append(
            {
                "input_ids": rng.integers(0, VOCABULARY, length),
                "loss_mask": (rng.random(length) > masked) & kept,
                "group": int(rng.integers(0, groups)),
                "weight": float(rng.random()),
                "token_weight": rng.random(length),
            }
        )
    for sample in samples:
        mates = (other for other in samples if other["group"] == sample["group"])
        sample["group_tokens"] = sum(int(mate["loss_mask"][1:].sum()) for mate in mates)
    return Work(make_plan(lengths, recipe), samples)


LAYOUTS: list[Layout] = [
    Packed(max_tokens=LIMIT),
    Packed(max_tokens=LIMIT, pad_to=LIMIT),
    Padded(max_tokens=2 * LIMIT, pad_to=LIMIT),
    Packed(rows=2, pad_to=LIMIT),
    Packed(samples=2, max_tokens=LIMIT),
]


def works() -> SearchStrategy[Work]:
    """One step of a few samples, some over-long, on 1 to 4 ranks, some with nothing to run."""

    @st.composite
    def work(draw: DrawFn) -> Work:
        split = draw(st.booleans())
        recipe = Recipe(
            layout=draw(st.sampled_from(LAYOUTS)),
            topology=Topology(dp=draw(st.integers(1, 4))),
            overflow="split" if split else "error",
        )
        longest = 2 * LIMIT + 3 if split else LIMIT
        lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=6))
        return make_work(lengths, recipe, seed=draw(st.integers(0, 999)))

    return work()


def model_of(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(SHAPE)
    model.double()
    return model


class Gradient(dict[str, Tensor]):
    """The gradient of each parameter by name; zeros for parameters without one."""

    def __add__(self, other: Gradient | float) -> Gradient:
        if isinstance(other, Gradient):
            return Gradient({name: each + other[name] for name, each in self.items()})
        return Gradient({name: each + other for name, each in self.items()})

    __radd__ = __add__  # of sum

    def __rmul__(self, factor: float) -> Gradient:
        return Gradient({name: factor * each for name, each in self.items()})

    @property
    def flat(self) -> Tensor:
        return torch.cat([each.flatten() for each in self.values()])

    def norm(self) -> float:
        return float(self.flat.norm())


_WRAPPERS = ("_checkpoint_wrapped_module.", "module.", "_orig_mod.", "model.")


def gradient_of(model: Any) -> Gradient:
    """Whole gradients, under the names that parameters have without wrappers."""
    gradients = Gradient()
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        gradients[name] = whole.detach().clone()
    return gradients


def distance(found: Gradient, expected: Gradient) -> float:
    """The largest difference of a parameter's gradient, relative to its own largest entry."""
    assert found.keys() == expected.keys()
    return max(errors_of_parameters(found, expected).values())


# By definition ----------------------------------------------------------------------------------


def by_definition(name: str, model: Decoder, work: Work) -> Tensor:
    """The loss of the step from the log-likelihoods of its samples, using only the model."""
    nll, by_token = [], []
    ends = work.plan.segments
    for number, sample in enumerate(work.samples):
        mine = ends.sample == number
        own = sorted(zip(ends.start[mine].tolist(), ends.length[mine].tolist(), strict=True))
        found = [_nll(model, sample, start, length) for start, length in own]
        kept = torch.as_tensor(sample["loss_mask"])[1:]
        nll.append(torch.cat(found)[kept])
        by_token.append(torch.as_tensor(sample["token_weight"])[1:][kept])
    everything = torch.cat(nll)
    if not everything.numel():
        return everything.sum()
    weight = torch.tensor([sample["weight"] for sample in work.samples], dtype=torch.float64)
    if name == "sequence mean":
        return torch.stack([each.mean() for each in nll if each.numel()]).mean()
    if name == "group mean":
        groups: dict[int, list[Tensor]] = {}
        for sample, each in zip(work.samples, nll, strict=True):
            groups.setdefault(sample["group"], []).append(each)
        joined = [torch.cat(each) for each in groups.values()]
        return torch.stack([each.mean() for each in joined if each.numel()]).mean()
    if name == "constant":
        return everything.sum() / 7
    if name == "fixed length":
        return everything.sum() / (5 * len(work.samples))
    if name == "sample weights":
        each_weight = weight.repeat_interleave(torch.tensor([each.numel() for each in nll]))
        return (everything * each_weight).sum() / each_weight.sum()
    if name == "token weights":
        each_weight = torch.cat(by_token)
        return (everything * each_weight).sum() / each_weight.sum()
    assert name == "token mean"
    return everything.mean()


def _nll(model: Decoder, sample: dict[str, Any], start: int, length: int) -> Tensor:
    """Of the tokens that a segment predicts: its own but the first, and the one after it."""
    ids = torch.as_tensor(sample["input_ids"])
    alone = make_plan([length], Recipe(layout=Packed(samples=1)))
    batch = Collator()(alone[0, 0][0], [{"input_ids": ids[start : start + length]}])
    log_probs = model(batch)[0].log_softmax(-1)
    predicted = ids[start + 1 : start + length + 1]
    return -log_probs[torch.arange(len(predicted)), predicted]


# As a trainer does ------------------------------------------------------------------------------


def run_step(
    step_loss: StepLoss,
    model: Decoder,
    work: Work,
    wrap: Callable[[Collective], Collective] = lambda ranks: ranks,
) -> list[tuple[LossValues, Gradient]]:
    """Per rank, the result and the gradient, averaged over ranks as by DDP."""

    def rank(ranks: Collective) -> tuple[LossValues, Gradient]:
        own, collective = copy.deepcopy(model), wrap(ranks)
        gradients = Gradients(own.parameters())
        bundles, batches = [], work.batches(ranks.rank)
        for batch in batches:
            amounts = step_loss.amounts(batch)
            scales = scales_of(step_loss, amounts, len(batches), collective)
            sums, metrics = {}, {}
            outputs = own(batch)
            for name, (normalization, _) in step_loss.losses.items():
                found = cross_entropy()(outputs, weighted(batch, normalization))
                sums[name], metrics = found.loss, found.metrics
            gradients.backward(step_loss.objectives(sums, scales))
            bundles.append(step_loss.bundle(sums, amounts, scales, metrics))
        reduced = Bundle.merge(bundles).reduce(collective)
        result = step_loss.finish(reduced)
        gradients.combine(result.factors)
        _average(own, ranks)
        return result, gradient_of(own)

    return run_ranks(work.plan.num_ranks, rank)


def scales_of(
    step_loss: StepLoss,
    amounts: dict[str, Tensor],
    micro_batches: int,
    ranks: Collective,
) -> dict[str, float]:
    if step_loss.mode != "per_micro_batch":
        return step_loss.scales()
    reduced = Bundle(amounts).reduce(ranks).sums
    return step_loss.scales(reduced=reduced, micro_batches=micro_batches)


def _average(model: Decoder, ranks: Collective) -> None:
    for parameter in model.parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = ranks.all_reduce_sum(own) / ranks.size
