"""A loss of one sequence gives the same on packed batches, looped or vectorised."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from evenstep import Packed, Plan, Recipe, Topology
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import (
    Batch,
    BatchShard,
    Metric,
    PerSequence,
    Sums,
    View,
    cross_entropy,
    label_log_probs,
    policy_gradient,
    restore_sequences,
    restore_tokens,
    shard_context,
    value_loss,
)
from tests.examples import examples
from tests.internals import Outcome, merge
from tests.tensors.works import VOCABULARY, Work, make_work, works

PER_TOKEN = ("old_log_probs", "advantages")
LOSSES: dict[str, PerSequence] = {
    "cross entropy": cross_entropy(),
    "clipped": policy_gradient(clip_low=0.1, clip_high=0.3),
    "clipped by sequence": policy_gradient(ratio="sequence"),
}


class Model:
    """Logits that depend on the token and its position only."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(VOCABULARY, VOCABULARY, requires_grad=True)

    def __call__(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return self.weight[tokens] * torch.cos(0.3 * position_ids)[..., None]

    def of(self, batch: Batch | BatchShard) -> Tensor:
        return self(batch.tokens, batch.position_ids)

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.weight, retain_graph=True)[0]


def by_hand(
    name: str, model: Model, sample: dict[str, Any], start: int, length: int, ahead: int
) -> Tensor:
    """The loss of one segment in plain terms: token i is predicted from the logits of i - 1, also
    where token i is the first behind a cut (`ahead` is 1 where the sample goes on)."""
    tokens, mask, old, advantage = (
        torch.as_tensor(sample[key][start : start + length + ahead])
        for key in ("input_ids", "loss_mask", *PER_TOKEN)
    )
    log_probs = model(tokens[:length], torch.arange(length)).log_softmax(-1)
    chosen = [i for i in range(1, length + ahead) if mask[i]]
    new = torch.stack([log_probs[i - 1, tokens[i]] for i in chosen] or [log_probs[:0].sum()])
    if not chosen or name == "cross entropy":
        return -new.sum() if chosen else new.sum()
    ratio = (new - old[chosen].float()).exp()
    low, high = 0.9, 1.3
    if name == "clipped by sequence":
        ratio, low, high = (new - old[chosen].float()).mean().exp(), 0.8, 1.2
    gain = advantage[chosen].float()
    return -torch.minimum(ratio * gain, ratio.clamp(low, high) * gain).sum()


def parts_of(plan: Plan) -> tuple[Any, Any, Any, Any]:
    """Sample, start and length of every segment, and whether the sample continues after it."""
    segments = plan.segments
    more = segments.start + segments.length < plan.ends(segments.sample)
    return segments.sample, segments.start, segments.length, more.astype(int)


def close(first: Tensor, second: Tensor) -> None:
    scale = float(second.detach().abs().max()) if second.numel() else 0.0
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5 * max(scale, 1.0))


def assert_same_metrics(first: dict[str, Metric], second: dict[str, Metric]) -> None:
    for name, metric in first.items():
        other = second[name]
        assert other.reduction == metric.reduction
        torch.testing.assert_close(other.value, metric.value, rtol=1e-5, atol=1e-6, equal_nan=True)


# Properties --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@examples(30)
@given(work=works(cp=(1, 2)))
def test_packed_looped_and_by_hand_agree_with_gradients(name: str, work: Work) -> None:
    model, loss, plan = Model(), LOSSES[name], work.plan
    if not plan.num_micro_batches:
        return
    if name == "clipped by sequence" and len(plan.segments) > len(np.unique(plan.segments.sample)):
        with pytest.raises(InputError, match="split, but this loss is of whole sequences"):
            [loss(model.of(batch), batch) for batch in work.batches]
        return
    at_once = [loss(model.of(batch), batch) for batch in work.batches]
    looped = [loss.looped()(model.of(batch), batch) for batch in work.batches]
    part = zip(*parts_of(plan), strict=True)
    expected = [by_hand(name, model, work.samples[i], a, n, more) for i, a, n, more in part]
    total = torch.stack(expected).sum()
    for found in (at_once, looped):
        close(torch.stack([sums.loss for sums in found]).sum(), total)
        close(torch.cat([sums.by_sequence for sums in found]), torch.stack(expected))
        ours = model.gradient(torch.stack([sums.loss for sums in found]).sum())
        close(ours, model.gradient(total))
    by_sample = torch.zeros(len(plan.lengths)).index_add(
        0, torch.tensor(plan.segments.sample.tolist()), torch.stack(expected)
    )
    restored = restore_sequences(plan, [sums.by_sequence for sums in at_once], combine="sum")
    close(restored, by_sample)
    assert_same_metrics(
        merge(sums.metrics for sums in looped), merge(sums.metrics for sums in at_once)
    )


