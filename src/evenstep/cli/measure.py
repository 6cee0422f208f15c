"""`evenstep tune --measure`: the budget that a model has on the GPU of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenstep.core.models import ModelConfig, ModelSize
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Topology
from evenstep.errors import ConfigError
from evenstep.report.simulation.memory import memory_of

if TYPE_CHECKING:
    from evenstep.train import MeasuredBudget, MemoryMeter


def measure(
    config: ModelConfig,
    lengths: IntArray,
    checkpointing: bool,
    *,
    device: str = "cuda",
    meter: MemoryMeter | None = None,
) -> MeasuredBudget:
    """What `find_budget` finds for random weights, set up as `tune` assumes: fully_shard on one
    rank, bfloat16, AdamW."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from evenstep.tensors import cross_entropy
    from evenstep.train import Distributed, Runner, find_budget
    from evenstep.train.budget import expand_segments
    from evenstep.train.compiling import layers_of

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--measure needs a GPU, but torch finds none. Leave it out.")
    if torch.distributed.is_initialized():
        raise ConfigError("--measure runs on one GPU. Start evenstep without torchrun.")
    if device == "cuda":
        expand_segments()
    store = torch.distributed.HashStore()
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        model = _build(config, device)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = torch.distributed.device_mesh.init_device_mesh(device, (1,))
        for module in (*layers_of(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
        return find_budget(runner, optimizer, lengths.tolist(), meter=meter)
    finally:
        torch.distributed.destroy_process_group()


def _build(config: ModelConfig, device: str) -> Any:
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            '--measure needs transformers. Install it with pip install "evenstep[hf]".'
        ) from None
    from evenstep.integrations.hf_attention import use_attention
    from evenstep.integrations.huggingface import support_of

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config.fields), dtype=torch.float32
        )
    use_attention(model)
    support_of(model)  # in float32, before it is sharded: bfloat16 rounds
    return model.train()


def described(measured: MeasuredBudget, size: ModelSize, checkpointing: bool) -> str:
    """Prediction and measurement, in a sentence each."""
    fixed, some = (
        memory_of(size, Topology(), slots=slots, micro_batches=2, checkpointing=checkpointing).peak
        for slots in (0, 2**20)
    )
    per_slot = (some - fixed) / 2**20
    predicted = int((measured.total - fixed) / per_slot * 0.96)
    return (
        f"On this GPU, {measured.total / 2**30:.1f} GiB: predicted {max(predicted, 0):,} slots "
        f"({fixed / 2**30:.1f} GiB and {per_slot / 2**20:.3f} MiB per slot), measured "
        f"{measured.max_tokens:,} slots ({measured.fixed / 2**30:.1f} GiB and "
        f"{measured.per_slot / 2**20:.3f} MiB per slot), each 4 % below the limit."
    )
