"""The softmax of the head is compiled once for a vocabulary and any number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep.tensors import Head, label_log_probs
from tests.internals import head_module

HIDDEN = 3


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """The sizes of the inputs of each graph that is compiled, also on the CPU."""
    compiled: list[list[Any]] = []

    def backend(graph: Any, _: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values = [node.meta["example_value"] for node in nodes]
        compiled.append(
            [size for each in values if isinstance(each, Tensor) for size in each.shape]
        )
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(head_module, "_COMPILED", {"cpu"})
    monkeypatch.setattr(
        head_module, "_compile", lambda function: torch.compile(function, backend=backend)
    )
    yield compiled
    torch._dynamo.reset()


def run(vocabulary: int, tokens: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=random)
    weight = torch.randn(vocabulary, HIDDEN, dtype=torch.float64, generator=random)
    labels = torch.randint(0, vocabulary, (tokens,), generator=random)
    found, expected = (x.clone().requires_grad_() for x in (hidden, hidden))
    log_probs = label_log_probs(found, labels, head=Head(weight, chunk=10**6))
    log_probs.square().sum().backward()
    label_log_probs(expected @ weight.T, labels).square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-10)


def test_another_vocabulary_is_a_graph_of_its_own_with_a_fixed_size(
    graphs: list[list[Any]],
) -> None:
    for count, vocabulary in enumerate((11, 17, 23), 1):
        for tokens in (130, 150, 171, 200):
            run(vocabulary, tokens)
        assert len(graphs) == 2 * count  # scores, and their gradient
        for sizes in graphs[-2:]:
            assert vocabulary in [size for size in sizes if isinstance(size, int)]
            assert any(not isinstance(size, int) for size in sizes)  # tokens
