"""Attention within segments: every backend agrees with the definition."""

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from evenstep import Packed, Padded, Recipe
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, attention, block_mask, sdpa_mask
from tests.examples import examples
from tests.internals import (
    BACKENDS,
    Boundaries,
    Call,
    batch_module,
    choose,
    refusal,
    segment_attention,
    varlen,
)
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
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, causal: bool = True, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition: token by token, in double precision."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    shared = q.shape[1] // k.shape[1]
    bounds = batch.cu_seqlens.tolist()
    if not causal:  # tokens do not see the padding of their segment
        bounds = sorted({*bounds, *(batch.cu_seqlens[:-1] + batch.seqlens).tolist()})
    for begin, end in pairwise(bounds):
        row = begin // batch.width
        for slot in range(begin, end):
            last = slot if causal else end - 1
            first = begin
            if window is not None:
                first, last = max(begin, slot - window + 1), min(last, slot + window - 1)
            seen = slice(first - row * batch.width, last + 1 - row * batch.width)
            for head in range(q.shape[1]):
                key, value = (x[row, head // shared, seen].double() for x in (k, v))
                query = q[row, head, slot - row * batch.width].double()
                scores = key @ query / math.sqrt(q.shape[3])
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)[: len(value)]
                out[row, head, slot - row * batch.width] = weights @ value
    return out


def real(batch: Batch, out: Tensor) -> Tensor:
    return out.transpose(1, 2)[batch.token_mask]


@examples(40)
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


@examples(30)
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


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("name", ["segments", "mask", "flex"])
@pytest.mark.parametrize("recipe", ["packed static", "packed and aligned"])
def test_bidirectional_attention_stays_within_segments(
    name: str, window: int | None, recipe: str
) -> None:
    batch = batch_of([5, 1, 7, 2], recipe)
    q, k, v = tensors_for(batch)
    found = attention(q, k, v, batch, causal=False, window=window, backend=name)
    assert distance(found.double(), plain(q, k, v, batch, False, window)) < 1e-5


@examples(25)
@given(
    LENGTHS,
    st.sampled_from(sorted(RECIPES)),
    WINDOWS,
    st.sampled_from([None, 0.5, 20.0]),
    st.booleans(),
    st.booleans(),
)
def test_soft_caps_and_sinks_agree_with_the_definition(
    lengths: list[int],
    recipe: str,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    causal: bool,
) -> None:
    batch = batch_of(lengths, recipe)
    q, k, v = tensors_for(batch)
    sinks = torch.tensor([0.5, -3.0, 2.0, 8.0]) if sunk else None
    expected = real(batch, plain(q, k, v, batch, causal, window, softcap, sinks))
    for name in (None, "segments", "mask", "flex"):
        found = attention(
            q, k, v, batch,
            causal=causal, window=window, softcap=softcap, sinks=sinks, backend=name,
        )  # fmt: skip
        assert found.isfinite().all()
        assert distance(real(batch, found).double(), expected) < 1e-5, name


@examples(25)
@given(
    LENGTHS,
    st.sampled_from(["packed", "packed static"]),
    WINDOWS,
    st.sampled_from([None, 0.5]),
    st.booleans(),
    st.sampled_from(["segments", "mask", "varlen"]),
)
def test_gradients_of_sinks_and_soft_caps_are_exact(
    lengths: list[int], recipe: str, window: int | None, softcap: float | None, causal: bool,
    name: str,
) -> None:  # fmt: skip
    """varlen runs its formulas on the CPU here: the backward with what is left after the sink."""
    batch = batch_of(lengths, recipe)
    q, k, v = (x.double().requires_grad_() for x in tensors_for(batch))
    sinks = torch.tensor([0.5, -3.0, 2.0, 8.0], dtype=torch.float64, requires_grad=True)
    weights = torch.randn(q.shape, dtype=torch.float64) * batch.token_mask[:, None, :, None]
    call = Call(q, k, v, Boundaries.of(batch), causal, window, None, softcap, sinks)
    found = BACKENDS[name](call)
    expected = plain(q, k, v, batch, causal, window, softcap, sinks)
    assert distance((found * weights).detach(), (expected * weights).detach()) < 1e-12
    gradients = [
        torch.autograd.grad((out * weights).sum(), (q, k, v, sinks)) for out in (expected, found)
    ]
    for right, mine in zip(*gradients, strict=True):
        assert distance(mine, right, least=1.0) < 1e-10


@pytest.mark.parametrize("name", ["segments", "mask"])
@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"sinks": torch.zeros(4)}])
def test_scores_stay_in_float32_under_autocast(name: str, options: dict[str, Any]) -> None:
    batch = batch_of([9, 12], "packed")
    q, k, v = (3 * x for x in tensors_for(batch))
    expected = attention(q, k, v, batch, backend=name, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, k, v, batch, backend=name, **options)
    assert torch.equal(found, expected)


