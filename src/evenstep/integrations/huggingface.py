"""Hugging Face: how models are called with batches, and which support packed ones.

hf_forward        (model, batch) -> logits or hidden states, for `Runner`, scoring and own loops
hf_kwargs         a batch as keyword arguments of a model
HfCollate         the samples of a micro-batch as keyword arguments, with labels
hf_head           hidden states -> logits
supports_packing  whether packed segments leave a model's results as they are
choose_layout     the layout, or the padded one if the model does not support it
rope_limit        up to which length RoPE does not depend on neighbours
"""

from evenstep.integrations.hf_collate import HfCollate
from evenstep.integrations.hf_forward import hf_forward, hf_head
from evenstep.integrations.hf_kwargs import hf_kwargs
from evenstep.integrations.rope import RopeLimit, rope_limit
from evenstep.integrations.supports import Support, choose_layout, supports_packing

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
