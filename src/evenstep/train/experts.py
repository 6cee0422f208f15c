"""expert_frequencies: how often the routers of a model choose each expert in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.losses import count_experts
from evenstep.train.all_tokens import AllTokens
from evenstep.train.collectives import Alone, Collective
from evenstep.train.normalization import Normalization, weighted


def expert_frequencies(
    model: Any,
    batches: Iterable[Batch],
    *,
    top_k: int,
    forward: Callable[[Any, Batch], Any],
    normalization: Normalization | None = None,
    collective: Collective | None = None,
) -> Tensor:
    """(layers, experts) float64: each expert's share of the choices in a step, on all ranks.

    Runs `forward` on this rank's batches without gradients, so that
    `load_balancing(over="step", frequencies=...)` has the exact gradient of the whole step. The
    normalization must be that of the loss, by default `AllTokens`. Both passes choose the same
    experts only if the forward is deterministic: no dropout, no router noise.

        batches = [collate(micro, samples) for micro, samples in step]
        shares = expert_frequencies(model, batches, top_k=2, forward=forward)
        balance = Loss(
            function=load_balancing(top_k=2, over="step", frequencies=shares),
            normalization=AllTokens(),
        )
    """
    ranks = Alone() if collective is None else collective
    over = AllTokens() if normalization is None else normalization
    total: Tensor | None = None
    for batch in batches:
        with torch.no_grad():
            outputs = forward(model, batch)
            counts, choices = count_experts(outputs, weighted(batch, over), top_k)
        both = torch.cat((counts.flatten(), choices.reshape(1)))
        total, shape = both if total is None else total + both, counts.shape
    if total is None:
        raise InputError("no batches were given. Pass this rank's batches of the step.")
    total = ranks.all_reduce_sum(total).to(total.device)
    return total[:-1].view(shape) / total[-1].clamp(min=torch.finfo(torch.float64).tiny)
