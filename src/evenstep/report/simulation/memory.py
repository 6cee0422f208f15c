"""The memory that training takes on one device, term by term.

Mixed precision as `fully_shard` does it: weights, gradients and both states of AdamW are float32
and sharded over all ranks; layers compute in bfloat16.

    weights        4 bytes per weight, sharded
    optimizer      8 bytes per weight, sharded
    gradients      4 bytes per weight, sharded. They are summed over micro-batches before they are
                   scattered, so that steps of several micro-batches hold them whole, unless every
                   micro-batch scatters its own (`Runner(reduce_every="micro_batch")`): then only
                   those of three layers are whole, which are computed, copied and sent
    gathered       2 bytes per weight of the embedding and the head, which stay gathered
    activations    bytes per slot that the backward needs (`core.models`); with checkpointing,
                   2 bytes per hidden number and layer
    recomputed     with checkpointing, the activations of one layer in the backward
    logits         those of a chunk of tokens (0.6 GB), with the gradient of the head and of hidden
                   states: 6 bytes per weight of the head, and per hidden number of a slot. Up to
                   2**24 logits all at once, 14 bytes each: in bfloat16 and float32, two gradients
    update         4 bytes per weight, sharded, while AdamW runs; activations are free by then

The peak is the larger of the end of the forward (weights, optimizer, summed gradients, gathered,
activations, and the larger of logits and recomputed) and the update (weights, optimizer, gradients,
update). Each stage of a pipeline holds the activations of up to pp micro-batches of its layers.
The context of CUDA and fragmented memory come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.models import ModelSize
from evenstep.core.recipe import Topology

USABLE = 0.92
"""The share of a GPU's memory that is planned; CUDA and fragments need the rest."""
LOGIT_BYTES = 14
LOGIT_CHUNK, SMALL_LOGITS = 6e8, 2**24
"""Bytes of a chunk of logits, and how many logits are not divided into chunks: those of `Head` and
of runners."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one device, by term."""

    weights: float
    optimizer: float
    gradients: float
    summed_gradients: float
    gathered: float
    activations: float
    recomputed: float
    logits: float
    update: float

    @property
    def peak(self) -> float:
        """The most that is allocated at once."""
        fixed = self.weights + self.optimizer
        forward = self.summed_gradients + self.gathered + self.activations
        forward += max(self.logits, self.recomputed)
        return fixed + max(forward, self.gradients + self.update)

    def to_dict(self) -> dict[str, float]:
        """All terms and the peak, for JSON."""
        return {**{name: getattr(self, name) for name in Memory.__slots__}, "peak": self.peak}


def memory_of(
    size: ModelSize,
    topology: Topology,
    *,
    slots: int,
    micro_batches: int,
    checkpointing: bool = False,
    scattered: bool = False,
    trained: float = 1.0,
) -> Memory:
    """The memory of a model with at most `slots` in one of `micro_batches` per rank and step;
    `scattered` if every micro-batch scatters its gradients; `trained` is the share of the weights
    that are.

    >>> from evenstep.core.models import named_config
    >>> size = ModelSize.of(named_config("llama-3.2-1b"))
    >>> round(memory_of(size, Topology(), slots=16384, micro_batches=2).peak / 1e9)
    51
    """
    held = size.parameters / (topology.tp * topology.pp)
    shard = held / (topology.dp * topology.cp)
    own = slots / (topology.tp * topology.cp)  # slots of one device
    per_slot = 2 * size.hidden * size.layers if checkpointing else size.work.kept
    in_flight = min(micro_batches, topology.pp) / topology.pp
    summed = 4 * min(held, shard + 3 * held / size.layers if scattered else held)
    return Memory(
        weights=4 * shard,
        optimizer=8 * shard * trained,
        gradients=4 * shard * trained,
        summed_gradients=summed * trained if micro_batches > 1 else 0.0,
        gathered=2 * size.outside / topology.tp,
        activations=per_slot * own * in_flight,
        recomputed=size.work.kept / size.layers * own if checkpointing else 0.0,
        logits=_logits(size, own, topology.tp),
        update=4 * shard * trained,
    )


def _logits(size: ModelSize, slots: float, tp: int) -> float:
    """Bytes of logits, and of what is computed from them."""
    if size.vocab * slots <= SMALL_LOGITS:
        return LOGIT_BYTES * size.vocab * slots
    chunk = min(LOGIT_CHUNK, 2 * size.vocab * slots)
    return chunk + 6 * size.hidden * (size.vocab / tp + slots)
