"""Attention within segments: every backend agrees with the definition."""

import gc
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from evenstep import Packed, Padded, Recipe
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import attention_backends as backends
from evenstep.tensors.attention_backends import BACKENDS, attention
from evenstep.tensors.batch import Batch
from evenstep.tensors.masks import block_mask, sdpa_mask
from tests.tensors.batches import RECIPES, batch_of, distance

torch.set_num_threads(1)

LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=6)
WINDOWS = st.sampled_from([None, None, 1, 3, 100])


def tensors_for(
    batch: Batch, heads: int = 4, kv_heads: int = 2, dim: int = 8, dtype: Any = torch.float32
) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [
        torch.randn(batch.rows, count, batch.width, dim, generator=random).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    ]


def plain(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, causal: bool = True, window: int | None = None
) -> Tensor:
    """The definition: token by token, in double precision."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    shared = q.shape[1] // k.shape[1]
    bounds = batch.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        row = begin // batch.width
        for slot in range(begin, end):
            last = slot if causal else end - 1
            first = begin if window is None else max(begin, slot - window + 1)
            seen = slice(first - row * batch.width, last + 1 - row * batch.width)
            for head in range(q.shape[1]):
                key, value = (x[row, head // shared, seen].double() for x in (k, v))
                query = q[row, head, slot - row * batch.width].double()
                weights = torch.softmax(key @ query / math.sqrt(q.shape[3]), 0)
                out[row, head, slot - row * batch.width] = weights @ value
    return out


def real(batch: Batch, out: Tensor) -> Tensor:
    return out.transpose(1, 2)[batch.token_mask]


@settings(max_examples=40)
@given(LENGTHS, st.sampled_from(sorted(RECIPES)), WINDOWS, st.sampled_from([1, 2, 4]))
def test_every_backend_agrees_with_the_definition(
    lengths: list[int], recipe: str, window: int | None, kv_heads: int
) -> None:
    batch = batch_of(lengths, recipe)
    q, k, v = tensors_for(batch, kv_heads=kv_heads)
    expected = real(batch, plain(q, k, v, batch, window=window))
    for name in (None, "segments", "mask", "flex", "causal"):
        try:
            found = attention(q, k, v, batch, window=window, backend=name)
        except ConfigError:
            assert name == "causal"
            continue
        assert found.isfinite().all()
        assert distance(real(batch, found).double(), expected) < 1e-5, name


@settings(max_examples=30)
@given(LENGTHS, st.sampled_from(sorted(RECIPES)), WINDOWS)
def test_gradients_agree_too(lengths: list[int], recipe: str, window: int | None) -> None:
    batch = batch_of(lengths, recipe)
    q, k, v = (x.double().requires_grad_() for x in tensors_for(batch))
    weights = torch.randn_like(q) * batch.token_mask[:, None, :, None]
    gradients = [
        torch.autograd.grad((out * weights).sum(), (q, k, v))
        for out in (
            plain(q, k, v, batch, window=window),
            attention(q, k, v, batch, window=window),
        )
    ]
    for expected, found in zip(*gradients, strict=True):
        assert distance(found, expected, least=1.0) < 1e-10


@pytest.mark.parametrize("name", ["segments", "mask", "flex"])
def test_bidirectional_attention_stays_within_segments(name: str) -> None:
    batch = batch_of([5, 1, 7, 2], "packed static")
    q, k, v = tensors_for(batch)
    found = attention(q, k, v, batch, causal=False, backend=name)
    assert distance(found.double(), plain(q, k, v, batch, causal=False)) < 1e-5


def test_the_scale_replaces_the_usual_one() -> None:
    batch = batch_of([5, 1, 7, 2], "packed")
    q, k, v = tensors_for(batch)
    expected = attention(q * 0.5, k, v, batch)
    for name in ("segments", "mask", "flex"):
        found = attention(q, k, v, batch, scale=0.5 / math.sqrt(8), backend=name)
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["segments", "mask", "flex", None])
def test_half_precision_is_accurate_to_its_rounding(name: str | None) -> None:
    batch = batch_of([9, 1, 24, 3], "packed with a tail")
    q, k, v = tensors_for(batch, dtype=torch.bfloat16)
    found = attention(q, k, v, batch, backend=name)
    assert found.dtype == torch.bfloat16
    assert distance(real(batch, found).double(), real(batch, plain(q, k, v, batch))) < 2e-2


def test_tails_and_empty_micro_batches_are_tiles_like_any_other() -> None:
    empty = Batch(
        tokens=torch.zeros(1, 4, dtype=torch.int64),
        targets=torch.zeros(1, 4, dtype=torch.int64),
        labels=torch.zeros(1, 4, dtype=torch.int64),
        position_ids=torch.tensor([[0, 1, 0, 1]]),
        segment_ids=torch.tensor([[0, 0, 2, 2]]),
        loss_weights=torch.zeros(1, 4),
        cu_seqlens=torch.tensor([0, 2, 2, 4], dtype=torch.int32),
        seqlens=torch.tensor([2, 0, 2]),
        sample_ids=torch.tensor([0, 1, 2]),
        starts=torch.zeros(3, dtype=torch.int64),
        loss_tokens=torch.zeros(3, dtype=torch.int64),
        max_seqlen=2,
    )
    last = batch_of([3] * 5, Recipe(layout=Padded(max_tokens=8)))
    assert not last.is_empty
    for batch in (empty, last):
        q, k, v = tensors_for(batch)
        expected = real(batch, plain(q, k, v, batch))
        for name in ("segments", "mask", "flex", None):
            found = attention(q, k, v, batch, backend=name)
            assert distance(real(batch, found).double(), expected) < 1e-5


def test_an_empty_micro_batch_gives_finite_outputs_and_gradients() -> None:
    from evenstep import Topology, make_plan
    from evenstep.tensors.collate import Collator

    plan = make_plan([3], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2)))
    empty = next(
        batch
        for batch in (Collator()(plan[0, r][0], [{"input_ids": [1, 2, 3]}]) for r in (0, 1))
        if batch.is_empty
    )
    q, k, v = (x.requires_grad_() for x in tensors_for(empty))
    for name in (None, "segments", "mask", "causal"):
        attention(q, k, v, empty, backend=name).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


# Masks ---------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
    st.sampled_from([(True, None), (True, 1), (True, 130), (True, 300), (False, None)]),
    st.sampled_from([Packed(max_tokens=2048), Padded(max_tokens=4096, round_to=128)]),
)
def test_the_block_mask_is_the_one_that_torch_finds_by_trying_every_entry(
    lengths: list[int], how: tuple[bool, int | None], layout: Any
) -> None:
    causal, window = how
    batch = batch_of(lengths, Recipe(layout=layout))
    found = block_mask(batch, causal=causal, window=window)
    width = batch.width
    expected = create_block_mask(found.mask_mod, batch.rows, None, width, width, device="cpu")
    assert found.seq_lengths == expected.seq_lengths
    for mine, theirs in (
        (found, expected),
        (_whole_blocks_only(found), _whole_blocks_only(expected)),
    ):
        assert torch.equal(mine.to_dense(), theirs.to_dense())
    slots = torch.arange(width)
    rows = torch.arange(batch.rows)[:, None, None]
    entries = found.mask_mod(rows, None, slots[:, None], slots[None, :])
    assert torch.equal(entries.unsqueeze(1), sdpa_mask(batch, causal=causal, window=window))


def _whole_blocks_only(mask: Any) -> Any:
    return type(mask).from_kv_blocks(
        mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=mask.BLOCK_SIZE
    )


def test_the_block_mask_is_built_once_per_batch_and_goes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []

    def build(*args: Any, **kwargs: Any) -> Any:
        built.append(kwargs)
        return block_mask(*args, **kwargs)

    monkeypatch.setattr(backends, "block_mask", build)
    before = len(backends._block_masks)
    batch = batch_of([5, 3], "packed")
    q, k, v = tensors_for(batch)
    for _ in range(3):
        attention(q, k, v, batch, backend="flex")
    assert len(built) == 1
    attention(q, k, v, batch, backend="flex", window=2)
    assert len(built) == 2
    del batch
    gc.collect()
    assert len(backends._block_masks) == before


# Choosing and refusing -----------------------------------------------------------------------


def test_plain_causal_attention_runs_padded_batches_and_masks_run_tiny_ones() -> None:
    def chosen(lengths: list[int], recipe: Recipe, window: int | None = None) -> str:
        batch = batch_of(lengths, recipe)
        q, k, v = tensors_for(batch)
        return backends._choose(backends.Call(q, k, v, batch, True, window, None))

    assert chosen([9, 4], Recipe(layout=Padded(max_tokens=32))) == "causal"
    assert chosen([9, 4], Recipe(layout=Padded(max_tokens=32)), window=3) == "mask"
    assert chosen([4] * 8, Recipe(layout=Packed(max_tokens=32))) == "mask"
    assert chosen([100] * 4, Recipe(layout=Packed(max_tokens=400))) == "segments"


def test_a_backend_that_cannot_run_says_why() -> None:
    batch = batch_of([5, 3], "packed")
    q, k, v = tensors_for(batch)
    with pytest.raises(
        ConfigError, match=r"unknown attention backend 'fast'.*varlen, flex, causal"
    ):
        attention(q, k, v, batch, backend="fast")
    with pytest.raises(ConfigError, match="'varlen' supports CUDA only, not cpu"):
        attention(q, k, v, batch, backend="varlen")
    with pytest.raises(ConfigError, match="'flex' does not support gradients on the CPU"):
        attention(q.requires_grad_(), k, v, batch, backend="flex")
    with pytest.raises(ConfigError, match="'causal' requires one segment per row"):
        attention(q, k, v, batch, backend="causal")
    with pytest.raises(ConfigError, match="window=2 requires causal=True"):
        attention(q, k, v, batch, causal=False, window=2)
    with pytest.raises(ConfigError, match="window must be at least 1"):
        attention(q, k, v, batch, window=0)


def test_tensors_of_another_shape_are_refused() -> None:
    batch = batch_of([5, 3], "packed")
    q, k, v = tensors_for(batch)
    with pytest.raises(InputError, match=r"k has shape \(1, 2, 7, 8\), .* 1 rows of 8 slots"):
        attention(q, k[:, :, :-1], v, batch)
    with pytest.raises(InputError, match="q has 3 heads, k has 2 and v has 2"):
        attention(q[:, :3], k, v, batch)


# varlen, by the signatures that torch has had ------------------------------------------------


def first_signature(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: Any = None,
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1]
    return one_by_one(query, key, value, cu_seq_q, (-1, 0) if is_causal else (-1, -1), None)


def second_signature(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1]
    return one_by_one(query, key, value, cu_seq_q, window_size, scale)


def third_signature(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    return one_by_one(query, key, value, cu_seq_q, window_size, scale)


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: Any, scale: float | None
) -> Tensor:
    assert bounds.dtype == torch.int32
    out = torch.empty_like(query)
    for begin, end in pairwise(bounds.tolist()):
        n = end - begin
        back, ahead = (n if side < 0 else side for side in window)
        seen = torch.ones(n, n, dtype=torch.bool).tril(ahead).triu(-back)
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale
        )
        out[begin:end] = mixed.transpose(0, 1)
    return out


@pytest.mark.parametrize("signature", [first_signature, second_signature, third_signature])
def test_varlen_is_called_with_the_parameters_of_each_torch(
    signature: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "varlen_attn", signature)
    batch = batch_of([5, 1, 9, 2], "packed static")
    q, k, v = tensors_for(batch)
    backends._varlen_parameters.cache_clear()
    try:
        for causal, window, scale in (
            (True, None, None), (True, 3, None), (False, None, None), (True, None, 0.3),
        ):  # fmt: skip
            if signature is first_signature and window is not None:
                continue
            call = backends.Call(q, k, v, batch, causal, window, scale)
            expected = BACKENDS["mask"].run(call)
            assert distance(BACKENDS["varlen"].run(call), expected) < 1e-5
    finally:
        backends._varlen_parameters.cache_clear()
