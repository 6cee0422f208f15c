"""The shards of a batch add up to its loss, metrics and gradient, for every loss of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.tensors import (
    Collator,
    Extra,
    Head,
    PerSequence,
    cross_entropy,
    distillation,
    load_balancing,
    policy_gradient,
    shard_context,
    value_loss,
)
from tests.internals import merge
from tests.tensors.scored import VOCABULARY, close, flat_logits

TOKEN = ("old_log_probs", "advantages", "reference_log_probs", "rollout_log_probs", "returns")
SHARES = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
LOSSES: dict[str, tuple[PerSequence, tuple[int, ...]]] = {
    "cross entropy": (cross_entropy(label_smoothing=0.1, z_loss=0.1), (VOCABULARY,)),
    "head": (cross_entropy(head=Head(torch.ones(VOCABULARY, 4).double(), chunk=2)), (4,)),
    "policy gradient": (
        policy_gradient(dual_clip=2.0, importance_cap=1.0, kl_weight=0.1, entropy_weight=0.1),
        (VOCABULARY,),
    ),
    "value": (value_loss(clip=None), (1,)),
    "distillation": (distillation(divergence="jsd"), (VOCABULARY,)),
    "load balancing": (load_balancing(top_k=2, over="step", frequencies=SHARES), (2, 3)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_add_up(name: str, size: int) -> None:
    rng = np.random.default_rng(0)
    samples: list[dict[str, Any]] = [
        {
            "input_ids": rng.integers(0, VOCABULARY, n),
            "loss_mask": rng.random(n) > 0.2,
            **{key: rng.normal(-1, 1, n) for key in TOKEN},
            "teacher_logits": rng.normal(size=(n, VOCABULARY)),
        }
        for n in (9, 4, 1, 7)
    ]
    extras = {key: Extra(aligned="token", dtype=torch.float64) for key in TOKEN}
    teacher = Extra(aligned="token", dtype=torch.float64, shape=(VOCABULARY,))
    collate = Collator(extras={**extras, "teacher_logits": teacher})
    recipe = Recipe(layout=Packed(max_tokens=48), topology=Topology(cp=size))
    batch = collate(make_plan([9, 4, 1, 7], recipe)[0, 0][0], samples)
    loss, shape = LOSSES[name]
    flat = flat_logits(batch, size=int(np.prod(shape))).double()
    outputs = flat.view(*flat.shape[:2], *shape).requires_grad_()
    whole = loss(outputs, batch)
    ready = batch.at_labels(*TOKEN)
    shards = [shard_context(ready, rank, size) for rank in range(size)]
    parts = [loss(shard.take(outputs), shard) for shard in shards]
    total = torch.stack([part.loss for part in parts]).sum()
    close(total, whole.loss)
    close(torch.autograd.grad(total, outputs)[0], torch.autograd.grad(whole.loss, outputs)[0])
    merged = merge(part.metrics for part in parts)
    for key, metric in whole.metrics.items():
        close(merged[key].value, metric.value)
