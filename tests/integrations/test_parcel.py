"""A step goes to another process in one piece, whatever it holds, and arrives as it was."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenstep import MicroBatch, Packed, Recipe
from evenstep.core.step import Step
from evenstep.data.memory import InMemory
from evenstep.data.planned import PlannedStream
from evenstep.integrations.dataloader import StreamLoader
from evenstep.tensors.collate import Collator

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def stream_of(samples: int) -> PlannedStream:
    """One step of as many micro-batches as samples."""
    source = InMemory([{"input_ids": np.arange(3) + i} for i in range(samples)])
    return PlannedStream(source, Recipe(layout=Packed(max_tokens=3)), shuffle=False)


def step_with(*batches: Any) -> Step:
    step = next(iter(stream_of(1)))
    return Step(
        number=step.number,
        epoch=step.epoch,
        micro_batches=step.micro_batches,
        samples={},
        cursor=step.cursor,
        batches=batches,
    )


def sent(step: Step) -> Step:
    """As a queue of torch's would carry it, here to the same process."""
    arrived = ForkingPickler.loads(ForkingPickler.dumps(step))
    assert isinstance(arrived, Step)
    return arrived


@contextmanager
def few_files(most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_step_of_many_micro_batches_needs_few_files(context: str) -> None:
    loader = StreamLoader(
        stream_of(300), collate=Collator(), num_workers=1, multiprocessing_context=context
    )
    with few_files(256):
        (step,) = list(loader)
    (alone,) = [step.collated(Collator()) for step in stream_of(300)]
    assert step.batches is not None
    assert alone.batches is not None
    assert len(step) == 300
    for got, wanted in zip(step.batches, alone.batches, strict=True):
        for name in ("tokens", "labels", "loss_weights", "cu_seqlens", "position_ids"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name


def test_samples_that_hold_tensors_need_few_files_too() -> None:
    source = InMemory([{"input_ids": torch.arange(3) + i} for i in range(300)])
    stream = PlannedStream(source, Recipe(layout=Packed(max_tokens=3)), shuffle=False)
    with few_files(256):
        (step,) = list(StreamLoader(stream, num_workers=1))
    assert [int(step.samples[i]["input_ids"][2]) for i in range(300)] == list(range(2, 302))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.arange(3, dtype=torch.uint8),
        torch.randn(2, 3, dtype=torch.float64),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor([1 + 2j, 3 - 1j]),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([1.0]).expand(1000),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_any_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    (got,) = sent(step_with({"x": tensor})).batches or ()
    assert got["x"].dtype == tensor.dtype
    assert got["x"].shape == tensor.shape
    assert torch.equal(got["x"], tensor)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_what_is_no_plain_tensor_keeps_its_kind() -> None:
    leaf, sparse = torch.ones(2, requires_grad=True), torch.eye(3).to_sparse()
    parameter, array = nn.Parameter(torch.ones(2)), np.arange(3)
    (got,) = sent(step_with((leaf, sparse, parameter, array, "text", None))).batches or ()
    assert got[0].requires_grad
    assert got[1].is_sparse
    assert isinstance(got[2], nn.Parameter)
    assert np.array_equal(got[3], array)
    assert got[4:] == ("text", None)


def test_one_tensor_at_two_places_stays_one() -> None:
    tensor = torch.arange(4)
    (first, second) = sent(step_with({"a": tensor, "b": tensor}, [tensor])).batches or ()
    assert first["a"] is first["b"] is second[0]
    first["a"][0] = 9
    assert int(second[0][0]) == 9


def test_tensors_do_not_reach_into_each_other() -> None:
    given = [torch.full((n,), n, dtype=torch.int16) for n in range(1, 40)]
    (got,) = sent(step_with(given)).batches or ()
    for tensor in got:
        tensor += 1
    assert all(torch.equal(tensor, wanted + 1) for tensor, wanted in zip(got, given, strict=True))


def test_everything_else_of_a_step_arrives() -> None:
    step = next(iter(stream_of(4))).loaded()
    got = sent(step)
    assert (got.number, got.epoch, got.totals, got.lost, got.budget) == (
        step.number, step.epoch, step.totals, step.lost, step.budget,
    )  # fmt: skip
    assert got.cursor.to_dict() == step.cursor.to_dict()
    assert len(got) == 4
    assert np.array_equal(got.samples[3]["input_ids"], step.samples[3]["input_ids"])


def test_what_cannot_be_sent_is_told() -> None:
    def collate(micro: MicroBatch, samples: Mapping[int, Any]) -> Any:
        return lambda: micro

    with pytest.raises(Exception, match="local object"):
        sent(step_with(collate(next(iter(stream_of(1))).micro_batches[0], {})))
