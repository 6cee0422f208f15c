"""Hugging Face: how models are called with batches, and which support packed ones.

hf_forward        (model, batch) -> logits or hidden states, for `Runner`, scoring and own loops
hf_kwargs         a batch as keyword arguments of a model
HfCollate         the samples of a micro-batch as keyword arguments, with labels
hf_head           hidden states -> logits
supports_packing  whether packed segments leave a model's results as they are
choose_layout     the layout, or the padded one if the model does not support it
rope_limit        up to which length RoPE does not depend on neighbours
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from evenstep.core.text import one_of
from evenstep.errors import ConfigError
from evenstep.integrations.hf_arguments import (
    HfCollate,
    RopeLimit,
    core_of,
    hf_kwargs,
    refuse_router_loss,
    refuse_shard,
    rope_limit,
    text_config,
    traits_of,
)
from evenstep.integrations.packing import (
    LONG,
    Support,
    choose_layout,
    fault_of,
    support_of,
    supports_packing,
)
from evenstep.tensors.batch import PER_SLOT, Batch
from evenstep.tensors.head import Head
from evenstep.tensors.losses import select_output
from evenstep.tensors.segment_attention import one_segment_per_row
from evenstep.train.framework import register_forward, unwrapped

__all__ = [
    "HfCollate",
    "RopeLimit",
    "Support",
    "choose_layout",
    "hf_forward",
    "hf_head",
    "hf_kwargs",
    "rope_limit",
    "supports_packing",
]


Outputs: TypeAlias = Literal["logits", "hidden", "router_logits"]
Unsupported: TypeAlias = Literal["raise", "pad"]


def hf_forward(
    model: Any,
    *,
    outputs: Outputs = "logits",
    temperature: float = 1.0,
    unsupported: Unsupported = "raise",
) -> Callable[[Any, Batch], Any]:
    """The `forward` of a Hugging Face model for `Runner`, `compute_log_probs` and other loops.

    Both use it by themselves if they are given such a model and no `forward`. At the first packed
    batch it checks `supports_packing`. The model may be in DDP, torch.compile, peft or fully_shard;
    the forward calls the wrapper that it is given, so that gradients are exchanged.

    outputs      "logits"; "hidden" for the last hidden states, (rows, width, hidden size), see
                 `hf_head`, with logits of one slot only, if the model can; "router_logits" for a
                 mixture of experts: a dict of `logits` and `router_logits`, (rows, width, layers,
                 experts), for `load_balancing`. Without it, a model whose config says
                 output_router_logits=True is refused in training
    temperature  what logits are divided by
    unsupported  for packed batches that the model does not support: "raise", or "pad", which warns
                 once and runs each segment in a row of its own. That takes more memory than the
                 plan allows for; `choose_layout` plans padded rows instead

        forward = hf_forward(model)
        logits = forward(model, batch)  # (rows, width, vocabulary)
    """
    one_of("outputs", outputs, Outputs)
    one_of("unsupported", unsupported, Unsupported)
    if not temperature > 0:
        raise ConfigError(f"temperature must be above 0, got {temperature}.")
    if outputs == "hidden" and temperature != 1.0:
        raise ConfigError(
            "temperature divides logits, but outputs='hidden' has none. Divide the logits that "
            "you compute from hidden states."
        )
    run = _RUNS[outputs]

    def forward(model: Any, batch: Batch) -> Any:
        refuse_shard(batch)
        if outputs != "router_logits" and torch.is_grad_enabled():
            refuse_router_loss(
                model,
                "Pass forward=hf_forward(model, outputs='router_logits') and a second loss, "
                "load_balancing",
            )
        _check_attention(model)
        if isinstance(unwrapped(model), FSDPModule):
            # Its forwards communicate, so all ranks judge it now, packed batch or not.
            support_of(unwrapped(model))
        if one_segment_per_row(batch) or _may_pack(model, batch, unsupported):
            tensors = run(model, batch)
        else:
            rows = PaddedRows.of(batch)
            padded = run(model, rows.batch)
            tensors = {name: rows.restore(values) for name, values in padded.items()}
        if temperature != 1.0:
            tensors["logits"] = tensors["logits"] / temperature
        return tensors if outputs == "router_logits" else tensors[outputs]

    return forward


def hf_head(model: Any) -> Head:
    """The model's last layer, with the scale and soft cap of its config, for `head=` of losses.

    Compared once with the model's own logits, on a few tokens; a model whose head does more is
    refused. `model.lm_head` alone would drop the scale and the soft cap.

        forward = hf_forward(model, outputs="hidden")
        runner = Runner(model=model, loss=cross_entropy(head=hf_head(model)), forward=forward)
    """
    core = core_of(model)
    output, config = core.get_output_embeddings(), text_config(core)
    if output is None:
        raise ConfigError(f"{type(core).__name__} has no output embeddings.")
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    head = Head(output, scale=scale, soft_cap=cap or None)
    _check_head(model, core, head)
    return head


def _check_head(model: Any, core: Any, head: Head) -> None:
    tokens = torch.full((1, 4), traits_of(core).plain_token, device=next(core.parameters()).device)
    with torch.no_grad():
        hidden, logits = _hidden_and_logits(unwrapped(model), {"input_ids": tokens})
        ours = head(hidden[:, -logits.shape[1] :])
    if not torch.allclose(ours, logits, rtol=1e-2, atol=float(logits.abs().max()) * 1e-3):
        raise ConfigError(
            f"the head of {type(core).__name__} does more than its config says. Use its logits: "
            f"hf_forward(model)."
        )


# Running ---------------------------------------------------------------------------------------


def _run_logits(model: Any, batch: Batch) -> dict[str, Tensor]:
    return {"logits": _logits(model(**hf_kwargs(batch, model)), model, batch)}


def _run_router(model: Any, batch: Batch) -> dict[str, Tensor]:
    traits = traits_of(model)
    taken = traits.takes_any or "output_router_logits" in traits.parameters
    outputs = model(**hf_kwargs(batch, model), output_router_logits=True) if taken else None
    if getattr(outputs, "router_logits", None) is None:
        raise ConfigError(
            f"{traits.name} returns no router logits. Use outputs='logits', or a mixture of "
            f"experts whose forward takes output_router_logits."
        )
    router_logits = select_output(outputs, "router_logits", batch.rows, batch.width)
    return {"logits": _logits(outputs, model, batch), "router_logits": router_logits}


def _logits(outputs: Any, model: Any, batch: Batch) -> Tensor:
    logits = getattr(outputs, "logits", None)
    if logits is None:
        raise ConfigError(
            f"{type(core_of(model)).__name__} returns no logits. Use a class with a language model "
            f"head, or hf_forward(model, outputs='hidden')."
        )
    if logits.shape[1] != batch.width:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} returns logits of {logits.shape[1]} tokens per row "
            f"for {batch.width}, as with the virtual tokens of prompt tuning. Pass a forward that "
            f"returns one output per token."
        )
    return logits


def _run_hidden(model: Any, batch: Batch) -> dict[str, Tensor]:
    kwargs = hf_kwargs(batch, model)
    if core_of(model).get_output_embeddings() is None:
        return {"hidden": model(**kwargs).last_hidden_state}
    return {"hidden": _hidden_and_logits(model, kwargs)[0]}


_RUNS: dict[Outputs, Callable[[Any, Batch], dict[str, Tensor]]] = {
    "logits": _run_logits,
    "hidden": _run_hidden,
    "router_logits": _run_router,
}


def _hidden_and_logits(model: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Call the model and keep what its base model returns. DDP and fully_shard need the call to go
    through the wrapper."""
    core, kept = core_of(model), []
    base = core.base_model
    if base is core:
        raise ConfigError(f"{type(core).__name__} has no base model to take hidden states from.")

    def keep(module: Any, args: Any, outputs: Any) -> None:
        kept.append(outputs[0] if isinstance(outputs, tuple) else outputs.last_hidden_state)

    hook = base.register_forward_hook(keep)
    try:
        few = {"logits_to_keep": 1} if "logits_to_keep" in traits_of(core).parameters else {}
        outputs = model(**kwargs, **few)
    finally:
        hook.remove()
    return kept[-1], outputs.logits


