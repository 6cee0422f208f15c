"""Steps of tiny models on two ranks, under DistributedDataParallel and fully_shard."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.tensors import cross_entropy
from evenstep.train import Distributed, Runner
from tests.slow.images import Image
from tests.slow.kinds import kind_of
from tests.slow.measure import (
    Gradients,
    collator_of,
    error_of,
    image_for,
    made,
    norm_error,
    reference,
    rounding_of,
    samples_of,
)

ARCHITECTURES = (
    "llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe", "qwen2_5_vl", "qwen3_next",
    "nemotron_h",
)  # fmt: skip
IMPLEMENTATIONS = ("sdpa", "evenstep")
WRAPPERS = ("DDP", "FSDP2")
REPEATED = 2
"""How often the samples are in a step, so that a rank has several micro-batches."""


def errors_on_ranks(
    rank: int, size: int, name: str, implementations: tuple[str, ...]
) -> dict[str, Any]:
    """The errors of the gradient of a step by wrapper and implementation, and the rounding error of
    the reference."""
    kind = kind_of(name)
    model = made(kind, "eager", torch.float32)
    image = image_for(model)
    expected = reference(model, image)
    exact = reference(made(kind, "eager", torch.float64), image)
    found: dict[str, Any] = {
        "rounding": rounding_of(expected, exact),
        "rounding norm": norm_error(expected, exact),
        "errors": {},
    }
    for implementation in implementations:
        for wrapper in WRAPPERS:
            try:
                model = made(kind, implementation, torch.float32)
            except ValueError:  # GPT-OSS has no sdpa
                continue
            gradients = _step(rank, size, _wrapped(model, wrapper, size), image)
            found["errors"][f"{wrapper} {implementation}"] = {
                "single": error_of(gradients, expected),
                "single norm": norm_error(gradients, expected),
            }
    return found


def _wrapped(model: Any, wrapper: str, size: int) -> Any:
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (size,))
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(rank: int, size: int, model: Any, image: Image | None) -> Gradients:
    """The gradient of one step, as of the sum over the labels of all samples once."""
    samples = samples_of(image) * REPEATED
    lengths = [len(sample["input_ids"]) for sample in samples]
    recipe = Recipe(layout=Packed(max_tokens=max(lengths) + 5), topology=Topology(dp=size))
    collate = collator_of(image, torch.float32)
    batches = [collate(micro, samples) for micro in make_plan(lengths, recipe)[0, rank]]
    assert len(batches) > 1
    Runner(model=model, loss=cross_entropy(), collective=Distributed()).run(batches)
    labels = sum(length - 1 for length in lengths) / REPEATED
    return {
        name.removeprefix("module."): _whole(parameter) * labels
        for name, parameter in model.named_parameters()
    }


def _whole(parameter: Any) -> Any:
    if parameter.grad is None:
        return torch.zeros(parameter.shape)
    grad = parameter.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad
