"""Batches whose samples share prefixes, and attention along their paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from evenstep import MicroBatch
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import (
    Batch,
    Collator,
    Extra,
    attention,
    block_mask,
    cross_entropy,
    sdpa_mask,
    shard_sequence,
)
from tests.examples import examples
from tests.forests import depth, divided, forest, micro_of
from tests.internals import (
    BACKENDS,
    Boundaries,
    Call,
    Segments,
    choose,
    varlen,
)

SEEDS = st.integers(0, 10**6)
IDS = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5, 6, 7], [9, 9]]


def samples_of(ids: list[list[int]], rng: np.random.Generator) -> list[dict[str, Any]]:
    return [
        {"input_ids": tokens, "loss_mask": rng.random(len(tokens)) < 0.7, "old": list(tokens)}
        for tokens in ids
    ]


def test_a_small_tree_lies_in_preorder() -> None:
    batch = Collator()(micro_of(IDS, range(4)), [{"input_ids": ids} for ids in IDS])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 3, 5, 5, 6, 7, 9, 9]]
    assert batch.tree is not None
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 6, 9, 11]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 3, 4, 5, 0, 1]]
    assert batch.places.tolist() == [[0, 1, 0, 1, 0, 0, 0, 1, 2, 0, 1]]
    assert batch.keys is not None
    assert batch.keys.cu_seqlens.tolist() == [0, 2, 6, 9, 13, 19, 21]
    assert batch.keys.slots.tolist()[13:19] == [0, 1, 4, 6, 7, 8]
    assert batch.labels.tolist() == [[2, 3, 4, -100, 5, -100, 6, 7, -100, 9, -100]]
    assert batch.loss_weights.tolist() == [[3, 3, 1, 0, 2, 0, 1, 1, 0, 1, 0]]
    assert batch.unshared.tokens.tolist() == [[token for ids in IDS for token in ids]]
    assert batch.next_tokens.tolist() == batch.labels.tolist()


@given(SEEDS, st.sampled_from([1, 4]), st.integers(0, 5))
def test_every_token_of_a_sample_has_a_slot(seed: int, alignment: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    ids = forest(rng)
    samples, extras = samples_of(ids, rng), {"old": Extra(aligned="token")}
    micro = micro_of(ids, range(len(ids)), alignment=alignment)
    micro = micro_of(ids, range(len(ids)), micro.width + more * alignment, alignment)
    batch = Collator(extras=extras)(micro, samples)
    whole = batch.unshared
    assert sorted(whole.sample_ids.tolist()) == list(range(len(ids)))
    for tile, sample in enumerate(whole.sample_ids.tolist()):
        slots = slice(*whole.cu_seqlens[tile : tile + 2].tolist())
        assert whole.tokens[0, slots].tolist() == whole.extras["old"][0, slots].tolist()  # type: ignore[index]
        assert whole.tokens[0, slots].tolist() == ids[sample]
        if batch.tree is not None:
            at = batch.tree.slots[slots]
            assert batch.tokens[0, at].tolist() == ids[sample]
            assert batch.position_ids[0, at].tolist() == list(range(len(ids[sample])))
            counts = whole.labels[0, slots] != -100
            assert torch.equal(batch.labels[0, at][counts], whole.labels[0, slots][counts])
    assert float(batch.loss_weights.sum()) == float(whole.loss_weights.sum())


def test_random_forests_are_deep() -> None:
    rng = np.random.default_rng(0)
    depths = [depth(micro) for _ in range(200) for micro in divided(rng, forest(rng, 16))]
    assert max(depths) >= 6


def test_without_a_shared_prefix_there_is_no_tree() -> None:
    micro = micro_of([[1, 2], [3]], [0, 1])
    batch = Collator()(micro, [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert batch.tree is None
    assert batch.unshared is batch


def test_samples_that_differ_under_a_node_are_refused() -> None:
    ids = [*IDS[:3], [9, 9]]
    samples = [{"input_ids": tokens} for tokens in ids]
    samples[2] = {"input_ids": [1, 8, 3, 5, 6, 7]}
    with pytest.raises(InputError, match=r"samples 0, 1, 2 share a prefix .* different tokens"):
        Collator()(micro_of(ids, range(4)), samples)
    samples[2] = {"input_ids": IDS[2], "labels": [1, 7, 3, 5, 6, 7]}
    with pytest.raises(InputError, match="different labels"):
        Collator()(micro_of(ids, range(4)), samples)


def test_rows_of_a_padded_layout_are_refused() -> None:
    micro = micro_of(IDS, range(4))
    rows = MicroBatch(micro.segments, np.array([0, 3, 6]), 8, micro.sample_lengths)
    with pytest.raises(InputError, match=r"2 rows; expected one.*plan without prefixes"):
        Collator()(rows, [{"input_ids": ids} for ids in IDS])


def test_segments_apart_from_others_behind_their_parent_are_refused() -> None:
    ids = [[1, 2, 3], [1, 2, 4], [9, 9]]
    segments = Segments(
        np.array([0, 0, 2, 1]), np.array([0, 1, 0, 1]), np.array([1, 2, 2, 2]),
        np.array([-1, 0, -1, 0]),
    )  # fmt: skip
    micro = MicroBatch(segments, np.array([0, 4]), 7, np.array([3, 3, 2, 3]))
    with pytest.raises(InputError, match="segment 3 of a micro-batch is apart from others"):
        Collator()(micro, [{"input_ids": each} for each in ids])


def test_values_are_shifted_in_samples_only() -> None:
    batch = Collator()(micro_of(IDS, range(4)), [{"input_ids": ids} for ids in IDS])
    with pytest.raises(InputError, match=r"batch\.unshared"):
        batch.ahead("tokens")
    assert batch.unshared.labels_at(2)[0, 0] == 3


def test_a_user_function_gets_the_outputs_of_each_sample() -> None:
    batch = Collator()(micro_of(IDS, range(4)), [{"input_ids": ids} for ids in IDS])
    logits = torch.randn(1, batch.width, 10, dtype=torch.float64)
    once, one_by_one = cross_entropy()(logits, batch), cross_entropy().looped()(logits, batch)
    torch.testing.assert_close(once.by_sequence, one_by_one.by_sequence)
    assert len(once.by_sequence) == 4


# Attention ----------------------------------------------------------------------------------------


def tree_batch(seed: int, longest: int = 7) -> tuple[Batch, np.random.Generator]:
    rng = np.random.default_rng(seed)
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 8], *forest(rng, 6, longest)]
    alignment = int(rng.choice([1, 1, 4]))
    micro = micro_of(ids, range(len(ids)), alignment=alignment)
    width = micro.width + alignment * int(rng.integers(0, 4))
    micro = micro_of(ids, range(len(ids)), width, alignment)
    return Collator()(micro, [{"input_ids": each} for each in ids]), rng


def projections(batch: Batch, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(4, 8), (2, 8), (2, 8)]
    return [
        torch.randn(1, heads, batch.width, dim, dtype=dtype).requires_grad_()
        for heads, dim in shapes
    ]


def of_samples(batch: Batch, tensors: list[Tensor]) -> list[Tensor]:
    """(1, heads, slots, dim) of a tree -> of its samples."""
    assert batch.tree is not None
    return [tensor[:, :, batch.tree.slots] for tensor in tensors]


@given(
    SEEDS,
    st.sampled_from([None, 1, 2, 3]),
    st.booleans(),
    st.sampled_from([None, 5.0]),
    st.sampled_from(["segments", "varlen", "mask"]),
)
def test_attention_of_a_tree_is_that_of_its_samples(
    seed: int, window: int | None, sinks: bool, softcap: float | None, backend: str
) -> None:
    torch.manual_seed(seed)
    batch, _ = tree_batch(seed)
    keys = batch.keys
    assert keys is not None
    assert batch.tree is not None
    qkv = projections(batch)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    q, k, v = qkv
    if backend != "varlen":
        how: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sink}
        out = attention(q, k, v, batch, backend=backend, **how)
    else:
        flat = [x[0].transpose(0, 1) for x in qkv]
        out, _ = varlen(
            *flat, batch.cu_seqlens, keys.cu_seqlens, batch.max_seqlen, keys.max_seqlen, True,
            window or 0, 8**-0.5, softcap or 0.0, sink, keys.slots,
        )  # fmt: skip
        out = out.transpose(0, 1)[None]
    q, k, v = of_samples(batch, qkv)
    expected = attention(q, k, v, batch.unshared, window=window, softcap=softcap, sinks=sink)
    torch.testing.assert_close(out[:, :, batch.tree.slots], expected)
    given_to, weights = [*qkv, *([sink] if sink is not None else [])], torch.randn_like(expected)
    ours = torch.autograd.grad((out[:, :, batch.tree.slots] * weights).sum(), given_to)
    theirs = torch.autograd.grad((expected * weights).sum(), given_to)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["segments", "mask"])
def test_gradients_of_shared_keys_are_summed_in_float32(backend: str) -> None:
    ids = [[1, 2, 3, index] for index in range(64)]
    batch = Collator()(micro_of(ids, range(64)), [{"input_ids": each} for each in ids])
    torch.manual_seed(0)
    qkv = projections(batch, torch.bfloat16)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [each.detach().to(dtype).requires_grad_() for each in qkv]
        q, k, v = leaves
        attention(q, k, v, batch, backend=backend).double().sum().backward()
        assert v.grad is not None
        gradients.append(v.grad.double()[:, :, 0])
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=0)


@examples(60)
@given(
    SEEDS,
    st.sampled_from([7, 90]),
    st.sampled_from([None, 1, 3, 70, 200]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 5.0]),
)
def test_flex_attention_of_a_tree_is_that_of_its_segments(
    seed: int, longest: int, window: int | None, causal: bool, sinks: bool, softcap: float | None
) -> None:
    torch.manual_seed(seed)
    batch, _ = tree_batch(seed, longest)
    q, k, v = (each.detach().float() for each in projections(batch))
    sink = torch.randn(4) if sinks else None
    call = Call(q, k, v, Boundaries.of(batch), causal, window, None, softcap, sink)
    torch.testing.assert_close(BACKENDS["flex"](call), BACKENDS["segments"](call))


def path_mask(batch: Batch, causal: bool, window: int | None) -> Tensor:
    """(width, width) bool, slot by slot: the keys of a tile are those of its path, in order."""
    assert batch.keys is not None
    seen = torch.zeros(batch.width, batch.width, dtype=torch.bool)
    ends, key_ends = batch.cu_seqlens.tolist(), batch.keys.cu_seqlens.tolist()
    for tile in range(len(ends) - 1):
        keys = batch.keys.slots[key_ends[tile] : key_ends[tile + 1]].tolist()
        for at, slot in enumerate(range(ends[tile + 1] - 1, ends[tile] - 1, -1)):
            place = len(keys) - 1 - at
            near = [abs(each - place) < (window or len(keys)) for each in range(len(keys))]
            last = place if causal else len(keys)
            seen[slot, [k for each, k in enumerate(keys) if each <= last and near[each]]] = True
    return seen


@examples(40)
@given(SEEDS, st.sampled_from([7, 90]), st.sampled_from([None, 1, 3, 70, 200]), st.booleans())
def test_masks_show_the_path_of_every_slot(
    seed: int, longest: int, window: int | None, causal: bool
) -> None:
    batch, _ = tree_batch(seed, longest)
    expected = path_mask(batch, causal, window)
    assert torch.equal(sdpa_mask(batch, causal=causal, window=window)[0, 0], expected)
    found = block_mask(batch, causal=causal, window=window)
    count = -(-batch.width // 128)
    padded = torch.zeros(count * 128, count * 128, dtype=torch.bool)
    padded[: batch.width, : batch.width] = expected
    blocks = padded.unflatten(1, (count, 128)).unflatten(0, (count, 128)).transpose(1, 2)
    partial, whole = (
        blocks_of(*lists, count)
        for lists in (
            (found.kv_num_blocks, found.kv_indices),
            (found.full_kv_num_blocks, found.full_kv_indices),
        )
    )
    assert not (partial & whole).any()
    assert not (blocks.any((2, 3)) & ~(partial | whole)).any()
    assert not (whole & ~blocks.all((2, 3))).any()
    if window is None:  # no block is computed or masked in vain
        assert torch.equal(partial | whole, blocks.any((2, 3)))
        assert torch.equal(whole, blocks.all((2, 3)))


def blocks_of(counts: Tensor, indices: Tensor, count: int) -> Tensor:
    """(query blocks, key blocks) bool, from the lists of a block mask."""
    listed = torch.zeros(count, count, dtype=torch.bool)
    for query in range(count):
        listed[query, indices[0, 0, query, : counts[0, 0, query]].long()] = True
    return listed


def test_a_tree_and_its_slots_alone_have_masks_of_their_own() -> None:
    """All layers of a Hugging Face model use one block mask; a forward without prefixes another."""
    batch, _ = tree_batch(3)
    bounds = Boundaries.of(batch)
    alone = Boundaries.of(replace(batch, tree=None))
    q, k, v = (each.detach().float() for each in projections(batch))
    for each in (bounds, alone, bounds):
        expected = BACKENDS["segments"](Call(q, k, v, each))
        torch.testing.assert_close(BACKENDS["flex"](Call(q, k, v, each)), expected)
    assert len(bounds.kept["block_masks"]) == 1


@pytest.mark.parametrize(
    ("dtype", "softcap", "expected"),
    [
        (torch.bfloat16, None, "varlen"),
        (torch.bfloat16, 5.0, "flex"),
        (torch.float32, None, "segments"),  # FlexAttention is slower in float32
        (torch.float32, 5.0, "segments"),
    ],
)
def test_the_fastest_backend_of_a_tree_is_chosen_on_cuda(
    dtype: torch.dtype, softcap: float | None, expected: str
) -> None:
    ids = [[*range(600), answer] for answer in range(3)]
    batch = Collator()(micro_of(ids, range(3)), [{"input_ids": each} for each in ids])
    bounds = Boundaries.of(batch)
    with FakeTensorMode():
        q, k = (torch.empty(1, n, batch.width, 32, device="cuda", dtype=dtype) for n in (4, 2))
        assert choose(Call(q, k, k, bounds, softcap=softcap)) == expected


def test_layers_that_are_not_causal_are_refused() -> None:
    batch = Collator()(micro_of(IDS, range(4)), [{"input_ids": ids} for ids in IDS])
    q = torch.zeros(1, 1, batch.width, 8)
    with pytest.raises(ConfigError, match=r"not causal\. Plan without prefixes"):
        attention(q, q, q, batch, causal=False)


def test_plain_causal_attention_and_shards_are_refused() -> None:
    batch, _ = tree_batch(0)
    q, k, v = projections(batch)
    with pytest.raises(ConfigError, match="no segment that sees another"):
        attention(q, k, v, batch, backend="causal")
    with pytest.raises(InputError, match=r"Set topology\.cp"):
        shard_sequence(batch, 0, 1)
