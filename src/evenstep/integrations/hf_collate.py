"""HfCollate: the samples of a micro-batch -> keyword arguments of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenstep.core.plan import MicroBatch
from evenstep.integrations.hf_kwargs import hf_kwargs
from evenstep.tensors.collate import Collator


@dataclass(frozen=True, kw_only=True, slots=True)
class HfCollate:
    """What `model(**inputs)` takes to compute its loss: tokens, positions, boundaries or a mask,
    and labels shifted within segments. See `hf_kwargs`.

    The loss needs `num_items_in_batch` as well, which the Trainer and `accelerate_loader` add: the
    number of labels in the step, on all ranks.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from evenstep import Packed, Recipe, make_plan
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> samples = {0: {"input_ids": [5, 6]}, 1: {"input_ids": [7]}}
    >>> inputs = HfCollate(model=model)(plan[0, 0][0], samples)
    >>> inputs["shift_labels"].tolist(), inputs["position_ids"].tolist()
    ([[6, -100, -100]], [[0, 1, 0]])
    """

    model: Any
    collate: Collator = field(default_factory=Collator)

    def __call__(self, micro: MicroBatch, samples: Mapping[int, Any]) -> dict[str, Any]:
        """The arguments for one micro-batch."""
        inputs = hf_kwargs(self.collate(micro, samples), self.model, labels=True)
        return {name: value for name, value in inputs.items() if name != "num_items_in_batch"}
