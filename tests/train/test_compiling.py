"""Compiled layers: the same gradient, and no new graph for batches of other lengths."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenstep import Packed, PlannedStream, Recipe, Steps
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError
from evenstep.tensors import Collator, cross_entropy
from evenstep.train import Runner, compile_layers
from tests.internals import layers_of

VOCAB, BUDGET = 64, 64
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of dynamo itself


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decoder() -> Any:
    torch.manual_seed(0)
    return Decoder(DecoderShape(vocab=VOCAB, hidden=32, layers=3, heads=2, kv_heads=1, ffn=48))


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    from evenstep.integrations.hf_attention import use_attention

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    use_attention(model)
    return model


def stream_of(steps: int) -> PlannedStream:
    """Steps of 1 to 6 micro-batches of 1 to 20 segments, of which some micro-batches hold one."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 40, 8 * steps)
    lengths[::7] = BUDGET
    samples = [{"input_ids": rng.integers(0, VOCAB, n)} for n in lengths]
    return PlannedStream(samples, Recipe(layout=Packed(max_tokens=BUDGET), steps=Steps(samples=8)))


def check_steps(model: Any, other: Any, steps: int, warm_up: int = 3) -> None:
    """Gradients as those of `other`, which is not compiled; one graph for all after the warm-up."""
    compile_layers(model, backend="aot_eager")
    compiled, eager = (Runner(model=each, loss=cross_entropy()) for each in (model, other))
    graphs = 0
    for number, step in enumerate(stream_of(steps + warm_up)):
        result = compiled.run(step)
        graphs += result.compiled.graphs
        assert not result.compiled.graph_breaks
        if number >= warm_up:
            assert not result.compiled.graphs, result.compiled.failed_guards
            assert "graphs_compiled" not in result.to_dict()
        if number in (0, warm_up):
            eager.run(step)
            for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad, msg=name)
        model.zero_grad()
        other.zero_grad()
    assert 1 <= graphs <= 3  # not one for each layer


def test_a_few_steps_of_the_decoder_use_the_same_graph() -> None:
    check_steps(decoder(), decoder(), 8)


@pytest.mark.slow
@pytest.mark.parametrize("make", [decoder, llama])
def test_fifty_steps_of_other_lengths_use_the_same_graph(make: Any) -> None:
    check_steps(make(), make(), 50)


def test_a_recompilation_is_reported_with_the_guard_that_failed() -> None:
    model = decoder()
    compile_layers(model, backend="aot_eager")
    runner = Runner(model=model, loss=cross_entropy())
    first, second = list(stream_of(2))[:2]
    result = runner.run(first)
    assert result.compiled.graphs >= 1
    assert result.to_dict()["graphs_compiled"] == result.compiled.graphs
    assert "compiled" in repr(result)
    model.double()
    result = runner.run(second)
    assert result.compiled.graphs >= 1
    assert any("dtype" in guard for guard in result.compiled.failed_guards)


def kept_by(model: Any, batch: Any) -> int:
    """Bytes that a forward keeps for its backward, besides parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(batch)
    del outputs
    return sum(kept.values()) - sum(
        kept.get(each.untyped_storage().data_ptr(), 0) for each in model.parameters()
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of that backend itself
def test_compiled_layers_keep_no_norms_and_activations_for_the_backward() -> None:
    backend = "aot_eager_decomp_partition"  # divides the graph as inductor does
    plain, thrifty = decoder(), decoder()
    for layer in layers_of(plain):
        layer.compile(backend=backend, dynamic=True)
    compile_layers(thrifty, backend=backend)
    step = next(iter(stream_of(1)))
    results = [Runner(model=each, loss=cross_entropy()).run(step) for each in (plain, thrifty)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    for one, two in zip(plain.parameters(), thrifty.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    micro, samples = next(iter(step))
    batch = Collator()(micro, samples)
    # Per slot and layer: two norms of 32 numbers and a product of 48 are not kept.
    less = 3 * batch.tokens.numel() * 4 * (2 * 32 + 48)
    assert kept_by(thrifty, batch) <= kept_by(plain, batch) - less


def test_layers_are_those_of_the_longest_outer_list() -> None:
    experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    layers = nn.ModuleList([nn.ModuleDict({"experts": experts}), nn.ReLU()])
    assert layers_of(nn.Sequential(nn.ReLU(), nn.ModuleDict({"layers": layers}))) == list(layers)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no list of layers"):
        compile_layers(nn.Linear(2, 2))