def test_a_value_dimension_of_its_own() -> None:
    batch = batch_of([5, 1, 7, 2], "packed static")
    q, k, v = tensors_for(batch, dim=12)
    v = v[..., :8]
    expected = plain(q, k, v, batch)
    for name in ("segments", "mask", "flex"):
        assert distance(attention(q, k, v, batch, backend=name).double(), expected) < 1e-5
    found = BACKENDS["varlen"](Call(q, k, v, Boundaries.of(batch)))
    assert distance(found.double(), expected) < 1e-5


def test_dropout_keeps_the_mean_and_drops_weights() -> None:
    batch = batch_of([3, 2], "packed")
    q, k, v = (x.double().expand(2000, -1, -1, -1) for x in tensors_for(batch))
    bounds = Boundaries(2000, 5, torch.arange(0, 10001, 5, dtype=torch.int32), 5)
    torch.manual_seed(0)
    for softcap in (None, 50.0):
        call = Call(q, k, v, bounds, softcap=softcap)
        dropped = Call(q, k, v, bounds, softcap=softcap, dropout=0.5)
        assert {choose(dropped), choose(call)} <= {"causal", "segments", "mask"}
        expected = BACKENDS["segments"](call).mean(0)
        found = BACKENDS["segments"](dropped)
        assert found.std(0).max() > 0.1
        assert distance(found.mean(0), expected) < 0.2
    assert "dropout" in str(refusal("varlen", dropped))
    assert "dropout" in str(refusal("flex", dropped))


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
    from evenstep.tensors import Collator

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


@examples(25)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
    st.sampled_from(
        [(True, None), (True, 1), (True, 130), (True, 300), (False, None), (False, 1), (False, 140)]
    ),
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

    monkeypatch.setattr(segment_attention, "block_mask", build)
    gc.collect()
    before = len(batch_module._boundaries)
    batch = batch_of([5, 3], "packed")
    q, k, v = tensors_for(batch)
    for _ in range(3):
        attention(q, k, v, batch, backend="flex")
    assert len(built) == 1
    attention(q, k, v, batch, backend="flex", window=2)
    assert len(built) == 2
    del batch
    gc.collect()
    assert len(batch_module._boundaries) == before


# Choosing and refusing -----------------------------------------------------------------------


def test_plain_causal_attention_runs_padded_batches_and_masks_run_tiny_ones() -> None:
    def chosen(lengths: list[int], recipe: Recipe, window: int | None = None) -> str:
        batch = batch_of(lengths, recipe)
        q, k, v = tensors_for(batch)
        return choose(Call(q, k, v, Boundaries.of(batch), True, window))

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
    with pytest.raises(ConfigError, match="softcap must be positive"):
        attention(q, k, v, batch, softcap=0.0)
    with pytest.raises(ConfigError, match="window must be at least 1"):
        attention(q, k, v, batch, window=0)


def test_tensors_of_another_shape_are_refused() -> None:
    batch = batch_of([5, 3], "packed")
    q, k, v = tensors_for(batch)
    with pytest.raises(InputError, match=r"k has shape \(1, 2, 7, 8\), .* 1 rows of 8 slots"):
        attention(q, k[:, :, :-1], v, batch)
    with pytest.raises(InputError, match="q has 3 heads, k has 2 and v has 2"):
        attention(q[:, :3], k, v, batch)
    with pytest.raises(InputError, match=r"sinks has shape \(2,\), .* 4 heads of q"):
        attention(q, k, v, batch, sinks=torch.zeros(2))


# varlen on CUDA ------------------------------------------------------------------------------


def test_the_operators_of_flash_attention_take_what_they_are_given() -> None:
    """Their names are private; a torch that changes them must fail here, not on a GPU."""
    forward = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in forward.arguments]
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= set(names[10:])
    backward = torch.ops.aten._flash_attention_backward.default._schema
    names = [argument.name for argument in backward.arguments]
    assert names[:14] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k",
        "max_q", "max_k", "dropout_p", "is_causal", "rng_state", "unused",
    ]  # fmt: skip
    assert {"scale", "window_size_left", "window_size_right"} <= set(names[14:])


def test_windows_are_given_to_flash_attention_as_sides() -> None:
    sides = segment_attention._sides
    assert sides(True, 0) == sides(False, 0) == {}
    assert sides(True, 4) == {"window_size_left": 3, "window_size_right": 0}
    assert sides(False, 4) == {"window_size_left": 3, "window_size_right": 3}