@pytest.mark.parametrize("name", ["cross entropy", "clipped"])
@examples(30)
@given(work=works(cp=(2, 4)))
def test_the_shards_of_a_batch_add_up_to_it(name: str, work: Work) -> None:
    model, loss, size = Model(), LOSSES[name], work.plan.recipe.topology.cp
    for batch in work.batches:
        whole = loss(model.of(batch), batch)
        ready = batch.at_labels(*PER_TOKEN)
        shards = [shard_context(ready, rank, size) for rank in range(size)]
        parts = [loss(model.of(shard), shard) for shard in shards]
        total = torch.stack([part.loss for part in parts]).sum()
        close(total, whole.loss)
        close(model.gradient(total), model.gradient(whole.loss))
        assert_same_metrics(merge(part.metrics for part in parts), whole.metrics)


@examples(30)
@given(works(cp=(1, 2)))
def test_log_probs_of_packed_batches_come_back_token_by_token(work: Work) -> None:
    plan, model = work.plan, Model()
    if not plan.num_micro_batches:
        return
    results = []
    for batch in work.batches:
        labels = batch.ahead("tokens", fill=-100)
        flat = label_log_probs(model.of(batch).flatten(0, 1), labels.flatten())
        results.append(flat.view_as(labels))
    restored = restore_tokens(plan, results, shifted=True)
    for i, a, n, more in zip(*parts_of(plan), strict=True):
        tokens = torch.as_tensor(work.samples[i]["input_ids"][a : a + n + more])
        log_probs = model(tokens[:n], torch.arange(n)).log_softmax(-1)
        expected = log_probs[torch.arange(n - 1 + more), tokens[1:]]
        close(restored[i, a + 1 : a + n + more], expected)
    assert not restored[:, 0].any()


# Functions --------------------------------------------------------------------------------------


def pairwise(outputs: Tensor, sequence: View) -> Outcome:
    """A function that needs the whole sequence and cannot be vectorised."""
    reward = sequence.extra("reward")[0]
    spread = outputs.amax() - outputs.amin()
    patches = len(sequence.ragged("patches").values)
    return spread * reward, {
        "longest": Metric.max(torch.tensor([len(sequence.tokens)])),
        "shortest": Metric.min(torch.tensor([len(sequence.tokens)])),
        "length": Metric.mean(torch.tensor(float(len(sequence.tokens))), 1),
        "patches": Metric.sum(torch.tensor(patches)),
    }


@examples(30)
@given(works(cp=(1, 2), overflow=("drop", "truncate")))
def test_any_function_runs_in_a_loop_and_sees_one_sequence(work: Work) -> None:
    model, plan = Model(), work.plan
    sums = [PerSequence(pairwise)(model.of(batch), batch) for batch in work.batches]
    expected, ran = [], plan.segments
    for i, n in zip(ran.sample, ran.length, strict=True):
        tokens = torch.as_tensor(work.samples[i]["input_ids"][:n])
        outputs = model(tokens, torch.arange(n))
        expected.append((outputs.amax() - outputs.amin()) * float(work.samples[i]["reward"]))
    if not expected:
        return
    close(torch.cat([each.by_sequence for each in sums]), torch.stack(expected))
    found = merge(each.metrics for each in sums)
    assert int(found["longest"].value) == ran.length.max()
    assert int(found["shortest"].value) == ran.length.min()
    assert float(found["length"].value) == pytest.approx(ran.length.mean())
    patches = [len(work.samples[i]["patches"]) for i in ran.sample]
    assert int(found["patches"].value) == sum(patches)


def batch_of(*lengths: int, cp: int = 1) -> Batch:
    recipe = Recipe(layout=Packed(max_tokens=16, pad_to=16), topology=Topology(cp=cp))
    return make_work([*lengths], recipe).batches[0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("way", ["at once", "looped"])
def test_an_empty_micro_batch_has_a_loss_of_zero_and_a_backward(name: str, way: str) -> None:
    recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2))
    batch = make_work([3], recipe).batches[1]
    assert batch.is_empty
    model, loss = Model(), LOSSES[name] if way == "at once" else LOSSES[name].looped()
    sums = loss(model.of(batch), batch)
    assert sums.loss.item() == 0.0
    assert len(sums.by_sequence) == 0
    assert not model.gradient(sums.loss).any()


@pytest.mark.parametrize("name", LOSSES)
def test_values_of_ignored_slots_do_not_matter(name: str) -> None:
    batch, model = batch_of(5, 3), Model()
    expected = LOSSES[name](model.of(batch), batch)
    padding = ~batch.token_mask
    ignored = padding | (batch.targets == -100) | (batch.position_ids == 0)
    extras: dict[str, Any] = dict(batch.extras)
    for extra in PER_TOKEN:
        extras[extra] = extras[extra].masked_fill(ignored, float("nan"))
    outputs = model.of(batch).masked_fill(padding[..., None], float("nan"))
    found = LOSSES[name](outputs, replace(batch, extras=extras))
    close(found.loss, expected.loss)
    close(model.gradient(found.loss), model.gradient(expected.loss))
    assert_same_metrics(found.metrics, expected.metrics)


