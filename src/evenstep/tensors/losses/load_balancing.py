"""load_balancing: the auxiliary loss of the routers of mixture-of-experts models.

For one layer with E experts, on a set of tokens with weights w that sum to W:

    loss = E * sum over experts e of f_e * P_e
    f_e = share of the choices that fell on e      (no gradient)
    P_e = sum of w * p_e / W                       (p: the router's probabilities)

A product of two means is not a sum over micro-batches: computed per micro-batch, it would depend on
the plan. But the gradient flows through P_e alone, which is a sum over tokens. So the loss is exact
if f_e is known before the step, or if the set of tokens is one sequence, which is never divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.core.text import one_of, whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard
from evenstep.tensors.metrics import Metric
from evenstep.tensors.outputs import select_output
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View

Over: TypeAlias = Literal["step", "sequence"]
Layers: TypeAlias = Literal["each", "joint"]
Frequencies: TypeAlias = Tensor | Callable[[], Tensor]

OUTPUT = "router_logits"


def load_balancing(
    *,
    top_k: int,
    over: Over,
    frequencies: Frequencies | None = None,
    layers: Layers = "each",
) -> PerSequence:
    """The weighted sum of the load-balancing loss; 1 if all experts are used evenly.

    over="step"      f_e and P_e are means over all tokens of the step, on all ranks. Pass f_e as
                     `frequencies`, (layers, experts) or (experts), rows of which sum to 1, or a
                     function that returns it: of this step (`expert_frequencies`, which needs
                     another forward pass), or of an earlier step, which is a different loss
    over="sequence"  the loss of each sequence on its own tokens; no frequencies. A split sample is
                     an error

    Per layer, it is E * sum over experts of f_e * P_e. The set of tokens is that of the
    normalization: `AllTokens` for every real token, `TokenMean` for loss tokens; `SequenceMean`
    gives each sequence the same weight. Padding never counts. layers="each" is the mean of the
    layers' losses; "joint" takes f_e and P_e over all layers (Hugging Face's definition, which is
    `top_k` times this one).

    The model returns `router_logits`: (rows, width, layers, experts), or one tensor per layer. The
    chosen experts are the `top_k` greatest logits.

        balance = Loss(function=load_balancing(top_k=2, over="sequence"), weight=0.01)
        runner = Runner(model=model, loss={"nll": Loss(function=cross_entropy()), "aux": balance})
    """
    whole_number("top_k", top_k)
    one_of("over", over, Over)
    one_of("layers", layers, Layers)
    if (over == "step") is (frequencies is None):
        raise ConfigError(
            "over='step' needs frequencies=, since a micro-batch does not hold the step. Compute "
            "them with expert_frequencies, or use over='sequence'."
            if over == "step"
            else "over='sequence' takes no frequencies. Remove them, or use over='step'."
        )

    def loss(router_logits: Tensor, view: View) -> Outcome:
        logits, weights = _checked(router_logits, top_k), view.loss_weights
        probabilities = logits.softmax(-1)
        if over == "sequence":
            known = _by_sequence(logits, view, top_k)[view.segment_ids]  # (n, layers, experts)
        else:
            given = frequencies() if callable(frequencies) else frequencies
            assert given is not None
            known = _matching(given, logits)
        if layers == "joint":
            known, probabilities = known.mean(-2), probabilities.mean(-2)
        value = (known * probabilities).sum(-1) * logits.shape[-1]
        value = value if layers == "joint" else value.mean(-1)
        value = torch.where(weights != 0, value * weights, 0.0)
        return value, {"load_balancing": Metric.mean(value.sum(), weights.sum())}

    return PerSequence(loss, vectorised=True, output=OUTPUT)


def count_experts(
    router_logits: object, batch: Batch | BatchShard, top_k: int
) -> tuple[Tensor, Tensor]:
    """How often each expert is chosen in a batch, (layers, experts), and the number of choices.

    Tokens count by `batch.loss_weights`. Sum both over micro-batches and ranks and divide: these
    are the `frequencies` of `load_balancing`.

        counts, choices = count_experts(outputs.router_logits, weighted(batch, AllTokens()), 2)
    """
    outputs = select_output(router_logits, OUTPUT, batch.rows, batch.width)
    logits = _checked(outputs.flatten(0, 1), top_k)
    weights = batch.loss_weights.flatten().double()
    chosen = torch.where(weights[:, None, None] != 0, _chosen(logits, top_k), 0.0)
    counts = (chosen * weights[:, None, None]).sum(0)
    return counts, weights.sum() * top_k


def _chosen(logits: Tensor, top_k: int) -> Tensor:
    """(n, layers, experts): 1 for each chosen expert."""
    best = logits.detach().topk(top_k, dim=-1).indices
    return torch.zeros_like(logits).scatter_(-1, best, 1.0).detach()


def _by_sequence(logits: Tensor, view: View, top_k: int) -> Tensor:
    """(segments, layers, experts): the frequencies of each sequence."""
    view.check_whole_samples()
    weights = view.loss_weights
    chosen = _chosen(logits, top_k) * weights[:, None, None]
    total = view.sum_by_segment(weights) * top_k
    return view.sum_by_segment(chosen) / torch.where(total > 0, total, 1.0)[:, None, None]


def _checked(outputs: Tensor, top_k: int) -> Tensor:
    """(n, layers, experts) logits in float32 or wider."""
    if outputs.ndim != 3 or outputs.shape[-1] < top_k:
        raise InputError(
            f"the router logits have shape {tuple(outputs.shape[1:])} per token; expected (layers, "
            f"experts) with at least top_k={top_k} experts. Let `forward` return a mapping with "
            f"`router_logits`, for Hugging Face dict(model(..., output_router_logits=True))."
        )
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def _matching(frequencies: Tensor, logits: Tensor) -> Tensor:
    layers, experts = logits.shape[1:]
    if tuple(frequencies.shape) not in ((experts,), (layers, experts)):
        raise InputError(
            f"frequencies have shape {tuple(frequencies.shape)}, but the model has {layers} layers "
            f"of {experts} experts. Pass ({layers}, {experts}) or ({experts},)."
        )
    return frequencies.detach().to(logits).expand(layers, experts)
