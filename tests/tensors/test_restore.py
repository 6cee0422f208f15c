"""Restore: results of micro-batches in sample order."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import (
    Batch,
    attention,
    join_context,
    join_sequence,
    restore_ragged,
    restore_sequences,
    restore_tokens,
    shard_context,
    shard_sequence,
)
from evenstep.testing import run_ranks
from evenstep.train import context_attention
from tests.examples import examples
from tests.internals import OriginKey as Key
from tests.internals import Overflow, Sharding
from tests.tensors.works import Work, make_work, same, works

SMALL = make_plan([1, 3, 2], Recipe(layout=Packed(max_tokens=4)))  # runs [0, 1], then [2]


def values_of(batch: Batch) -> Tensor:
    """A value per slot: 1000 * sample + index in the sample; -7 for padding."""
    place = batch.starts[batch.segment_ids] + batch.position_ids
    return torch.where(batch.token_mask, 1000 * batch.sample_ids[batch.segment_ids] + place, -7)


def keys_of(plan: Plan) -> list[Key]:
    cells = ((s, r) for s in range(plan.num_steps) for r in range(plan.num_ranks))
    return [(s, r, at) for s, r in cells for at in range(len(plan[s, r]))]


def ran_of(plan: Plan, keys: list[Key]) -> list[list[int]]:
    """Per sample, the tokens that these micro-batches ran."""
    ran: list[list[int]] = [[] for _ in plan.lengths]
    for step, rank, at in keys:
        segments = plan[step, rank][at].segments
        for sample, start, length in zip(
            segments.sample, segments.start, segments.length, strict=True
        ):
            ran[sample] += range(start, start + length)
    return ran


# Cases ------------------------------------------------------------------------------------------


def test_log_probs_move_to_the_token_they_belong_to() -> None:
    given_ = [torch.tensor([[0.0, -2.1, -2.2, 9.0]]), torch.tensor([[-3.1, 9.0]])]
    restored = restore_tokens(SMALL, given_, width=4, pad=7.0, shifted=True)
    torch.testing.assert_close(
        restored,
        torch.tensor([[0.0, 7.0, 7.0, 7.0], [0.0, -2.1, -2.2, 7.0], [0.0, -3.1, 7.0, 7.0]]),
    )
    ragged = restore_ragged(SMALL, given_, shifted=True)
    assert ragged.offsets.tolist() == [0, 1, 4, 6]
    torch.testing.assert_close(ragged.values, torch.tensor([0.0, 0.0, -2.1, -2.2, 0.0, -3.1]))


def test_a_split_sample_is_whole_again() -> None:
    plan = make_plan([10], Recipe(layout=Packed(max_tokens=4), overflow="split"))
    results = [values_of(batch) for batch in make_work([10], plan.recipe).batches]
    assert len(results) > 2
    assert restore_tokens(plan, results).tolist() == [list(range(10))]
    # Results one slot early: the last of a segment belongs to the first token of the next.
    early = [
        torch.where(batch.token_mask, value + 1, -7)
        for value, batch in zip(results, make_work([10], plan.recipe).batches, strict=True)
    ]
    assert restore_tokens(plan, early, shifted=True).tolist() == [list(range(10))]
    per_segment = [torch.tensor([float(m.segments.length[0])]) for m in plan[0, 0]]
    lengths = torch.cat(per_segment)
    for way, expected in (
        ("sum", 10.0),
        ("max", 4.0),
        ("min", float(lengths.min())),
        ("mean", float((lengths**2).sum()) / 10),
    ):
        found = restore_sequences(plan, per_segment, combine=way)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx([expected])
    with pytest.raises(InputError, match="sample 0 was split into 3 segments"):
        restore_sequences(plan, per_segment)


def test_dropped_and_truncated_tokens_are_pad() -> None:
    cases: list[tuple[Overflow, list[int]]] = [
        ("drop", [-1] * 6),
        ("truncate", [1000, 1001, 1002, 1003, -1, -1]),
    ]
    for overflow, expected in cases:
        recipe = Recipe(layout=Packed(max_tokens=4), overflow=overflow)
        work = make_work([2, 6, 3], recipe)
        restored = restore_tokens(work.plan, [values_of(b) for b in work.batches], pad=-1)
        assert restored.tolist() == [[0, 1, *[-1] * 4], expected, [2000, 2001, 2002, *[-1] * 3]]


def test_gradients_flow_back_to_real_tokens_alone() -> None:
    recipe = Recipe(layout=Padded(max_tokens=8), topology=Topology(dp=2))
    work = make_work([3, 1, 2], recipe)
    results = [torch.randn(b.rows, b.width, requires_grad=True) for b in work.batches]
    restore_tokens(work.plan, results).sum().backward()
    for batch, result in zip(work.batches, results, strict=True):
        assert same(result.grad, batch.token_mask.float())
    results = [torch.randn(int((b.sample_ids >= 0).sum()), 2) for b in work.batches]
    given_ = [result.requires_grad_() for result in results]
    restore_sequences(work.plan, given_, combine="max").sum().backward()
    assert all(bool((result.grad == 1).all()) for result in results)


def test_types_are_kept() -> None:
    for dtype in (torch.bfloat16, torch.int32, torch.bool, torch.float64):
        given_ = [torch.ones(1, 4, dtype=dtype), torch.ones(1, 2, dtype=dtype)]
        assert restore_tokens(SMALL, given_).dtype == dtype
        per_segment = [torch.ones(2, dtype=dtype), torch.ones(1, dtype=dtype)]
        assert restore_sequences(SMALL, per_segment).dtype == dtype
    counts = [torch.tensor([1, 2]), torch.tensor([4])]
    assert restore_sequences(SMALL, counts, combine="mean").tolist() == [1.0, 2.0, 4.0]


FIT = torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([FIT], "expected 2 results, .* of the plan, got 1"),
        ([FIT, FIT], r"of step 0 on rank 0 \(samples 2\) has shape \(1, 2\), .* \(1, 4\)"),
        ([FIT, torch.zeros(1, 2, dtype=torch.int64)], r"samples 2\) has torch.int64 entries"),
        ([FIT, torch.zeros(1, 2, 5)], r"samples 2\) has torch.float32 entries of shape \(5,\)"),
        ([[FIT, FIT], FIT], r"samples 0, 1\) has shape \(1, 4\), .* Pass \(1, 2\) from each"),
        ({(0, 1, 0): FIT}, r"\(step 0, rank 1, position 0\) is not in the plan of 1 steps on 1"),
        ({(0, 0, 2): FIT}, r"\(step 0, rank 0, position 2\)"),
        ({}, "no results were given"),
    ],
)
def test_results_that_do_not_fit_are_refused_by_name(results: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        restore_tokens(SMALL, results)


def test_a_width_that_is_too_small_names_the_longest_sample() -> None:
    with pytest.raises(InputError, match=r"sample 1 has 3 tokens, more than width=2"):
        restore_tokens(SMALL, [FIT, FIT[:, :2]], width=2)


def test_one_value_per_segment_is_required() -> None:
    with pytest.raises(InputError, match=r"samples 0, 1\) has 2 segments, but its result is \(3,"):
        restore_sequences(SMALL, [torch.zeros(3), torch.zeros(1)])


def test_the_result_of_an_empty_micro_batch_is_ignored() -> None:
    plan = make_plan([2], Recipe(layout=Packed(max_tokens=4), topology=Topology(dp=2)))
    assert [micro.is_empty for rank in range(2) for micro in plan[0, rank]] == [False, True]
    anything = torch.full((3, 5), float("nan"))
    assert restore_tokens(plan, [torch.ones(1, 2), anything]).tolist() == [[1.0, 1.0]]
    assert restore_sequences(plan, [torch.ones(1), anything]).tolist() == [1.0]
    alone = torch.ones(1, int(plan.widths[1]), dtype=torch.int64)
    assert restore_tokens(plan, {(0, 1, 0): alone}, pad=-1).tolist() == [[-1, -1]]
    assert restore_sequences(plan, {(0, 1, 0): alone[0, :0]}, pad=-1).tolist() == [-1]
    assert restore_tokens(plan, {(0, 1, 0): alone}, shifted=True).tolist() == [[0, 0]]


# Properties --------------------------------------------------------------------------------------


@examples(80)
@given(works(), st.integers(0, 3), st.booleans())
def test_tokens_return_to_their_samples(work: Work, more: int, shifted: bool) -> None:
    plan, size = work.plan, work.plan.recipe.topology.cp
    if not plan.num_micro_batches:
        return
    batches = work.batches
    results = [values_of(b) + shifted * b.token_mask for b in batches]
    width = int(plan.lengths.max()) + more
    restored = restore_tokens(plan, results, width=width, pad=-1, shifted=shifted)
    expected = torch.full((len(plan.lengths), width), -1)
    for sample, ran in enumerate(ran_of(plan, keys_of(plan))):
        for token in ran:
            expected[sample, token] = 1000 * sample + token
    if shifted:
        expected[plan.segments.sample.tolist(), 0] = 0
    assert same(restored, expected)
    ragged = restore_ragged(plan, results, pad=-1, shifted=shifted)
    inside = torch.arange(width) < torch.from_numpy(plan.lengths.copy())[:, None]
    assert same(ragged.values, expected[inside])
    assert ragged.offsets.diff().tolist() == plan.lengths.tolist()
    parts = [
        [shard_context(batch, rank, size).take(result) for rank in range(size)]
        for batch, result in zip(batches, results, strict=True)
    ]
    assert same(restore_tokens(plan, parts, width=width, pad=-1, shifted=shifted), expected)


@examples(60)
@given(works(cp=(1, 2)), st.data())
def test_some_micro_batches_restore_their_own_tokens(work: Work, data: st.DataObject) -> None:
    plan, keys = work.plan, keys_of(work.plan)
    if not keys:
        return
    by_key = dict(zip(keys, work.batches, strict=True))
    rank = data.draw(st.integers(0, plan.num_ranks - 1))
    mine = data.draw(st.permutations([key for key in keys if key[1] == rank]))
    restored = restore_tokens(plan, {key: values_of(by_key[key]) for key in mine}, pad=-1)
    for sample, ran in enumerate(ran_of(plan, mine)):
        assert restored[sample, ran].tolist() == [1000 * sample + token for token in ran]
        assert int((restored[sample] != -1).sum()) == len(ran)
    of_segments = {key: by_key[key].sample_ids[by_key[key].sample_ids >= 0] for key in mine}
    found = restore_sequences(plan, of_segments, pad=-1, combine="max")
    assert found.tolist() == [
        sample if ran else -1 for sample, ran in enumerate(ran_of(plan, mine))
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@examples(20)
@given(works())
def test_results_on_a_gpu_stay_there_and_agree(work: Work) -> None:
    plan, size = work.plan, work.plan.recipe.topology.cp
    if not plan.num_micro_batches:
        return
    batches = work.batches
    moved = [batch.to("cuda") for batch in batches]
    expected = restore_tokens(plan, [values_of(batch) for batch in batches], pad=-1)
    whole = restore_tokens(plan, [values_of(batch) for batch in moved], pad=-1)
    cut = [
        [shard_context(batch, rank, size).take(values_of(batch)) for rank in range(size)]
        for batch in moved
    ]
    for restored in (whole, restore_tokens(plan, cut, pad=-1)):
        assert restored.device.type == "cuda"
        assert same(restored.cpu(), expected)
    ids = [batch.sample_ids[batch.sample_ids >= 0] for batch in moved]
    assert restore_sequences(plan, ids, combine="min").device.type == "cuda"


def test_entries_of_any_shape_come_back() -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=16), topology=Topology(dp=3, cp=2), steps=Steps(samples=2)
    )
    work = make_work([5, 1, 8, 3, 7], recipe)
    restored = restore_tokens(work.plan, [batch.extras["features"] for batch in work.batches])
    for sample, row in zip(work.samples, restored, strict=True):
        length = len(sample["input_ids"])
        assert same(row[:length], torch.as_tensor(sample["features"]).float())
        assert not row[length:].any()


# Shards ------------------------------------------------------------------------------------------

SHARD: dict[Sharding, Any] = {"context": shard_context, "sequence": shard_sequence}


@examples(60)
@given(works(cp=(2, 4)), st.sampled_from(["context", "sequence"]), st.booleans())
def test_results_of_ranks_are_joined_as_their_batches_were_sharded(
    work: Work, sharding: Sharding, shifted: bool
) -> None:
    plan, size = work.plan, work.plan.recipe.topology.cp
    if not plan.num_micro_batches:
        return
    results = [values_of(batch) for batch in work.batches]
    shards = [
        [SHARD[sharding](batch, rank, size) for rank in range(size)] for batch in work.batches
    ]
    parts = [
        [shard.take(result) for shard in each] for each, result in zip(shards, results, strict=True)
    ]
    expected = restore_tokens(plan, results, pad=-1, shifted=shifted)
    how = shards[0][0].sharding
    assert same(restore_tokens(plan, parts, pad=-1, shifted=shifted, sharding=how), expected)
    ragged = restore_ragged(plan, parts, pad=-1, shifted=shifted, sharding=how)
    assert same(ragged.values, restore_ragged(plan, results, pad=-1, shifted=shifted).values)


@pytest.mark.parametrize(
    ("topology", "size", "sharding"),
    [
        (Topology(cp=2), 2, "context"),
        (Topology(tp=2, sequence_parallel=True), 2, "sequence"),
        (Topology(cp=2, tp=4, sequence_parallel=True), 2, "context"),
        (Topology(cp=2, tp=4, sequence_parallel=True), 4, "sequence"),
        (Topology(cp=2, tp=2, sequence_parallel=True), 2, None),
        (Topology(cp=2, tp=2), 4, None),
        (Topology(), 2, None),
    ],
    ids=repr,
)
def test_the_topology_of_a_plan_says_how_results_are_joined(
    topology: Topology, size: int, sharding: Sharding | None
) -> None:
    work = make_work([5, 8, 3], Recipe(layout=Packed(max_tokens=32, pad_to=32), topology=topology))
    results = [values_of(batch) for batch in work.batches]

    def parts_of(sharding: Sharding) -> list[list[Tensor]]:
        return [
            [SHARD[sharding](batch, rank, size).take(result) for rank in range(size)]
            for batch, result in zip(work.batches, results, strict=True)
        ]

    if sharding is not None:
        assert same(
            restore_tokens(work.plan, parts_of(sharding)), restore_tokens(work.plan, results)
        )
        return
    parts = parts_of("sequence")
    with pytest.raises(InputError, match=rf"come from {size} ranks, .* Set sharding='context' or"):
        restore_tokens(work.plan, parts)
    found = restore_tokens(work.plan, parts, sharding="sequence")
    assert same(found, restore_tokens(work.plan, results))


def test_micro_batches_without_a_plan_need_the_sharding() -> None:
    recipe = Recipe(layout=Packed(max_tokens=32), topology=Topology(cp=2))
    work = make_work([5, 8, 3], recipe)
    (batch,), micros = work.batches, work.plan[0, 0]
    parts = [[shard_context(batch, rank, 2).take(values_of(batch)) for rank in range(2)]]
    with pytest.raises(InputError, match="its plan does not say how they share a batch"):
        restore_tokens(micros, parts)
    found = restore_tokens(micros, parts, sharding="context")
    assert same(found, restore_tokens(micros, [values_of(batch)]))
    with pytest.raises(ConfigError, match="unknown sharding 'zigzag'; expected one of: context,"):
        restore_tokens(micros, parts, sharding="zigzag")  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sharding", sorted(SHARD))
def test_attention_of_shards_is_that_of_the_batch(sharding: Sharding, window: int | None) -> None:
    recipe = Recipe(layout=Padded(max_tokens=64, pad_to=16), topology=Topology(cp=4))
    (batch,) = make_work([5, 8, 3, 16], recipe).batches
    shape = (3, batch.rows, batch.width, 2, 4)  # q, k and v, rows, width, heads, dim
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(shape[1:], generator=random, dtype=torch.float64)
    weights[~batch.token_mask] = 0
    q, k, v = qkv.transpose(2, 3)
    expected = attention(q, k, v, batch, window=window).transpose(1, 2)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), qkv)

    def run(ranks: Any) -> tuple[Tensor, Tensor]:
        shard, mine = SHARD[sharding](batch, ranks.rank, 4), qkv.detach().requires_grad_()
        q, k, v = (shard.take(each).transpose(1, 2) for each in mine)
        out = context_attention(q, k, v, shard, ranks, window).transpose(1, 2)
        return out.detach(), torch.autograd.grad((out * shard.take(weights)).sum(), mine)[0]

    outs, gradients = zip(*run_ranks(4, run), strict=True)
    joined = join_sequence(outs)
    if sharding == "context":
        joined = join_context(outs, batch.cu_seqlens)
    torch.testing.assert_close(joined[batch.token_mask], expected[batch.token_mask].detach())
    torch.testing.assert_close(sum(gradients), gradient)
