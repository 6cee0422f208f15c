"""The time of a model's micro-batch on a GPU, in seconds.

    matrix products   6 FLOPs per weight and token; 8 for weights in layers that are recomputed
    attention         6 FLOPs per pair and layer width (2 forward, 4 backward), causal pairs only
    other kernels     the bytes that they move (`core.models`), and 16 bytes per logit
    head              its gradient, 8 bytes per weight for each chunk of logits
    weights           gathered, cast and accumulated once per micro-batch: 30 bytes each
    host              launches kernels: 8.5 ms per layer at least
    update            AdamW in float32, clipping, the sums of a step: 125 bytes per weight, and
                      1.3 ms per layer

The shares of the peak that kernels reach are fitted to five models on an H200, in PyTorch without
torch.compile; `benchmarks/results/gpu_tune.md` compares predictions with a sixth.
"""

from __future__ import annotations

from dataclasses import replace

from evenstep.core.cost import Cost, Gpu
from evenstep.core.models import ModelSize, named_config
from evenstep.core.recipe import Topology
from evenstep.report.simulation.cluster import Cluster
from evenstep.report.simulation.memory import LOGIT_CHUNK

MATRIX_SHARE = 0.8
ATTENTION_SHARE = 0.4
MOVED_SHARE = 1 / 2.75
LOGIT_SHARE, LOGIT_BYTES = 0.85, 16
WEIGHT_BYTES = 30
LAUNCH_S = 0.0085
UPDATE_BYTES, UPDATE_S = 125, 0.0013
RECOMPUTED = 4 / 3
"""The work of a layer whose forward runs twice."""


def cluster_of(
    size: ModelSize, gpu: Gpu, topology: Topology, *, checkpointing: bool = False
) -> Cluster:
    """A cluster of these GPUs that trains a model.

    >>> from evenstep.core.models import named_config
    >>> size = ModelSize.of(named_config("llama-3.2-1b"))
    >>> cluster = cluster_of(size, Gpu.named("h200"), Topology())
    >>> round(16384 * cluster.cost.per_token, 2)  # seconds, without attention
    0.31
    """
    again = RECOMPUTED if checkpointing else 1.0
    stored = size.parameters / topology.tp  # of the whole pipeline
    sharded = size.parameters / (topology.tp * topology.pp * topology.dp * topology.cp)
    cluster = Cluster(
        cost=Cost(
            per_token=_per_token(size, gpu, topology, again),
            per_pair=6 * size.work.pairs * again / _attention(gpu, topology),
            per_micro_batch=WEIGHT_BYTES * stored / gpu.bandwidth,
        ),
        least=LAUNCH_S * size.layers * again,
        update=UPDATE_BYTES * sharded / gpu.bandwidth + UPDATE_S * size.layers / topology.pp,
        link=gpu.network,
        inside=gpu.link,
        per_node=gpu.per_node,
        parameters=size.parameters,
        hidden=size.hidden,
    )
    return with_exchange(cluster, size, topology, checkpointing=checkpointing)


def named_cluster(model: str, gpu: str, topology: Topology) -> Cluster:
    """A cluster by names, as `evenstep simulate --model llama-3-8b --gpu h200` simulates it.

    `model` is a name of `Cost.named`, or the path of a config.json or its folder.

    >>> named_cluster("llama-3-8b", "h200", Topology(dp=64)).per_node
    8
    """
    return cluster_of(ModelSize.of(named_config(model)), Gpu.named(gpu), topology)


def _attention(gpu: Gpu, topology: Topology) -> float:
    """FLOPs per second of the devices that share a micro-batch."""
    return gpu.flops * ATTENTION_SHARE * topology.tp * topology.cp


def _per_token(size: ModelSize, gpu: Gpu, topology: Topology, again: float) -> float:
    head = size.hidden * size.vocab
    products = 6 * ((size.work.weights - head) * again + head) / (gpu.flops * MATRIX_SHARE)
    moved = size.work.moved * again / (gpu.bandwidth * MOVED_SHARE)
    chunk = LOGIT_CHUNK / (2 * size.vocab)  # tokens
    logits = LOGIT_BYTES * size.vocab + 8 * head / chunk
    logits /= gpu.bandwidth * LOGIT_SHARE
    near = 6 * size.work.nearby * again / _attention(gpu, topology)
    shared = (products + moved + logits) / (topology.tp * topology.cp)
    return shared + near


def with_exchange(
    cluster: Cluster, size: ModelSize, topology: Topology, *, checkpointing: bool = False
) -> Cluster:
    """The cluster with the time per token that tensor- and context-parallel ranks exchange.

    Tensor parallelism sums two outputs per layer in the forward and two in the backward. Context
    parallelism gathers keys and values in the forward and in the backward, and scatters their
    gradients. All in bfloat16, and not overlapped. Tensor-parallel ranks are neighbours.
    """
    tp, cp = topology.tp, topology.cp
    sums = (6 if checkpointing else 4) * size.layers * 2 * (tp - 1) / tp * 2 * size.hidden / cp
    keys = (4 if checkpointing else 3) * (cp - 1) / cp * 2 * size.work.keys / tp
    sent = sums / cluster.bus(tp, 1) + keys / cluster.bus(cp, tp)
    return replace(cluster, cost=replace(cluster.cost, per_token=cluster.cost.per_token + sent))