def test_advantages_may_be_one_per_sequence() -> None:
    batch, model = batch_of(5, 1, 3), Model()
    rewards = batch.extras["reward"]
    one = replace(
        batch,
        extras={**batch.extras, "advantages": rewards},
        aligned={**batch.aligned, "advantages": "sequence"},
    )
    spread = torch.cat((rewards, torch.zeros(1)))[batch.segment_ids]
    each = replace(batch, extras={**batch.extras, "advantages": spread})
    loss = policy_gradient()
    for way in (loss, loss.looped()):
        close(way(model.of(one), one).loss, loss(model.of(each), each).loss)


def test_the_kl_term_is_zero_at_the_reference() -> None:
    batch, model = batch_of(5, 3), Model()
    loss, plain = policy_gradient(kl_weight=0.5), policy_gradient()
    own = label_log_probs(model.of(batch).flatten(0, 1), batch.labels.flatten()).view(1, -1)
    back = torch.cat((torch.zeros(1, 1), own.detach()[:, :-1]), dim=1)  # to the token's own slot
    for far, expected in ((0.0, 0.0), (1.0, torch.e - 2)):
        with_reference = replace(
            batch,
            extras={**batch.extras, "reference_log_probs": back + far},
            aligned={**batch.aligned, "reference_log_probs": "token"},
        )
        for way in (loss, loss.looped()):
            sums = way(model.of(batch), with_reference)
            assert float(sums.metrics["kl"].value) == pytest.approx(expected, abs=1e-5)
            count = float(batch.loss_weights.sum())
            more = sums.loss - plain(model.of(batch), batch).loss
            assert more.item() == pytest.approx(0.5 * expected * count, abs=1e-4)


def test_the_least_and_greatest_ratio_are_those_of_loss_tokens() -> None:
    batch, model = batch_of(5, 3), Model()
    for old, above in ((-30.0, True), (30.0, False)):
        extras = {**batch.extras, "old_log_probs": torch.full(batch.tokens.shape, old)}
        metrics = policy_gradient()(model.of(batch), replace(batch, extras=extras)).metrics
        assert bool(metrics["ratio_min"].value > 1) is above
        assert bool(metrics["ratio_max"].value > 1) is above
        assert float(metrics["clipped"].value) == 1.0


def test_values_ahead_stay_in_their_segment() -> None:
    batch = batch_of(3, 1, 2)
    values = torch.arange(1, 17)[None]
    assert batch.ahead(values).tolist() == [[2, 3, 0, 0, 6, 0, *[0] * 10]]
    assert batch.ahead(values, 2, fill=-1).tolist() == [[3, *[-1] * 15]]
    pairs = torch.stack((values, -values), dim=-1)
    assert batch.ahead(pairs)[0, :2].tolist() == [[2, -2], [3, -3]]
    moved = batch.at_labels("features")
    assert moved.aligned["features"] == "label"
    features: Any = batch.extras["features"]
    assert torch.equal(moved.extras["features"], batch.ahead(features))
    assert batch.aligned["features"] == "token"


def test_weights_scale_every_token() -> None:
    batch, model = batch_of(5, 3), Model()
    halved = replace(batch, loss_weights=batch.loss_weights / 2)
    for loss in LOSSES.values():
        close(loss(model.of(halved), halved).loss, loss(model.of(batch), batch).loss / 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32])
def test_integers_and_bools_are_summed_as_such(dtype: torch.dtype) -> None:
    batch = make_work([600, 2], Recipe(layout=Packed(max_tokens=602))).batches[0]
    for view in (View.of_all(batch), View.of_segments(batch)[0]):
        counts = view.sum_by_segment((view.labels != -100).to(dtype))
        assert counts.dtype == torch.int64
        assert counts[0] == int((view.labels[:600] != -100).sum()) > 0


@pytest.mark.parametrize("vectorised", [True, False])
def test_half_precision_values_of_a_function_are_summed_in_float32(
    vectorised: bool,
) -> None:
    batch = make_work([3000], Recipe(layout=Packed(max_tokens=3000))).batches[0]
    loss = PerSequence(lambda outputs, view: outputs[:, 0], vectorised=vectorised)
    outputs = torch.full((1, 3000, 1), 1.1, dtype=torch.bfloat16, requires_grad=True)
    sums = loss(outputs, batch)
    expected = outputs.detach().double().sum()
    for total in (sums.loss, sums.by_sequence[0]):
        assert total.dtype == torch.float32
        torch.testing.assert_close(total.double(), expected)


