"""Bundle: all sums of a step in one tensor, with a check that ranks agree."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.errors import InputError
from evenstep.tensors import Collator, Metric, PerSequence, View
from evenstep.testing import run_ranks
from evenstep.train import Alone, Collective
from tests.examples import examples
from tests.internals import Bundle, Outcome, merge


def metrics_of(values: list[float]) -> dict[str, Metric]:
    given_ = torch.tensor(values, dtype=torch.float64)
    return {
        "total": Metric.sum(given_.sum()),
        "average": Metric.mean(given_.sum(), len(values)),
        "least": Metric.min(given_),
        "most": Metric.max(given_),
    }


@examples(40)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=3), min_size=1, max_size=5))
def test_a_reduced_bundle_has_the_values_of_all_ranks(per_rank: list[list[float]]) -> None:
    def reduce(ranks: Collective) -> Bundle:
        own = per_rank[ranks.rank]
        sums = {"loss": torch.tensor(sum(own), dtype=torch.float64), "count": torch.tensor(1.0)}
        return Bundle(sums, metrics_of(own)).reduce(ranks)

    everything = [value for own in per_rank for value in own]
    expected = merge(metrics_of(own) for own in per_rank)
    for found in run_ranks(len(per_rank), reduce):
        assert float(found.sums["count"]) == len(per_rank)
        assert float(found.sums["loss"]) == pytest.approx(sum(everything), abs=1e-6)
        for name, metric in expected.items():
            assert found.metrics[name].reduction == metric.reduction
            value, other = float(found.metrics[name].value), float(metric.value)
            assert value == pytest.approx(other, abs=1e-6, nan_ok=True)
        assert float(found.metrics["least"].value) == min(everything, default=math.inf)
        assert float(found.metrics["most"].value) == max(everything, default=-math.inf)


def test_one_tensor_of_a_power_of_two_holds_it_all() -> None:
    bundle = Bundle({"a": torch.tensor(1.0)}, metrics_of([1.0, 2.0]))
    assert bundle.pack(0, 1).shape == (64,)
    assert bundle.pack(3, 8).dtype == torch.float64
    assert bundle.pack(3, 8).shape == (64,)  # 24 of headers, 1, 1 + 2 + 8 + 8
    assert bundle.pack(3, 100).shape == (512,)
    assert Bundle({}).reduce(Alone()).sums == {}


def test_counts_above_single_precision_stay_exact() -> None:
    count = torch.tensor(2**53 - 1, dtype=torch.float64)
    assert int(Bundle({"n": count}).reduce(Alone()).sums["n"]) == 2**53 - 1
    one = Bundle({"n": torch.tensor(2**24, dtype=torch.float32)})
    assert int(Bundle.merge([one, Bundle({"n": torch.tensor(1)})]).sums["n"]) == 2**24 + 1


def test_infinities_and_not_a_numbers_stay_where_they_are() -> None:
    def reduce(ranks: Collective) -> Bundle:
        odd = math.nan if ranks.rank else 1.0
        sums = {"a": torch.tensor(odd), "b": torch.tensor(2.0)}
        return Bundle(sums, {"m": Metric.min(torch.empty(0))}).reduce(ranks)

    for found in run_ranks(2, reduce):
        assert math.isnan(float(found.sums["a"]))
        assert float(found.sums["b"]) == 4.0
        assert float(found.metrics["m"].value) == math.inf


def test_a_rank_with_other_names_is_named_on_every_rank() -> None:
    messages: list[str] = []

    def reduce(ranks: Collective) -> None:
        metrics = metrics_of([1.0])
        if ranks.rank == 2:
            del metrics["most"]
        try:
            Bundle({"loss": torch.tensor(1.0)}, metrics).reduce(ranks)
        except InputError as error:
            messages.append(str(error))

    run_ranks(4, reduce)
    assert len(messages) == 4
    for message in messages:
        assert "rank 2 packed 1 sums and 3 metrics, with other names than most ranks" in message
        assert "(1 sums and 4 metrics)" in message
        assert "the same metrics for every batch" in message


def test_the_same_name_with_another_reduction_is_found_too() -> None:
    def reduce(ranks: Collective) -> Bundle:
        metric = (Metric.min if ranks.rank else Metric.max)(torch.ones(1))
        return Bundle({}, {"x": metric}).reduce(ranks)

    with pytest.raises(InputError, match="with other names"):
        run_ranks(2, reduce)


def test_only_single_numbers_are_reduced() -> None:
    with pytest.raises(InputError, match=r"'loss' has shape \(2,\)"):
        Bundle({"loss": torch.ones(2)}).pack(0, 1)


# Empty micro-batches ----------------------------------------------------------------------------


def looped(outputs: Tensor, view: View) -> Outcome:
    """A function of one sequence that cannot be vectorised."""
    length = torch.tensor(float(len(view.tokens)))
    metrics: dict[str, Any] = {
        "longest": Metric.max(length),
        "shortest": Metric.min(length),
        "length": Metric.mean(length, 1),
        "sequences": Metric.sum(torch.ones(())),
    }
    return outputs.amax() * view.loss_weights.sum(), metrics


def test_a_rank_with_only_empty_micro_batches_has_the_metrics_of_the_others() -> None:
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    plan = make_plan([3, 1], Recipe(layout=Packed(max_tokens=4), topology=Topology(dp=3)))

    def reduce(ranks: Collective) -> Bundle:
        (micro,) = plan[0, ranks.rank]
        outputs = torch.ones(1, micro.width, 2, requires_grad=True)
        sums = PerSequence(looped)(outputs, Collator()(micro, samples))
        sums.loss.backward()
        assert not micro.is_empty or (sums.loss.item() == 0 and not outputs.grad.any())
        return Bundle({"loss": sums.loss}, sums.metrics).reduce(ranks)

    assert any(micro.is_empty for rank in range(3) for micro in plan[0, rank])
    for found in run_ranks(3, reduce):
        values = {name: float(metric.value) for name, metric in found.metrics.items()}
        assert values == {"longest": 3, "shortest": 1, "length": 2, "sequences": 2}
        assert float(found.sums["loss"]) == 2.0
