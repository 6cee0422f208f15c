"""Context parallelism: zigzag shards that join again, with even work and the same attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from evenstep import Packed, Padded, Recipe, Topology
from evenstep.errors import InputError
from evenstep.tensors import (
    Batch,
    BatchShard,
    join_context,
    shard_context,
    shard_sequence,
)
from tests.examples import examples
from tests.tensors.works import (
    VOCABULARY,
    Work,
    assert_shards_hold,
    handmade,
    make_work,
    same,
    works,
)

CP2 = Topology(cp=2)


def shards_of(batch: Batch, size: int) -> list[BatchShard]:
    return [shard_context(batch, rank, size) for rank in range(size)]


# Cases ------------------------------------------------------------------------------------------


def test_two_sequences_padded_to_forty_are_sharded_as_in_nemo() -> None:
    # In NeMo the padding at the end belongs to the last sequence: cu_seqlens [0, 16, 40].
    batch = handmade([16, 24], [16, 16], [*range(32), *[0] * 8])
    first, second = (shard.tokens.flatten().tolist() for shard in shards_of(batch, 2))
    assert first == [*range(4), *range(12, 16), *range(16, 22), *[0] * 6]
    assert second == [*range(4, 12), *range(22, 32), 0, 0]


def test_the_tail_is_a_tile_and_sharded_like_one() -> None:
    work = make_work([16, 16], Recipe(layout=Packed(max_tokens=40, pad_to=40), topology=CP2))
    shards = shards_of(work.batches[0], 2)
    assert [shard.local_cu_seqlens.tolist() for shard in shards] == [[0, 8, 16, 20]] * 2
    assert [shard.local_seqlens.tolist() for shard in shards] == [[8, 8, 0]] * 2
    positions = [shard.position_ids.flatten().tolist() for shard in shards]
    assert positions[0] == [0, 1, 2, 3, 12, 13, 14, 15] * 2 + [0, 1, 6, 7]
    assert positions[1] == [*range(4, 12), *range(4, 12), 2, 3, 4, 5]


def test_nemos_picture_of_four_sequences() -> None:
    # 0 0 0 0 0 p p p | 1 1 1 1 1 1 1 1 | 2 p p p | 3 3 3 p, with p = 9
    tokens = [*[0] * 5, 9, 9, 9, *[1] * 8, 2, 9, 9, 9, 3, 3, 3, 9]
    first, second = shards_of(handmade([8, 8, 4, 4], [5, 8, 1, 3], tokens), 2)
    assert first.tokens.tolist() == [[0, 0, 9, 9, 1, 1, 1, 1, 2, 9, 3, 9]]
    assert second.tokens.tolist() == [[0, 0, 0, 9, 1, 1, 1, 1, 9, 9, 3, 3]]
    assert first.local_seqlens.tolist() == [2, 4, 1, 1]
    assert second.local_seqlens.tolist() == [3, 4, 0, 2]
    assert first.real_cu_seqlens.tolist() == [0, 5, 13, 14, 17]
    assert first.cu_seqlens.tolist() == [0, 8, 16, 20, 24]


def test_labels_at_chunk_boundaries_are_tokens_of_other_ranks() -> None:
    first, second = shards_of(handmade([8], [7], [10, 11, 12, 13, 14, 15, 16, 0]), 2)
    assert first.tokens.tolist() == [[10, 11, 16, 0]]
    assert first.labels.tolist() == [[11, 12, -100, -100]]
    assert second.labels.tolist() == [[13, 14, 15, 16]]
    assert first.take(handmade([8], [7], [*range(7), 0]).labels_at(2)).tolist() == [
        [2, 3, -100, -100]
    ]


def causal_work(shards: list[BatchShard]) -> list[int]:
    """(query, key) pairs of each rank under a causal mask, padding included."""
    return [int((shard.places + 1).sum()) for shard in shards]


def test_the_work_of_that_example_is_even() -> None:
    batch = handmade([8], [6], [*range(6), 0, 0])
    assert causal_work(shards_of(batch, 2)) == [18, 18]
    assert causal_work([shard_sequence(batch, rank, 2) for rank in range(2)]) == [10, 26]


def test_a_tile_that_does_not_divide_is_an_error_that_names_its_sample() -> None:
    batch = make_work([8, 6], Recipe(layout=Packed(max_tokens=16))).batches[0]
    with pytest.raises(InputError, match=r"of sample 1 has 6 slots.*a multiple of 4.*cp=2"):
        shard_context(batch, 0, 2)


def test_faults_say_what_was_expected() -> None:
    batch = make_work([8, 3], Recipe(layout=Packed(max_tokens=16), topology=CP2)).batches[0]
    with pytest.raises(InputError, match=r"rank must be in \[0, 2\), got 2"):
        shard_context(batch, 2, 2)
    shard = shard_context(batch, 0, 2)
    with pytest.raises(InputError, match="do not make up the 12 slots"):
        join_context([shard.tokens], batch.cu_seqlens)
    undeclared = handmade([4], [4], [1, 2, 3, 4])
    object.__setattr__(undeclared, "extras", {"odd": torch.zeros(1, 4)})
    with pytest.raises(InputError, match="alignment of the extra 'odd' is unknown"):
        shard_context(undeclared, 0, 2)


def test_a_shard_moves_as_a_whole() -> None:
    work = make_work([8, 3], Recipe(layout=Packed(max_tokens=16), topology=CP2))
    shard = shard_context(work.batches[0], 0, 2).to("cpu")
    assert (shard.rows, shard.width, shard.device.type, shard.is_empty) == (1, 6, "cpu", False)
    assert same(shard.extras["features"], shard.take(work.batches[0].extras["features"]))


# Properties --------------------------------------------------------------------------------------


@examples(60)
@given(works())
def test_joining_the_shards_gives_the_batch_again(work: Work) -> None:
    size = work.plan.recipe.topology.cp
    for batch in work.batches:
        before = batch.tokens.clone()
        shards = shards_of(batch, size)
        assert_shards_hold(batch, shards, partial(join_context, cu_seqlens=batch.cu_seqlens))
        assert same(batch.tokens, before)
        results = torch.randn(batch.rows, batch.width, 3)
        parts = [shard.take(results) for shard in shards]
        assert same(join_context(parts, shards[0].cu_seqlens), results)


@examples(60)
@given(works())
def test_local_lengths_describe_the_slots_of_a_shard(work: Work) -> None:
    size = work.plan.recipe.topology.cp
    for batch in work.batches:
        shards = shards_of(batch, size)
        assert same(sum(shard.local_seqlens for shard in shards), batch.seqlens)
        for shard in shards:
            assert same(shard.local_cu_seqlens * size, batch.cu_seqlens)
            assert same(shard.token_mask, shard.take(batch.token_mask))
            # Real tokens come first in each tile of the shard.
            place = torch.arange(shard.tokens.numel())
            place -= shard.local_cu_seqlens.long()[shard.segment_ids.flatten()]
            real = place < shard.local_seqlens[shard.segment_ids.flatten()]
            assert same(real, shard.token_mask.flatten())


@examples(30)
@given(works(), st.integers(1, 9))
def test_positions_of_the_model_do_not_move_labels_padding_or_shards(work: Work, by: int) -> None:
    size = work.plan.recipe.topology.cp
    for batch in work.batches:
        moved = replace(batch, position_ids=batch.position_ids + by, place_ids=batch.position_ids)
        assert same(moved.token_mask, batch.token_mask)
        assert same(moved.labels_at(1), batch.labels_at(1))
        assert same(moved.unshifted_labels, batch.unshifted_labels)
        shards = shards_of(moved, size)
        for mine, theirs in zip(shards, shards_of(batch, size), strict=True):
            assert same(mine.local_seqlens, theirs.local_seqlens)
            assert same(mine.places, theirs.places)
        places = [shard.places for shard in shards]
        assert same(join_context(places, batch.cu_seqlens), batch.places)
        assert same(moved.to("cpu").places, batch.places)


@examples(60)
@given(works())
def test_zigzag_work_is_even_and_that_of_the_whole_batch(work: Work) -> None:
    size = work.plan.recipe.topology.cp
    for batch in work.batches:
        found = causal_work(shards_of(batch, size))
        slots = batch.cu_seqlens.diff().long()
        assert sum(found) == int((slots * (slots + 1) // 2).sum())
        assert len(set(found)) == 1


@examples(30)
@given(works(cp=(2, 4)))
def test_every_chunk_can_be_shared_by_tensor_parallel_ranks(work: Work) -> None:
    topology = work.plan.recipe.topology
    for batch in work.batches:
        assert not (batch.cu_seqlens.diff() // (2 * topology.cp) % topology.tp).any()


# Attention --------------------------------------------------------------------------------------


class Toy:
    """One attention layer over embeddings."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        shape = [(VOCABULARY, 8), (8, 8), (8, 8), (8, 8)]
        self.weights = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shape]

    def project(self, tokens: Tensor, positions: Tensor) -> list[Tensor]:
        embedding, *projections = self.weights
        x = embedding[tokens] * torch.cos(0.1 * positions)[..., None]
        return [x @ weight for weight in projections]

    def gradients(self, out: Tensor, mask: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        loss = (out * torch.randn(out.shape) * mask[..., None]).sum()
        return list(torch.autograd.grad(loss, self.weights))


def one_by_one(toy: Toy, batch: Batch) -> Tensor:
    """Causal attention within each tile, nothing sharded."""
    q, k, v = (x.flatten(0, 1) for x in toy.project(batch.tokens, batch.position_ids))
    bounds = batch.cu_seqlens.tolist()
    tiles = [slice(a, b) for a, b in pairwise(bounds)]
    attend: Callable[..., Tensor] = functional.scaled_dot_product_attention
    out = torch.cat([attend(q[p][None], k[p][None], v[p][None], is_causal=True)[0] for p in tiles])
    return out.view(batch.rows, batch.width, -1)


def gathered(toy: Toy, batch: Batch, size: int) -> Tensor:
    """Each rank's queries against all ranks' keys, masked by positions and tiles."""
    shards = shards_of(batch, size)
    parts = [toy.project(shard.tokens, shard.position_ids) for shard in shards]
    k, v = (join_context([p[i] for p in parts], batch.cu_seqlens).flatten(0, 1) for i in (1, 2))
    outs = []
    for shard, (q, _, _) in zip(shards, parts, strict=True):
        position, tile = (
            shard.position_ids.flatten()[:, None],
            shard.segment_ids.flatten()[:, None],
        )
        seen = (tile == batch.segment_ids.flatten()) & (position >= batch.position_ids.flatten())
        out = functional.scaled_dot_product_attention(q.flatten(0, 1), k, v, attn_mask=seen)
        outs.append(out.view(shard.rows, shard.width, -1))
    return join_context(outs, batch.cu_seqlens)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@examples(25)
@given(work=works(cp=(2, 4)))
def test_attention_over_gathered_keys_is_the_same_as_without_shards(
    dtype: torch.dtype, tolerance: float, work: Work
) -> None:
    toy = Toy(dtype)
    for batch in work.batches[:3]:
        plain, cut = one_by_one(toy, batch), gathered(toy, batch, work.plan.recipe.topology.cp)
        mask = batch.token_mask
        torch.testing.assert_close(cut[mask], plain[mask], rtol=tolerance, atol=tolerance)
        # Relative to the largest gradient: those of queries and keys may cancel to almost nothing.
        expected = toy.gradients(plain, mask)
        scale = max(float(gradient.abs().max()) for gradient in expected)
        for ours, theirs in zip(toy.gradients(cut, mask), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
@examples(6)
def test_padded_rows_are_sharded_row_by_row(size: int, tp: int) -> None:
    recipe = Recipe(
        layout=Padded(max_tokens=128), topology=Topology(cp=size, tp=tp), min_saving=0.99
    )
    batch = make_work([1, 9, 16], recipe).batches[0]
    for shard in shards_of(batch, size):
        assert shard.rows == batch.rows == 3
        assert shard.width * size == batch.width
        rows = torch.arange(3)[:, None].expand_as(shard.tokens)
        assert same(shard.slot_ids // batch.width, rows)
