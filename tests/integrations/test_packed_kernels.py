"""Kernels that begin anew at every segment, and which mixers run with them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from evenstep.integrations.huggingface import hf_forward, register_mixer, supports_packing
from tests.integrations.hybrids import (
    alone,
    errors,
    hybrid,
    packed,
    rounding,
    samples_of,
    together,
)
from tests.internals import mixers, packed_kernels
from tests.slow.measure import error_of, summed

torch.set_num_threads(1)

CPU = torch.device("cpu")
LENGTHS = (5, 70, 12, 1, 9)
sizes = st.lists(
    st.sampled_from([1, 2, 30, 63, 64, 65, 127, 128, 129, 200]), min_size=1, max_size=6
)


def begins_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:k]) for k in range(len(lengths))]


def recurrence(tensors: list[Tensor], normalized: bool) -> Tensor:
    """The gated delta rule of one segment, token after token."""
    query, key, value, decay, beta = tensors
    if normalized:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = query.new_zeros((query.shape[1], key.shape[-1], value.shape[-1]))
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        change = (v - (k[:, None] @ state)[:, 0]) * b[:, None]
        state = state + k[:, :, None] * change[:, None]
        outputs.append((q[:, None] @ state)[:, 0])
    return torch.stack(outputs)


def drawn(tokens: int, seed: int, decay: float) -> list[Tensor]:
    """Queries, keys, values, decays and betas of two rows, of which the last slots are padding."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, 2, *shape, generator=random)

    decays = -nn.functional.softplus(normal() + decay)
    return [normal(8), normal(8), normal(12), decays, normal().sigmoid()]


@settings(max_examples=25, deadline=None)
@given(
    sizes,
    st.integers(0, 20),
    st.integers(0, 99),
    st.sampled_from([0.0, -5.0]),
    st.booleans(),
    st.sampled_from([1, 8192]),
    st.sampled_from([(torch.float32, 4e-6), (torch.float64, 1e-12)]),
)
def test_the_delta_rule_is_that_of_each_segment(
    lengths: list[int], tail: int, seed: int, decay: float, normalized: bool, at_once: int,
    precision: tuple[torch.dtype, float],
) -> None:  # fmt: skip
    tokens, begins = sum(lengths) + tail, begins_of(lengths)
    dtype, limit = precision
    tensors = [each.to(dtype).requires_grad_() for each in drawn(tokens, seed, decay)]
    chunks = packed_kernels.chunks_of(begins, lengths, tokens, CPU)
    if not normalized:  # longer keys would let the state grow without bound
        tensors[1] = (tensors[1] * 0.2).detach().requires_grad_()
    weights = torch.randn(1, tokens, 2, 12, generator=torch.Generator().manual_seed(seed))

    with mock.patch.object(packed_kernels, "AT_ONCE", at_once):
        query, key, value, decays, beta = tensors
        result = packed_kernels.delta_rule(query, key, value, decays, beta, chunks, normalized)
        gradients = torch.autograd.grad((result * weights).sum(), tensors)

    doubles = [each.detach().double().requires_grad_() for each in tensors]
    parts = [
        recurrence([each[0, b : b + n] for each in doubles], normalized)
        for b, n in zip(begins, lengths, strict=True)
    ]
    expected = torch.cat((*parts, result.new_zeros((tail, 2, 12), dtype=torch.float64)))
    wanted = torch.autograd.grad((expected * weights[0]).sum(), doubles)
    for one, other in zip((result, *gradients), (expected[None], *wanted), strict=True):
        off = float((one - other).detach().abs().max())
        assert off <= limit * max(1.0, float(other.detach().abs().max()))


