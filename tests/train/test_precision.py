"""Gradients in mixed precision, per parameter, whatever wraps the model and wherever autocast is.

All cases of a test run in one group of four processes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError
from evenstep.tensors import Batch, cross_entropy
from evenstep.train import Distributed, Runner
from tests.train.processes import results_of
from tests.train.running import samples_of
from tests.train.steps import COLLATOR, VOCABULARY, Gradient, distance, gradient_of

PROCESSES, TENSOR_PARALLEL = 4, 2
LENGTHS = [8, 7, 1, 3, 8, 2, 5, 4, 6, 9, 3, 4, 7, 2, 6, 5, 8, 3, 1, 9, 4, 6, 2, 7]
SHAPE = DecoderShape(vocab=VOCABULARY, hidden=16, layers=2, heads=4, kv_heads=2, ffn=16)
SCALE, CLIPPED = 2.0**10, 0.01
WRAPPERS = ("plain", "ddp", "fsdp", "fsdp x tp", "hsdp", "tp")


@dataclass(frozen=True)
class Case:
    """A step: its wrapper, where autocast is, its micro-batches per rank and what follows."""

    wrapper: str
    autocast: str = "around"
    """`around` two steps, `inside` the forward, or `none` (then in double precision)."""
    micro_batches: int = 3
    after: str = ""
    """`scaler` or `clipping`."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return PROCESSES // TENSOR_PARALLEL if "tp" in self.wrapper else PROCESSES


def matrix(wrapper: str) -> list[Case]:
    # torch's scaler refuses plain gradients beside those of tensor parallelism.
    after = ("", "clipping") if wrapper == "tp" else ("", "scaler", "clipping")
    options = product(("around", "inside", "none"), (1, 3), after)
    return [Case(wrapper, *chosen) for chosen in options]


# In the processes ---------------------------------------------------------------------------------


def decoder(case: Case) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    return model.double() if case.autocast == "none" else model


