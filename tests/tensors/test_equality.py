"""Logits, loss and gradients in every layout equal those of one sample at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Packed, Recipe, Topology
from evenstep.demo import Decoder, DecoderShape
from evenstep.integrations.huggingface import hf_kwargs
from evenstep.tensors import Batch, attention, join_context, shard_context
from tests.examples import examples
from tests.integrations.models import llama, qwen
from tests.internals import rotate, rotation
from tests.tensors.batches import RECIPES, VOCAB, batches_of, by_sample, distance, samples_of

torch.set_num_threads(1)

TOLERANCE = 1e-5
LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=7)


class Run(NamedTuple):
    logits: dict[int, Tensor]
    loss: float
    gradients: dict[str, Tensor]


def run(model: nn.Module, forward: Callable[[Batch], Tensor], batches: list[Batch]) -> Run:
    """The loss is the sum over labels of all micro-batches, over their number."""
    labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    model.zero_grad()
    logits, loss = {}, 0.0
    for batch in batches:
        out = forward(batch)
        part = nn.functional.cross_entropy(
            out.flatten(0, 1), batch.labels.flatten(), reduction="sum"
        ) / max(labels, 1)
        part.backward()
        loss += float(part.detach())
        logits.update(by_sample(batch, out.detach()))
    return Run(logits, loss, gradients_of(model))


def alone(
    model: nn.Module, forward: Callable[[Tensor], Tensor], samples: list[dict[str, Tensor]]
) -> Run:
    """Every sample alone, using only the model."""
    labels = sum(len(sample["input_ids"]) - 1 for sample in samples)
    model.zero_grad()
    logits, loss = {}, 0.0
    for number, sample in enumerate(samples):
        out = forward(sample["input_ids"])
        part = nn.functional.cross_entropy(
            out[:-1], sample["input_ids"][1:], reduction="sum"
        ) / max(labels, 1)
        part.backward()
        loss += float(part.detach())
        logits[number] = out.detach()
    return Run(logits, loss, gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def check(found: Run, expected: Run) -> None:
    assert found.logits.keys() == expected.logits.keys()
    for number, logits in expected.logits.items():
        assert distance(found.logits[number], logits) < TOLERANCE
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    # A gradient that is zero but for rounding is compared with the others of the model.
    least = 0.01 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert distance(found.gradients[name], gradient, max(least, 1e-30)) < TOLERANCE, name


@pytest.mark.parametrize("window", [None, 4])
@examples(60)
@given(LENGTHS, st.integers(0, 99))
def test_our_decoder_gives_the_same_in_every_layout(
    window: int | None, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = Decoder(DecoderShape(vocab=VOCAB, hidden=32, ffn=48, window=window))
    samples = samples_of(lengths, seed)
    expected = run(model, model, batches_of(samples, RECIPES["one by one"]))
    for name, recipe in RECIPES.items():
        if name != "one by one":
            check(run(model, model, batches_of(samples, recipe)), expected)


@pytest.mark.parametrize("backend", ["segments", "mask"])
def test_every_backend_gives_the_decoder_the_same(backend: str) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderShape(vocab=VOCAB))
    samples = samples_of([1, 7, 24, 1, 13])
    expected = run(model, model, batches_of(samples, RECIPES["one by one"]))
    named = Decoder(model.shape, backend)
    named.load_state_dict(model.state_dict())
    check(run(named, named, batches_of(samples, RECIPES["packed"])), expected)


def forward_in_parts(model: Decoder, batch: Batch, size: int) -> Tensor:
    """The decoder on context-parallel ranks, all in this process: each holds its chunks alone,
    and only queries, keys and values meet."""
    shards = [shard_context(batch, rank, size) for rank in range(size)]
    states = [model.embed(shard.tokens) for shard in shards]
    for block in model.blocks:
        own = block.attention
        projected: list[list[Tensor]] = [[], [], []]
        for x, shard in zip(states, shards, strict=True):
            turn = rotation(shard.position_ids, model.shape)
            for at, part in enumerate((own.query, own.key, own.value)):
                heads = part(block.attention_norm(x)).unflatten(2, (-1, model.shape.dim))
                if at < 2:
                    heads = rotate(heads.transpose(1, 2), turn).transpose(1, 2)
                projected[at].append(heads)
        q, k, v = (join_context(parts, batch.cu_seqlens).transpose(1, 2) for parts in projected)
        mixed = attention(q, k, v, batch, window=model.shape.window).transpose(1, 2).flatten(2)
        states = [x + own.out(s.take(mixed)) for x, s in zip(states, shards, strict=True)]
        states = [x + block.ffn(block.ffn_norm(x)) for x in states]
    parts = [model.head(model.norm(x)) for x in states]
    logits = join_context(parts, batch.cu_seqlens)
    labels = join_context([shard.labels for shard in shards], batch.cu_seqlens)
    assert (labels == batch.labels).all()
    return logits


@pytest.mark.parametrize("size", [2, 4])
@examples(15)
@given(LENGTHS, st.integers(0, 99))
def test_our_decoder_gives_the_same_on_context_parallel_ranks(
    size: int, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = Decoder(DecoderShape(vocab=VOCAB, hidden=32, ffn=48))
    samples = samples_of(lengths, seed)
    expected = run(model, model, batches_of(samples, RECIPES["one by one"]))
    recipe = Recipe(layout=Packed(max_tokens=64), topology=Topology(cp=size))
    batches = batches_of(samples, recipe)
    check(run(model, lambda batch: forward_in_parts(model, batch, size), batches), expected)


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@examples(20)
@given(LENGTHS, st.integers(0, 99))
def test_a_hugging_face_model_gives_the_same_in_every_layout(
    make: Any, implementation: str, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model = make(implementation)
    samples = samples_of(lengths, seed)
    expected = alone(model, lambda ids: model(input_ids=ids[None]).logits[0], samples)
    for recipe in RECIPES.values():
        found = run(model, lambda b: model(**hf_kwargs(b)).logits, batches_of(samples, recipe))
        check(found, expected)


def test_the_loss_of_the_hugging_face_model_itself_is_that_of_our_labels() -> None:
    model = llama("sdpa")
    samples = samples_of([5, 1, 9, 4])
    for name, recipe in RECIPES.items():
        for batch in batches_of(samples, recipe):
            out = model(**hf_kwargs(batch, model, labels=True))
            ours = nn.functional.cross_entropy(
                out.logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"
            )
            assert torch.isclose(out.loss, ours, rtol=TOLERANCE), name