# Checks ----------------------------------------------------------------------------------------

_WARNED: WeakSet[Any] = WeakSet()
_CHECKED: WeakSet[Any] = WeakSet()


def _check_attention(model: Any) -> None:
    """Refuse a model that was built with our attention and does not call it: its own code takes no
    2-D mask, so padded rows would be wrong as well. transformers only logs a warning."""
    inner = unwrapped(model)
    if inner in _CHECKED:
        return
    if getattr(text_config(core_of(model)), "_attn_implementation", None) == "evenstep":
        why = fault_of(inner)
        if why is not None:
            raise ConfigError(
                f"{type(inner).__name__} does not run with attn_implementation='evenstep': {why}. "
                f"Use another implementation, with the padded layout."
            )
    _CHECKED.add(inner)


def _may_pack(model: Any, batch: Batch, unsupported: Unsupported) -> bool:
    """Whether the model may run the packed batch as it is."""
    inner = unwrapped(model)
    support = support_of(inner)
    if support.safe:
        if support.cost and batch.width > LONG:
            _warn_once(inner, f"{type(inner).__name__}: {support.cost}.")
        return True
    fault = f"{type(inner).__name__} does not support packed batches: {support.why}."
    if unsupported == "raise":
        raise ConfigError(
            f"{fault} Plan with choose_layout(model, layout), try use_attention(model) of "
            f"evenstep.integrations.hf_attention, or pass forward=hf_forward(model, "
            f"unsupported='pad')."
        )
    _warn_once(inner, f"{fault} Running each segment in a row of its own.")
    return False