def batches_of(case: Case, samples: list[Any]) -> list[list[Batch]]:
    """The batches of each data-parallel rank; every micro-batch has equally many samples."""
    layout = Packed(samples=len(LENGTHS) // case.ranks // case.micro_batches)
    plan = make_plan(LENGTHS, Recipe(layout=layout, topology=Topology(dp=case.ranks)))
    ranks = [[COLLATOR(micro, samples) for micro in rank] for rank in plan[0]]
    assert {len(batches) for batches in ranks} == {case.micro_batches}
    return ranks


def wrapped(case: Case) -> tuple[Any, Distributed]:
    """(the wrapped model, its data-parallel ranks)."""
    model, mesh = decoder(case), init_device_mesh("cpu", (PROCESSES,))
    if "tp" in case.wrapper:
        sizes = (case.ranks, TENSOR_PARALLEL)
        both = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        split(model, both["tp"])
    if case.wrapper == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if "fsdp" in case.wrapper or case.wrapper == "hsdp":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    if case.wrapper == "ddp":
        return DistributedDataParallel(model), Distributed()
    return model, Distributed(mesh.get_group() if "tp" in case.wrapper else None)


def split(model: Decoder, mesh: DeviceMesh) -> None:
    """Divide heads, feed-forward layers and the vocabulary of the head; the rest is replicated."""
    block = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        **{f"ffn.{name}": ColwiseParallel() for name in ("gate", "up")},
        "attention.out": RowwiseParallel(),
        "ffn.down": RowwiseParallel(),
    }
    for each in model.blocks:
        parallelize_module(each, mesh, block)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def autocast(enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


def run(rank: int, size: int, cases: list[Case], samples: list[Any]) -> dict[Case, Any]:
    """(loss, norm, gradient) of each case."""
    return {case: run_case(rank, case, samples) for case in cases}


def run_case(rank: int, case: Case, samples: list[Any]) -> tuple[float, float, Gradient]:
    model, ranks = wrapped(case)
    batches = batches_of(case, samples)[ranks.rank]

    def forward(model: Any, batch: Batch) -> Any:
        with autocast(case.autocast == "inside"):
            return model(batch)

    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if case.after == "scaler" else None
    options: dict[str, Any] = {"collective": ranks, "forward": forward, "scaler": scaler}
    runner = Runner(model=model, loss=cross_entropy(), **options)
    with autocast(case.autocast == "around"):
        multiply_weights(model, 0.5)  # exact in binary
        runner.run(batches)
        multiply_weights(model, 2.0)
        model.zero_grad()
        result = runner.run(batches).reduce(ranks)
    parameters = list(model.parameters())
    if scaler is not None:
        scaler.unscale_(torch.optim.SGD(parameters, lr=0.0))
    if case.after == "clipping":  # to 1 % of the norm
        norm = torch.tensor(result.grad_norm, dtype=torch.float64)
        clip_grads_with_norm_(parameters, CLIPPED * norm, norm, foreach=False)
    return result.loss, result.grad_norm, gradient_of(model)


def multiply_weights(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


# By definition ------------------------------------------------------------------------------------


def by_definition(case: Case, samples: list[Any]) -> tuple[float, float, Gradient]:
    """The same micro-batches one after the other, in one process and with torch alone."""
    model, loss, labels = decoder(case), 0.0, 0
    for batch in chain.from_iterable(batches_of(case, samples)):
        with autocast(case.autocast != "none"):
            logits = model(batch)
        wide = logits if case.autocast == "none" else logits.float()
        nll = torch.nn.functional.cross_entropy(
            wide.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        nll.backward()
        loss, labels = loss + nll.item(), labels + int((batch.labels != -100).sum())
    gradient = (1 / labels) * gradient_of(model)
    norm = gradient.norm()
    # torch adds 1e-6 to the norm before it divides by it.
    factor = CLIPPED * norm / (norm + 1e-6) if case.after == "clipping" else 1.0
    return loss / labels, norm, factor * gradient


def check(cases: list[Case], folder: Path) -> None:
    samples = samples_of(LENGTHS, seed=3, masked=0.0).samples
    expected = {case: by_definition(case, samples) for case in cases}
    wrong = {}
    for rank, found in enumerate(results_of(PROCESSES, run, folder, cases, samples)):
        for case, (loss, norm, gradient) in found.items():
            limit = 1e-12 if case.autocast == "none" else 1e-5
            if "tp" in case.wrapper and case.autocast != "none":
                limit = 0.02  # partial products are rounded to bfloat16 before they are summed
            errors = (
                abs(loss / expected[case][0] - 1),
                abs(norm / expected[case][1] - 1),
                distance(gradient, expected[case][2]),
            )
            if not max(errors) <= limit:
                wrong[rank, case] = errors
    assert not wrong, wrong


def test_autocast_around_steps_has_the_gradient_of_each_parameter(tmp_path: Path) -> None:
    check([Case(wrapper) for wrapper in WRAPPERS], tmp_path)


def refused(rank: int, size: int, samples: list[Any]) -> tuple[str, str]:
    """The errors of runners whose collectives have other ranks than the data-parallel ones."""
    errors = []
    both = init_device_mesh("cpu", (2, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp"))
    for wrapper, group in (("tp", None), ("fsdp x tp", both["tp"].get_group())):
        case = Case(wrapper)
        model, ranks = wrapped(case)
        runner = Runner(model=model, loss=cross_entropy(), collective=Distributed(group))
        with pytest.raises(ConfigError) as caught:
            runner.run(batches_of(case, samples)[ranks.rank])
        errors.append(str(caught.value))
    return errors[0], errors[1]


@pytest.mark.slow
def test_a_collective_of_other_ranks_is_refused(tmp_path: Path) -> None:
    samples = samples_of(LENGTHS, seed=3, masked=0.0).samples
    for rank, (plain, sharded) in enumerate(results_of(PROCESSES, refused, tmp_path, samples)):
        shards = [0, 1] if rank < TENSOR_PARALLEL else [2, 3]
        assert f"'blocks.0.attention.query.weight' is divided between ranks {shards}" in plain
        assert "over ranks [0, 1, 2, 3]. Pass collective=Distributed(group)" in plain
        peers = [0, 2] if rank % 2 == 0 else [1, 3]
        assert f"between ranks {peers}, but the collective has ranks {shards}" in sharded


@pytest.mark.slow
def test_precision_scaler_and_clipping_are_exact_in_every_wrapper(tmp_path: Path) -> None:
    check([case for wrapper in WRAPPERS for case in matrix(wrapper)], tmp_path)