@contextmanager
def doubled() -> Iterator[None]:
    """Double precision where transformers asks for single precision, in backwards as well."""

    def wider(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            return function(*args, **kwargs)

        return run

    with (
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.object(Tensor, "to", wider(Tensor.to)),
        mock.patch.object(nn.functional, "softmax", wider(nn.functional.softmax)),
    ):
        yield


DELTA_RULES = ("qwen3_next", "qwen3_5_text", "olmo_hybrid")


@pytest.mark.parametrize("name", DELTA_RULES)
@pytest.mark.parametrize("at_once", [1, 8192])
def test_models_are_exact_in_double_precision(name: str, at_once: int) -> None:
    model = hybrid(name)
    assert modes_of(model) == {"kernels"}
    few, many = samples_of((1, 63, 64, 65, 130)), samples_of([1 + k * k % 11 for k in range(40)])
    with mock.patch.object(packed_kernels, "AT_ONCE", at_once), doubled():
        assert errors(model, few, packed(few, 5)) <= 1e-12
        assert errors(model, many, packed(many)) <= 1e-12


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(target_modules=["in_proj_qkvz", "out_proj"], init_lora_weights=False)
    return get_peft_model(model, adapter).double()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("wrapped", [None, adapted, DistributedDataParallel])
def test_wrapped_models_are_exact_in_double_precision(
    wrapped: Callable[[Any], Any] | None, reentrant: bool | None
) -> None:
    model = hybrid("qwen3_next").train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    model = model if wrapped is None else wrapped(model)
    samples = samples_of((1, 64, 65, 30))
    with mock.patch.object(packed_kernels, "AT_ONCE", 1), doubled():
        assert errors(model, samples, packed(samples, 5)) <= 1e-12


@pytest.mark.parametrize("name", DELTA_RULES)
def test_autocast_rounds_packed_segments_no_more_than_samples_alone(name: str) -> None:
    model, samples = hybrid(name).float(), samples_of((1, 63, 64, 65, 130))
    expected = alone(model, samples)
    with torch.autocast("cpu", torch.bfloat16):
        assert modes_of(model) == {"kernels"}
        ours, theirs = together(model, packed(samples, 5)), alone(model, samples)
    assert error_of(ours, expected) <= 2 * error_of(theirs, expected)


@given(st.integers(1, 9000), st.integers(1, 64))
def test_parts_of_heads_are_even_within_the_bound_on_memory(chunks: int, heads: int) -> None:
    slots = mock.Mock(slots=torch.empty(chunks, 0))
    parts = packed_kernels._parts_of_heads(slots, torch.empty(1, 1, heads))
    sizes = [tensor.shape[2] for (tensor,) in parts]
    assert sum(sizes) == heads
    assert max(sizes) * chunks <= max(packed_kernels.AT_ONCE, chunks)
    assert len(sizes) <= -(-heads // max(1, packed_kernels.AT_ONCE // chunks))


def test_the_delta_rule_does_not_depend_on_the_default_precision() -> None:
    tensors, chunks = drawn(70, 0, 0.0), packed_kernels.chunks_of([0, 5], [5, 65], 70, CPU)
    query, key, value, decays, beta = tensors
    expected = packed_kernels.delta_rule(query, key, value, decays, beta, chunks, True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        result = packed_kernels.delta_rule(query, key, value, decays, beta, chunks, True)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(result, expected)


def test_what_is_not_finite_stays_in_its_segment() -> None:
    lengths = [3, 70, 5]
    tensors = [each.requires_grad_() for each in drawn(78, 0, 0.0)]
    query, key, value, decays, beta = (each.clone() for each in tensors)
    key[:, 0] = torch.nan
    chunks = packed_kernels.chunks_of(begins_of(lengths), lengths, 78, CPU)

    result = packed_kernels.delta_rule(query, key, value, decays, beta, chunks, True)
    gradients = torch.autograd.grad(result[:, 3:].sum(), (query, key, value, decays, beta))

    assert bool(result[:, :3].isnan().any())
    assert all(bool(each[:, 3:].isfinite().all()) for each in (result, *gradients))


@given(sizes, st.integers(0, 9), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_convolution_is_that_of_each_segment(
    lengths: list[int], tail: int, width: int, seed: int
) -> None:
    tokens, begins = sum(lengths) + tail, begins_of(lengths)
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(1, 3, tokens, generator=random, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(3, 1, width, generator=random, dtype=torch.float64, requires_grad=True)

    def run(values: Tensor) -> Tensor:
        padded = nn.functional.pad(values, (width - 1, 0))
        return nn.functional.conv1d(padded, kernel, groups=3)

    places = packed_kernels.spaced(begins, lengths, tokens, width - 1)
    result = packed_kernels.convolve(run, inputs, places, int(places[-1]) + 1)
    result = result[:, :, : tokens - tail]
    pairs = zip(begins, lengths, strict=True)
    expected = torch.cat([run(inputs[:, :, b : b + n]) for b, n in pairs], -1)

    assert torch.allclose(result, expected)
    weights = torch.randn(result.shape, generator=random, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((each * weights).sum(), (inputs, kernel)) for each in (result, expected)
    )
    assert torch.allclose(ours[0], theirs[0])
    assert torch.allclose(ours[1], theirs[1])


# Which mixers run packed --------------------------------------------------------------------------


def modes_of(model: Any) -> set[str]:
    assert supports_packing(model).safe
    return {module._evenstep_mixer.mode for module in mixers.mixers_of(model).values()}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("qwen3_next", "kernels"),
        ("lfm2", "kernels"),
        ("falcon_h1", "rows"),
        ("kimi_linear", "rows"),
    ],
)
def test_a_mixer_runs_packed_where_all_its_kernels_can(name: str, mode: str) -> None:
    assert modes_of(hybrid(name)) == {mode}


def test_a_registered_class_stays_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_REGISTERED", {})
    register_mixer("Lfm2ShortConv")
    assert modes_of(hybrid("lfm2")) == {"rows"}


def fast_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None,
    seq_idx: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """A causal convolution as fast kernels compute it: boundaries are a keyword argument."""
    result = torch.zeros_like(hidden_states)
    for back in range(weight.shape[-1]):
        moved = nn.functional.pad(hidden_states, (back, 0))[..., : hidden_states.shape[-1]]
        if seq_idx is not None:
            before = nn.functional.pad(seq_idx, (back, 0), value=-1)[:, : seq_idx.shape[1]]
            moved = moved * (before == seq_idx)[:, None]
        result = result + moved * weight[:, -1 - back, None]
    return result


class Wrong(torch.autograd.Function):  # type: ignore[misc]
    """Right forwards, wrong or failing backwards."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.raises:
            raise RuntimeError("this backward is wrong on this device")
        return gradient.roll(1, -1), None


def leaking(*args: Any, seq_idx: Any = None, **kwargs: Any) -> Tensor:
    return fast_convolution(*args, **kwargs)


def with_backward(raises: bool) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = Wrong.apply(fast_convolution(*args, **kwargs), raises)
        return result

    return run


@pytest.mark.parametrize(
    ("kernel", "mode"),
    [
        (fast_convolution, "keywords"),
        (leaking, "kernels"),
        (with_backward(raises=True), "rows"),
        (with_backward(raises=False), "rows"),
    ],
)
def test_fast_kernels_get_boundaries_if_outputs_and_gradients_are_exact(
    kernel: Callable[..., Tensor], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = hybrid("lfm2"), samples_of(LENGTHS)
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", kernel)
    if mode == "rows":  # whatever keeps segments apart, the gradient is wrong or none
        assert "keywords" not in modes_of(model)
        return
    seen: list[Any] = []
    monkeypatch.setattr(
        modeling_lfm2, "causal_conv1d_fn", _recorded(modeling_lfm2.causal_conv1d_fn, seen)
    )
    assert modes_of(model) == {mode}
    seen.clear()
    assert errors(model, samples, packed(samples, 3)) <= 1e-12
    given = [kwargs for kwargs in seen if "seq_idx" in kwargs]
    assert bool(given) == (mode == "keywords")
    for kwargs in given:  # always both
        assert kwargs["cu_seq_lens_q"].tolist() == [0, 5, 75, 87, 88, 97, 100]
        assert kwargs["seq_idx"].unique_consecutive().tolist() == [0, 1, 2, 3, 4, 5]


def leaking_at_ends(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The last token of a segment sees the first of the row."""
    result, seq_idx = fast_convolution(hidden_states, *args, **kwargs), kwargs.get("seq_idx")
    if seq_idx is None:
        return result
    last = nn.functional.pad(seq_idx.diff() != 0, (0, 1)) & (seq_idx > 0)
    return result + last[:, None] * hidden_states[..., :1]


def leaking_in_wide_rows(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Behind the first chunks, where the state of kernels is carried on."""
    wide = hidden_states.shape[-1] > 600  # small forwards of LFM2 have 530 or 910 slots
    return (leaking_at_ends if wide else fast_convolution)(hidden_states, *args, **kwargs)


@pytest.mark.parametrize("kernel", [leaking, leaking_at_ends, leaking_in_wide_rows])
def test_a_leak_of_few_tokens_is_seen_in_half_precision(
    kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", kernel)
    assert modes_of(hybrid("lfm2").bfloat16()) == {"kernels"}
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", fast_convolution)
    assert modes_of(hybrid("lfm2").bfloat16()) == {"keywords"}


def _recorded(kernel: Callable[..., Tensor], seen: list[Any]) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return kernel(*args, **kwargs)

    return run


def unpacked(model: Any) -> list[Tensor]:
    """Outputs of a sample alone, of one with a cache, of padded rows, and generated tokens."""
    tokens = torch.stack([each["input_ids"] for each in samples_of((70, 70))])
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    with torch.no_grad():
        return [
            model(input_ids=tokens[:1]).logits,
            model(input_ids=tokens[:1], use_cache=True).logits,
            model(input_ids=tokens, attention_mask=mask).logits,
            model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False),
        ]


@pytest.fixture
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of transformers, as if no model had been packed."""
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        kernel = getattr(modeling_qwen3_next, name)
        monkeypatch.setattr(modeling_qwen3_next, name, getattr(kernel, "__wrapped__", kernel))


@pytest.mark.usefixtures("fresh_kernels")
def test_padded_rows_samples_alone_and_other_models_run_as_they_are() -> None:
    model, other = hybrid("qwen3_next"), hybrid("qwen3_next")
    expected = unpacked(other)
    samples = samples_of(LENGTHS)
    assert modes_of(model) == {"kernels"}
    together(model, packed(samples))
    assert hasattr(modeling_qwen3_next.torch_chunk_gated_delta_rule, "_evenstep_kernel")
    for each in (model, other):
        assert all(map(torch.equal, unpacked(each), expected))
    mixers.release(model)
    assert all(map(torch.equal, unpacked(model), expected))


def test_models_of_one_family_run_in_different_modes_side_by_side() -> None:
    """In threads of their own, on rows, with kernels and without boundaries."""
    by_kernels, by_rows, plain = (hybrid("qwen3_next") for _ in range(3))
    samples = [samples_of(LENGTHS), samples_of((64, 3, 1, 20), seed=1)]
    assert modes_of(by_kernels) == modes_of(by_rows) == {"kernels"}
    for module in mixers.mixers_of(by_rows).values():
        module._evenstep_mixer.mode = "rows"
    jobs: list[Callable[[], Any]] = [
        lambda: together(by_kernels, packed(samples[0], 3)),
        lambda: together(by_rows, packed(samples[1])),
        lambda: dict(enumerate(unpacked(plain))),
    ]
    expected = [job() for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as threads:
        for _ in range(3):
            running = [threads.submit(job) for job in jobs]
            for future, values in zip(running, expected, strict=True):
                result = future.result()
                assert all(torch.equal(result[name], value) for name, value in values.items())


def test_a_pickled_model_runs_with_its_own_weights() -> None:
    model = hybrid("qwen3_next")
    assert modes_of(model) == {"kernels"}
    twin = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    samples = samples_of(LENGTHS)

    assert errors(twin, samples, packed(samples)) <= max(2e-6, 4 * rounding(twin, samples))
    assert {type(each).__name__ for each in mixers.mixers_of(twin).values()} == {
        "Qwen3NextGatedDeltaNet"
    }


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_other_lengths_compile_nothing_and_only_mixers_break_graphs(name: str) -> None:
    model = hybrid(name)
    assert supports_packing(model).safe
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count)
    forward = hf_forward(compiled)

    def run(*lengths: int) -> int:
        before, batch = len(graphs), packed(samples_of(lengths))
        summed(forward(compiled, batch), batch.labels).backward()
        return len(graphs) - before

    first: list[list[int]] = [[70, 3, 40], [5, 100, 8], [1, 1, 60, 51], [30, 70]]
    later: list[list[int]] = [[64, 49], [10] * 12, [1, 120], [3, 3, 3, 90], [33] * 4]
    for lengths in first:  # the last is narrower
        run(*lengths)
    assert graphs
    for lengths in later:
        assert run(*lengths) == 0
    assert all("_forward_on_rows" in reason for reason in counters["graph_break"])
