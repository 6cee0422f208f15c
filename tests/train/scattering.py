"""Steps that scatter gradients at every micro-batch, as the processes of tests run them."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import Collator, cross_entropy
from evenstep.train import Distributed, Runner
from tests.train.failing import _wrap
from tests.train.on_ranks import Samples, decoder
from tests.train.stepping import several
from tests.train.steps import COLLATOR, NORMALIZATIONS, Gradient, gradient_of

SHAPE = DecoderShape(vocab=16, hidden=16, layers=64, heads=2, kv_heads=2, ffn=48)
LENGTHS = [4, 3, 5, 4, 3, 4]  # short: gradients take more memory than activations


def gradients(rank: int, size: int, samples: Samples, wraps: list[str]) -> dict[str, Any]:
    """By wrapper, autocast, normalization, mode and micro-batches: both gradients."""
    names = ("token mean", "sequence mean", "constant")
    losses: dict[str, dict[str, Any]] = {
        name: {"loss": cross_entropy(), "normalization": NORMALIZATIONS[name]} for name in names
    }
    losses["several"] = {"loss": several(names)}
    found = {}
    for wrap, cast, name, count in product(wraps, (False, True), losses, (1, 2, 3)):
        for mode in (None, "deferred"):
            both = [
                gradient(rank, size, samples, wrap, cast, count, reduce_every=each, mode=mode,
                         **losses[name])
                for each in ("step", "micro_batch")
            ]  # fmt: skip
            found[f"{wrap}, autocast {cast}, {name}, mode {mode}, {count} micro-batches"] = both
    return found


def gradient(
    rank: int, size: int, samples: Samples, wrap: str, cast: bool, count: int, **options: Any
) -> Gradient:
    model = _wrap(decoder(torch.float32 if cast else torch.float64), wrap, size)
    layout = Packed(samples=len(samples) // size // count)
    lengths = [len(sample["input_ids"]) for sample in samples]
    plan = make_plan(lengths, Recipe(layout=layout, topology=Topology(dp=size)))
    batches = [COLLATOR(micro, samples) for micro in plan[0, rank]]
    assert len(batches) == count
    runner = Runner(model=model, collective=Distributed(), **options)
    with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
        runner.run(batches)
    return gradient_of(model)


class Accounting(TorchDispatchMode):  # type: ignore[misc]
    """The most bytes of all tensors that operators returned, at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, StorageWeakRef] = {}

    def add(self, values: Any) -> None:
        """Count these tensors, and all others that are alive."""
        for value in tree_leaves(values):
            value = getattr(value, "_local_tensor", value)
            if isinstance(value, Tensor):
                ref = StorageWeakRef(value.untyped_storage())
                self._alive[ref.cdata] = ref
        total = 0
        for key, ref in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        self.peak = max(self.peak, total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result


def peaks(rank: int, size: int) -> tuple[int, dict[str, int]]:
    """(weights, the peak of a step of three micro-batches by `reduce_every`)."""
    found, weights = {}, 0
    for every in ("step", "micro_batch"):
        torch.manual_seed(0)
        model = Decoder(SHAPE)
        weights = sum(parameter.numel() for parameter in model.parameters())
        for module in (*model.blocks, model):
            fully_shard(module)
        plan = make_plan(LENGTHS, Recipe(layout=Packed(samples=1), topology=Topology(dp=size)))
        samples = [{"input_ids": list(range(n))} for n in LENGTHS]
        batches = [Collator()(micro, samples) for micro in plan[0, rank]]
        runner = Runner(
            model=model, loss=cross_entropy(), collective=Distributed(), reduce_every=every
        )
        runner.run(batches)  # gathers are allocated once
        model.zero_grad()
        accounting = Accounting()
        accounting.add(list(model.parameters()))
        with accounting:
            runner.run(batches)
        found[every] = accounting.peak
    return weights, found
