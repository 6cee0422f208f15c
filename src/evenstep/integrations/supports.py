"""Which transformers models support packed batches, and what packing costs them."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from evenstep.core.layout import Layout
from evenstep.integrations.hf_model import traits_of
from evenstep.integrations.packing_code import implementation_of, mixing_layers, read_attention
from evenstep.integrations.packing_probe import can_probe, probe_packing
from evenstep.train.forwards import unwrapped

LONG = 4096
"""Slots of a packed row above which a dense mask is worth a warning."""
_BUILT_IN = ("sdpa", "eager", "flex_attention")


class Support(NamedTuple):
    """Whether a model supports packed batches, and why.

    >>> safe, why, cost = Support(True, "flash_attention_2 reads the boundaries from cu_seq_lens")
    """

    safe: bool
    why: str
    cost: str = ""
    """What packing costs with the model's attention implementation; empty if nothing."""


def supports_packing(model: Any, *, longest: int | None = None) -> Support:
    """Whether packed segments leave the results of a transformers model as they are, given
    `hf_forward(model)` or `hf_kwargs(batch, model)`.

    Decided from the layers and the attention implementation, and by a few small forwards on short
    samples, unless the model has no weights yet. Unknown models are reported as unsafe. With
    fully_shard, call it on all ranks. `longest` is the length of the longest sample, if known:
    some RoPE types are independent of neighbours up to a length.

        safe, why, cost = supports_packing(AutoModelForCausalLM.from_pretrained(name))
    """
    support = judged(model)
    limit = traits_of(model).rope_limit if support.safe else None
    if limit is not None and (longest is None or not limit.allows(torch.tensor([0, longest]))):
        return Support(False, limit.why)
    return support


def choose_layout(model: Any, layout: Layout, *, longest: int | None = None) -> Layout:
    """The layout if the model supports it, else the padded layout with the same bounds.

    Falling back emits a warning. Call this before planning: a packed plan cannot be padded within
    its budget. A RoPE type that depends on neighbours does so in padded rows too, so it is warned
    about and the layout is kept. `longest` is the length of the longest sample, if known.

        recipe = Recipe(layout=choose_layout(model, Packed(max_tokens=8192)))
    """
    padded = layout.padded()
    if padded == layout:
        return layout
    name, support = type(unwrapped(model)).__name__, judged(model)
    if not support.safe:
        warnings.warn(
            f"{name} does not support packed batches: {support.why}. Using the padded layout "
            f"instead.",
            stacklevel=2,
        )
        return padded
    lengths = supports_packing(model, longest=longest)
    if not lengths.safe:
        warnings.warn(f"{name} can run only some micro-batches: {lengths.why}.", stacklevel=2)
    if support.cost and (layout.budget or 0) > LONG:
        warnings.warn(f"{name}: {support.cost}.", stacklevel=2)
    return layout


def judged(model: Any) -> Support:
    """`supports_packing` of segments whose lengths the model's RoPE allows in one micro-batch."""
    model = unwrapped(model)
    if not any(hasattr(module, "config") for module in model.modules()):
        return Support(False, f"{type(model).__name__} has no config; test it with find_leaks")
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        return Support(False, "its peft adapter puts virtual tokens before the row, not a sample")
    name = implementation_of(model)
    known = name in _BUILT_IN or "flash" in name
    reason = mixing_layers(model)
    if reason is not None:
        return Support(False, reason)
    reading = read_attention(model)
    if known and not reading.safe:
        return Support(False, reading.why)
    if can_probe(model):
        reason = probe_packing(model)
        if reason is not None:
            return Support(False, reason)
        why = reading.why if reading.safe else f"{name} keeps segments apart in small forwards"
        return Support(True, why, _cost(name))
    return Support(bool(reading.safe), reading.why, _cost(name) if reading.safe else "")


_JUDGED: WeakKeyDictionary[Any, dict[str, Support]] = WeakKeyDictionary()


def judged_once(model: Any) -> Support:
    """`judged`, once per model and attention implementation."""
    model = unwrapped(model)
    known = _JUDGED.setdefault(model, {})
    name = implementation_of(model)
    if name not in known:
        known[name] = judged(model)
    return known[name]


def _cost(name: str) -> str:
    if name not in ("sdpa", "eager"):
        return ""
    return (
        f"{name} builds a dense mask of width x width and computes all of it, which makes packed "
        f"rows above {LONG:,} slots slower than padded ones. Use attn_implementation='evenstep' "
        f"(import evenstep.integrations.hf_attention) or flash attention"
    )
