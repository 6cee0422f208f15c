"""Rollout batches and their plans, pickled and copied."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.train import RolloutBatch, RolloutPlan
from tests.internals import array_of, tensor_of
from tests.train.rollouts import make_rollouts, recipe_of

DTYPES = [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_kind_shape_and_order_return_from_arrays(dtype: torch.dtype) -> None:
    square = torch.arange(12).view(3, 4).to(dtype)
    one = torch.ones((1, 3), dtype=torch.int8).to(dtype)
    several = [square, square.T, square[:, 1:3], square[:0], square[:, :0], one.T, one[0]]
    if dtype.is_floating_point:
        several.append(square.clone().requires_grad_())
    for tensor in several:
        found = tensor_of(array_of(tensor))
        assert found.dtype == dtype
        assert found.shape == tensor.shape
        assert found.tolist() == tensor.tolist()


@dataclass(frozen=True, kw_only=True)
class TaggedPlan(RolloutPlan):
    tag: str


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", [np.int64, np.int32, ">i8"])
def test_the_copy_of_a_plan_of_rollouts_is_read_only_and_its_own(protocol: int, dtype: Any) -> None:
    batch = make_rollouts([7, 0, 6], "left", seed=0).batch
    plan = batch.plan(recipe_of("packed", dp=2), epochs=2)
    plan = replace(plan, lengths=plan.lengths.astype(dtype))
    tagged = TaggedPlan(**{each.name: getattr(plan, each.name) for each in fields(plan)}, tag="a")
    assert pickle.loads(pickle.dumps(tagged, protocol)).tag == "a"
    for found in (pickle.loads(pickle.dumps(plan, protocol)), copy.deepcopy(plan)):
        assert found.epochs == plan.epochs
        assert found.lengths.tolist() == [7, 0, 6]
        assert (found.width, found.digest) == (plan.width, plan.digest)
        assert not found.lengths.flags.writeable
        found.check(batch)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(plan, 5, buffer_callback=buffers.append)
    assert not buffers, "a reader of the plan shares no memory with the writer"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pickled_batch_is_the_same_batch_and_its_tensors_are_not_copied(
    dtype: torch.dtype,
) -> None:
    values = torch.arange(12).view(2, 3, 2).to(dtype)
    ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
    batch = RolloutBatch(
        {"input_ids": ids, "values": values}, lengths=[2, 1], padding_side="right", groups=[4, 4]
    )
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    tensors = (ids, values)
    sizes = [buffer.raw().nbytes for buffer in buffers]
    assert {t.nbytes for t in tensors} <= set(sizes)
    read_only = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    for found in (pickle.loads(sent, buffers=read_only), copy.deepcopy(batch), copy.copy(batch)):
        assert torch.equal(found.tensors["input_ids"], ids)
        assert torch.equal(found.tensors["values"], values)
        assert found.tensors["values"].dtype == dtype
        assert found.groups is not None
        assert found.groups.tolist() == [4, 4]
        assert repr(found) == repr(batch)
        assert torch.equal(found.select([1]).tensors["values"], values[1:])
