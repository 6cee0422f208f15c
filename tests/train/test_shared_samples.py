"""Steps that share samples between ranks have the gradients of one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Plan, Recipe, Topology, find_prefixes, make_plan
from evenstep.tensors import PerSequence, cross_entropy, policy_gradient
from evenstep.testing import run_ranks
from evenstep.train import GroupMean, Runner, SequenceMean, TokenMean
from tests.forests import forest
from tests.internals import errors_of_parameters
from tests.shared_plans import share_samples
from tests.train.test_trees import COLLATE, alone, decoder, gradient, samples_of

LOSSES: dict[str, Callable[[], Any]] = {
    "cross_entropy": lambda: cross_entropy(z_loss=0.01, label_smoothing=0.1),
    "policy_gradient": lambda: policy_gradient(entropy_weight=0.1),
    "sequence ratio": lambda: policy_gradient(ratio="sequence"),
    "own": lambda: PerSequence(
        lambda x, view: x.square().mean(-1) * view.loss_weights, vectorised=True
    ),
    "plain": lambda: lambda x, batch: (x.square().mean(-1) * batch.loss_weights).sum(),
}
NORMALIZATIONS = [TokenMean(), SequenceMean(), GroupMean()]


def shared_plan(rng: np.random.Generator, ids: list[list[int]], ranks: int, trees: bool) -> Plan:
    recipe = Recipe(layout=Packed(max_tokens=24), topology=Topology(dp=ranks))
    prefixes = find_prefixes(ids) if trees else None
    return share_samples(rng, make_plan([len(each) for each in ids], recipe, prefixes=prefixes))


def on_threads(model: Any, plan: Plan, samples: Any, loss: Any, **options: Any) -> list[Any]:
    """(result, gradients) of each rank."""

    def run(ranks: Any) -> Any:
        mine = copy.deepcopy(model)
        batches = [COLLATE(micro, samples) for micro in plan[0, ranks.rank]]
        options.setdefault("mode", "deferred")
        runner = Runner(model=mine, loss=loss(), collective=ranks, **options)
        result = runner.run(batches)
        return result.reduce(ranks), {n: p.grad for n, p in mine.named_parameters()}

    return run_ranks(plan.num_ranks, run)


def check(
    seed: int, model: Any, loss: str, normalization: Any, tolerance: float, ranks: int = 3,
    trees: bool = False, **options: Any,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    ids = forest(rng)
    samples = samples_of(rng, ids)
    ids.append([1, 2])
    plan = shared_plan(rng, ids, ranks, trees)
    found = on_threads(model, plan, samples, LOSSES[loss], normalization=normalization, **options)
    single, expected = gradient(
        model, alone(ids), samples, LOSSES[loss](), normalization=normalization
    )
    for result, ours in found:
        assert result.loss == pytest.approx(single.loss, rel=tolerance, abs=tolerance)
        close = pytest.approx(single.metrics, rel=10 * tolerance, abs=10 * tolerance)
        assert result.metrics == close
        assert max(errors_of_parameters(ours, expected).values()) <= tolerance


@given(
    st.integers(0, 10**6),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(NORMALIZATIONS),
    st.integers(2, 4),
    st.booleans(),
)
def test_gradients_of_shared_samples_are_those_of_single_samples(
    seed: int, loss: str, norm: Any, ranks: int, trees: bool
) -> None:
    check(seed, decoder(), loss, norm, 1e-12, ranks, trees)