class Kernels:
    """Kernels that are activated as flash attention 3 and 4 are, here for the CPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.library: Any = torch.library.Library("aten", "IMPL")
        for name in ("forward", "backward"):
            self.library.impl(f"_flash_attention_{name}", getattr(self, name), "CPU")

    def remove(self) -> None:
        self.library._destroy()

    def how(self, causal: bool, scale: float, sides: dict[str, Any]) -> tuple[Any, ...]:
        left, right = sides.get("window_size_left"), sides.get("window_size_right")
        assert -1 not in (left, right)  # flash attention 4 takes it as a window
        return causal or right == 0, 0 if left is None else left + 1, scale, 0.0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cu_k: Tensor, longest: int,
        longest_k: int, dropout: float, causal: bool, debug: bool, *, scale: float, **sides: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("forward")
        tiles, how = segment_attention._tiles(cu, cu_k), self.how(causal, scale, sides)
        found = segment_attention._tiles_forward(q, k, v, tiles, *how)
        return *found, *(torch.zeros(2, dtype=torch.uint64) for _ in range(2)), q.new_empty(0)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu: Tensor,
        cu_k: Tensor, longest: int, longest_k: int, dropout: float, causal: bool, state: Tensor,
        unused: Tensor, *, scale: float, **sides: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("backward")
        tiles, how = segment_attention._tiles(cu, cu_k), self.how(causal, scale, sides)
        return segment_attention._tiles_backward(grad, q, k, v, out, lse, tiles, *how)


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch < 2.11"
)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sinks"])
def test_kernels_that_are_activated_in_torch_are_used(
    monkeypatch: pytest.MonkeyPatch, window: int | None, sink: bool
) -> None:
    """Torch's registry and dispatcher are real; only the device is pretended to be CUDA."""
    batch = batch_of([5, 1, 7, 2], "packed static")
    leaves = [x.double().requires_grad_() for x in tensors_for(batch)]
    if sink:
        leaves.append(torch.randn(4, dtype=torch.float64, requires_grad=True))
    q, k, v, *sinks = leaves
    call = Call(q, k, v, Boundaries.of(batch), window=window, sinks=sinks[0] if sinks else None)
    expected = BACKENDS["segments"](call)
    kernels = Kernels()
    registry = torch.nn.attention
    registry.register_flash_attention_impl("ours", register_fn=lambda: kernels)
    registry.activate_flash_attention_impl("ours")
    monkeypatch.setattr(Tensor, "is_cuda", True)
    try:
        half = (x.bfloat16() for x in (q, k, v))
        assert choose(replace(call, **dict(zip("qkv", half, strict=True)))) == "varlen"
        found = BACKENDS["varlen"](call)
        weights = torch.randn_like(q)
        gradients = [
            torch.autograd.grad((out * weights).sum(), leaves) for out in (expected, found)
        ]
    finally:
        monkeypatch.undo()
        registry.restore_flash_attention_impl()
    assert kernels.calls == ["forward", "backward"]
    assert distance(found.detach(), expected.detach()) < 1e-12
    for right, mine in zip(*gradients, strict=True):
        assert distance(mine, right, least=1.0) < 1e-10


def test_the_operator_has_the_right_shapes_and_gradients_when_it_is_traced() -> None:
    q, k, v = (torch.randn(7, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    sinks = torch.randn(4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    how = (4, 4, True, 2, 0.3, 0.0, sinks.requires_grad_())
    torch.library.opcheck(varlen, (*leaves, cu_seqlens, cu_seqlens, *how))


# Segments that see others in front of themselves ---------------------------------------------


@pytest.mark.parametrize("name", ["segments", "varlen", "mask"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None), (False, 4)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_segment_attends_to_the_keys_before_its_own_as_in_one_sequence(
    name: str, causal: bool, window: int | None, softcap: float | None
) -> None:
    """A prefix of 5 tokens and two answers of 70 and 2: each answer sees the prefix."""
    torch.manual_seed(0)
    lengths = (5, 70, 2)
    q, k, v = (torch.randn(1, n, 77, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    queries = offsets(lengths)
    paths = [torch.arange(5), torch.arange(75), torch.cat((torch.arange(5), torch.arange(75, 77)))]
    bounds = Boundaries(1, 77, queries, 70)
    bounds = bounds.seeing(torch.cat(paths), offsets([len(path) for path in paths]), 75)
    call = Call(q, k, v, bounds, causal, window, None, softcap, sinks)
    assert refusal("causal", call) is not None
    # Each path as one sequence, of which the last tokens are the answer.
    parts = []
    for path, length in zip(paths, lengths, strict=True):
        whole = Boundaries(1, len(path), offsets([len(path)]), len(path))
        query, key, value = (x[:, :, path] for x in (q, k, v))
        alone = Call(query, key, value, whole, causal, window, None, softcap, sinks)
        parts.append(BACKENDS["mask"](alone)[:, :, len(path) - length :])
    expected, found = torch.cat(parts, dim=2), BACKENDS[name](call)
    assert distance(found.detach(), expected.detach()) < 1e-12
    weights = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad((out * weights).sum(), (q, k, v, sinks)) for out in (expected, found)
    ]
    for right, mine in zip(*gradients, strict=True):
        assert distance(mine, right, least=1.0) < 1e-10


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
