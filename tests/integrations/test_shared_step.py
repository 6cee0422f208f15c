"""A step is sent to another process in one block of memory, and arrives unchanged."""

from __future__ import annotations

import io
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from evenstep import MicroBatch, Packed, PlannedStream, Recipe, Step, Steps
from evenstep.data import InMemory
from evenstep.integrations.dataloader import StreamDataset, StreamLoader
from evenstep.tensors import Collator
from tests.internals import SharedStep, _is_plain

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def stream_of(samples: int) -> PlannedStream:
    """One step with a micro-batch per sample."""
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
    """Send a step as a queue of torch does, but to the same process."""
    arrived = ForkingPickler.loads(ForkingPickler.dumps(SharedStep(step)))
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


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
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


def test_samples_that_hold_tensors_need_few_files() -> None:
    source = InMemory([{"input_ids": torch.arange(3) + i} for i in range(300)])
    stream = PlannedStream(source, Recipe(layout=Packed(max_tokens=3)), shuffle=False)
    with few_files(256):
        (step,) = list(StreamLoader(stream, num_workers=1))
    assert [int(step.samples[i]["input_ids"][2]) for i in range(300)] == list(range(2, 302))


def test_a_plain_data_loader_sends_steps_in_shared_memory() -> None:
    dataset = StreamDataset(stream_of(300), Collator())
    with few_files(256):
        (step,) = list(DataLoader(dataset, batch_size=None, num_workers=1))
    assert len(step.batches) == 300


def test_pickling_of_steps_is_not_changed_in_the_main_process() -> None:
    code = """
from multiprocessing.reduction import ForkingPickler

from evenstep import Packed, PlannedStream, Recipe, Step
from evenstep.data import InMemory
from tests.internals import register_shared_steps
from evenstep.integrations.dataloader import StreamDataset, StreamLoader

source = InMemory([{"input_ids": [1, 2, 3]}])
stream = PlannedStream(source, Recipe(layout=Packed(max_tokens=3)))
assert len(list(StreamDataset(stream))) == 1
assert len(list(StreamLoader(stream, num_workers=1))) == 1
assert Step not in ForkingPickler._extra_reducers
register_shared_steps()
assert Step in ForkingPickler._extra_reducers
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=600, cwd=Path(__file__).parents[2]
    )


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
def test_any_tensor_arrives_unchanged(tensor: torch.Tensor) -> None:
    (got,) = sent(step_with({"x": tensor})).batches or ()
    assert got["x"].dtype == tensor.dtype
    assert got["x"].shape == tensor.shape
    assert torch.equal(got["x"], tensor)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_other_objects_keep_their_type() -> None:
    leaf, sparse = torch.ones(2, requires_grad=True), torch.eye(3).to_sparse()
    parameter, array = nn.Parameter(torch.ones(2)), np.arange(3)
    (got,) = sent(step_with((leaf, sparse, parameter, array, "text", None))).batches or ()
    assert got[0].requires_grad
    assert got[1].is_sparse
    assert isinstance(got[2], nn.Parameter)
    assert np.array_equal(got[3], array)
    assert got[4:] == ("text", None)


def test_a_shared_tensor_stays_shared() -> None:
    tensor = torch.arange(4)
    (first, second) = sent(step_with({"a": tensor, "b": tensor}, [tensor])).batches or ()
    assert first["a"] is first["b"] is second[0]
    first["a"][0] = 9
    assert int(second[0][0]) == 9


def test_tensors_do_not_overlap() -> None:
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


class Unsendable:
    """Collates each sample to its id, and one of them to a lambda, which cannot be pickled."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __call__(self, micro: MicroBatch, samples: Mapping[int, Any]) -> Any:
        (sample_id,) = samples
        return (lambda: sample_id) if sample_id == self.bad else sample_id


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_step_that_cannot_be_sent_raises(bad: int, workers: int) -> None:
    source = InMemory([{"input_ids": np.arange(3)} for _ in range(8)])
    recipe = Recipe(layout=Packed(max_tokens=3), steps=Steps(samples=1))
    stream = PlannedStream(source, recipe, shuffle=False)
    seen: list[int] = []
    steps = iter(StreamLoader(stream, collate=Unsendable(bad), num_workers=workers))
    with pytest.raises(Exception, match="pickle"):
        seen.extend(sample_id for step in steps for sample_id in step.batches or ())
    assert seen == list(range(bad))


def test_pickling_a_received_tensor_does_not_pickle_the_whole_step() -> None:
    (step,) = list(StreamLoader(stream_of(100), collate=Collator(), num_workers=1))
    (alone,) = [step.collated(Collator()) for step in stream_of(100)]
    assert len(pickle.dumps(step)) < 1.5 * len(pickle.dumps(alone))
    assert step.batches is not None
    file = io.BytesIO()
    torch.save(step.batches[0].cu_seqlens, file)
    assert len(file.getvalue()) < 4000


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_special_tensors_are_left_to_torch() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert not _is_plain(nested)
    assert not _is_plain(torch.empty(4, dtype=torch.uint8).view(torch.uint4))
    (got,) = sent(step_with(nested)).batches or ()
    assert [row.tolist() for row in got.unbind()] == [[1, 1], [1, 1, 1]]


def test_slices_are_copied_and_other_tensors_keep_their_strides() -> None:
    wide = torch.arange(12).view(3, 4)
    assert _is_plain(wide[:, 1:])
    assert not _is_plain(wide.t())
    assert not _is_plain(wide[:1].expand(5, 4))
    (got,) = sent(step_with((wide[:, 1:], wide.t()))).batches or ()
    assert torch.equal(got[0], wide[:, 1:])
    assert got[1].stride() == wide.t().stride()


def test_the_default_device_has_no_effect() -> None:
    step = step_with(torch.arange(3))
    with torch.device("meta"):
        (got,) = sent(step).batches or ()
        steps = list(StreamLoader(stream_of(2), num_workers=1))
    assert got.tolist() == [0, 1, 2]
    assert len(steps) == 1