def _warn_once(model: Any, text: str) -> None:
    if model not in _WARNED:
        _WARNED.add(model)
        warnings.warn(text, stacklevel=4)


# Padded rows for models that cannot run packed ones ---------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows:
    """The segments of a batch in rows of their own, as wide as the longest.

    a a a b b . .  ->  a a a
                       b b .
    """

    batch: Batch
    source: Tensor
    """(tokens): the slots of the packed batch, row by row of the padded one."""
    packed_shape: tuple[int, int]

    @classmethod
    def of(cls, batch: Batch) -> PaddedRows:
        """Move every segment to its own row. Labels and continuations are left out: the padded
        batch is for the model, not for the loss."""
        tiles = (batch.sample_ids >= 0).nonzero()[:, 0]
        begins, lengths = batch.cu_seqlens[:-1][tiles].long(), batch.seqlens[tiles]
        width = max(int(lengths.max()), 1) if len(lengths) else 1
        column = torch.arange(width, device=batch.device)
        inside = column < lengths[:, None]  # (segments, width)
        slots = torch.where(inside, begins[:, None] + column, begins[:, None])

        def moved(values: Tensor) -> Tensor:
            return values.flatten(0, 1)[slots]

        rows = len(lengths)
        per_slot = {name: moved(getattr(batch, name)) for name in PER_SLOT}
        per_slot["position_ids"] = column.expand(rows, -1)
        per_slot["segment_ids"] = torch.arange(rows, device=batch.device)[:, None].expand(-1, width)
        extras = {
            name: moved(extra) if batch.aligned.get(name) in ("token", "label") else extra
            for name, extra in batch.extras.items()
        }
        padded = replace(
            batch,
            **per_slot,
            cu_seqlens=torch.arange(rows + 1, device=batch.device, dtype=torch.int32) * width,
            seqlens=lengths,
            sample_ids=batch.sample_ids[tiles],
            starts=batch.starts[tiles],
            loss_tokens=batch.loss_tokens[tiles],
            max_seqlen=width,
            continuation=None,
            extras=extras,
        )
        return cls(padded, slots[inside], (batch.rows, batch.width))

    def restore(self, outputs: Tensor) -> Tensor:
        """(segments, longest, ...) -> (rows, width, ...) of the packed batch, zeros in padding."""
        rows, width = self.packed_shape
        packed = outputs.new_zeros((rows * width, *outputs.shape[2:]))
        packed = packed.index_copy(0, self.source, outputs[self.batch.token_mask])
        return packed.view(rows, width, *outputs.shape[2:])


for _library in ("transformers", "peft"):
    register_forward(_library, hf_forward)