def test_a_value_at_the_bound_of_its_clip_has_its_whole_gradient() -> None:
    batch = batch_of(2)
    extras = {
        "returns": torch.zeros(1, batch.width),
        "old_values": torch.full((1, batch.width), 0.5),
    }
    batch = replace(
        batch,
        labels=torch.where(batch.places == 0, 1, -100).where(batch.segment_ids == 0, -100),
        loss_weights=(batch.places == 0).float(),
        extras=extras,
        aligned=dict.fromkeys(extras, "label"),
    )
    values = torch.full((1, batch.width), 0.75, requires_grad=True)
    (gradient,) = torch.autograd.grad(value_loss(clip=0.25)(values, batch).loss, values)
    assert gradient[0, 0] == 0.75


def test_low_precision_logits_are_summed_in_float32() -> None:
    batch, model = batch_of(5, 3), Model()
    for loss in (cross_entropy(), cross_entropy().looped()):
        assert loss(model.of(batch).bfloat16(), batch).loss.dtype == torch.float32


# Metrics ----------------------------------------------------------------------------------------


def test_merged_means_of_unequal_counts_are_the_mean_of_all() -> None:
    parts = [
        {"loss": Metric.mean(torch.tensor(6.0), 3)},
        {"loss": Metric.mean(torch.tensor(4.0), 1)},
    ]
    assert float(merge(parts)["loss"].value) == 2.5


def test_empty_metrics_are_neutral() -> None:
    none = torch.empty(0)
    some = {"least": Metric.min(torch.tensor([3.0, 2.0])), "most": Metric.max(torch.tensor([-3.0]))}
    empty = {"least": Metric.min(none), "most": Metric.max(none)}
    merged = merge([empty, some, {}])
    assert {name: float(metric.value) for name, metric in merged.items()} == {
        "least": 2.0,
        "most": -3.0,
    }
    assert merge([]) == {}


def test_integers_have_a_minimum_and_a_maximum() -> None:
    counts = torch.tensor([4, 2, 9])
    assert (int(Metric.min(counts).value), int(Metric.max(counts).value)) == (2, 9)


def test_a_metric_with_two_reductions_is_refused() -> None:
    two = [{"x": Metric.sum(torch.ones(()))}, {"x": Metric.max(torch.ones(1))}]
    with pytest.raises(InputError, match="'x' has several reductions: max, sum"):
        merge(two)


# Errors -----------------------------------------------------------------------------------------


def run(function: Callable[[], Sums | Tensor]) -> str:
    with pytest.raises((InputError, ConfigError)) as caught:
        function()
    return str(caught.value)


def test_faults_say_what_to_do() -> None:
    batch, model = batch_of(5, 3, cp=2), Model()
    outputs, everything = model.of(batch), View.of_all(batch)
    assert "shape (1, 15, 23), but the batch has 1 rows of width 16" in run(
        lambda: cross_entropy()(outputs[:, 1:], batch)
    )
    scalar = PerSequence(lambda out, view: out.sum(), vectorised=True)
    assert "returned shape () for 16 slots" in run(lambda: scalar(outputs, batch))
    assert "no extra 'reference_log_probs'" in run(
        lambda: policy_gradient(kl_weight=1.0)(outputs, batch)
    )
    assert "'patches' is ragged" in run(lambda: everything.extra("patches"))
    with pytest.raises(ConfigError, match="'reward' is sequence-aligned"):
        everything.ragged("reward")
    with pytest.raises(ConfigError, match="unknown ratio 'row'"):
        policy_gradient(ratio="row")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'reward' is aligned to 'sequence'"):
        batch.at_labels("reward")


def test_what_needs_whole_sequences_refuses_a_shard() -> None:
    batch, model = batch_of(5, 3, cp=2), Model()
    shard = shard_context(batch, 0, 2)
    outputs = model.of(shard)
    assert "at_labels('old_log_probs')" in run(lambda: policy_gradient()(outputs, shard))
    assert "cannot run on a batch shard" in run(lambda: cross_entropy().looped()(outputs, shard))
    sums = cross_entropy()(outputs, shard)
    assert "does not hold whole sequences" in run(lambda: sums.by_sequence)
    ready = shard_context(batch.at_labels(*PER_TOKEN), 0, 2)
    by_sequence = policy_gradient(ratio="sequence")
    assert "sum_by_segment needs whole sequences" in run(lambda: by_sequence(outputs, ready))


def test_a_view_has_the_sample_of_each_slot() -> None:
    batch = batch_of(3, 1)
    assert View.of_all(batch).sample_ids.tolist()[:5] == [0, 0, 0, 1, -1]
    second = View.of_segments(batch)[1]
    assert second.sample_ids.tolist() == [1]
    assert second.position_ids.tolist() == [0]
    assert len(View.of_all(batch).ragged("patches").offsets) == 3
