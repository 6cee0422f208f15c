"""Rotary positions: what depends on neighbours, and the planes of multimodal models."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.batch import Batch, RaggedTensor


@dataclass(frozen=True, slots=True)
class RopeLimit:
    """Up to which length the rotary positions of a model are independent of other samples.

    longrope  segments of up to `tokens` tokens and longer ones need different frequencies, and a
              micro-batch gets those of its longest segment: it must keep to one side
    dynamic   a segment of `tokens` tokens or more changes the frequencies of its micro-batch and
              of later ones: there must be none

    >>> RopeLimit("longrope", 4096).tokens
    4096
    """

    kind: Literal["longrope", "dynamic"]
    tokens: int

    @property
    def why(self) -> str:
        """What is wrong with other lengths, and the remedy."""
        if self.kind == "longrope":
            return (
                f"its longrope frequencies depend on whether the longest segment of a micro-batch "
                f"has more than {self.tokens} tokens. Keep micro-batches to one side with "
                f"separate_lengths(step, {self.tokens}) of evenstep.data"
            )
        return (
            f"its dynamic RoPE depends on every batch with {self.tokens} tokens or more that ran "
            f"before. Keep samples below {self.tokens} tokens, or use another rope_type"
        )

    def allows(self, lengths: Tensor) -> bool:
        """Whether segments of these lengths can share a micro-batch."""
        if not len(lengths):
            return True
        least, most = torch.aminmax(lengths)
        if self.kind == "dynamic":
            return bool(most < self.tokens)
        return bool((least > self.tokens) | (most <= self.tokens))

    def check(self, batch: Batch) -> None:
        """Raise if the segments of a batch cannot share a micro-batch, packed or padded."""
        lengths = batch.seqlens[batch.sample_ids >= 0]
        if not self.allows(lengths):
            raise InputError(
                f"a micro-batch holds segments of {int(lengths.min())} to {int(lengths.max())} "
                f"tokens, but for this model {self.why}."
            )


def rope_limit(model: Any) -> RopeLimit | None:
    """The limit of a transformers model whose rotary positions depend on lengths, else None.

    `separate_lengths(step, rope_limit(model).tokens)` of `evenstep.data` keeps to a longrope limit.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    >>> config = LlamaConfig(vocab_size=9, rope_parameters=rope, **sizes)
    >>> rope_limit(LlamaForCausalLM(config))
    RopeLimit(kind='dynamic', tokens=2048)
    """
    found = [limit for module in model.modules() for limit in _limits(module)]
    dynamic = [limit for limit in found if limit.kind == "dynamic"]
    return min(dynamic or found, key=lambda limit: limit.tokens, default=None)


def _limits(module: Any) -> Iterator[RopeLimit]:
    """The limits of a rotary module; its own `rope_type` counts more than the config's."""
    config: Any = getattr(module, "config", None)
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if "rotary" not in type(module).__name__.lower() or not isinstance(given, Mapping):
        return
    types = getattr(module, "rope_type", None)
    layered = {name: part for name, part in given.items() if isinstance(part, Mapping)}
    for name, parameters in (layered or {"": given}).items():
        own = types.get(name) if isinstance(types, Mapping) else types
        kind = str(own or parameters.get("rope_type") or parameters.get("type") or "default")
        if "dynamic" in kind:
            yield RopeLimit("dynamic", int(config.max_position_embeddings))
        elif kind == "longrope" or "long_mscale" in parameters:
            both = (parameters, vars(config))
            key = "original_max_position_embeddings"
            most = next((part[key] for part in both if part.get(key)), None)
            yield RopeLimit("longrope", int(most or config.max_position_embeddings))


# Multimodal positions --------------------------------------------------------------------------


def rope_indexer(model: Any) -> str | None:
    """The name of the module with `get_rope_index`, which multimodal rotary positions come from."""
    found = (name for name, module in model.named_modules() if hasattr(module, "get_rope_index"))
    return next(found, None)


def rope_planes(
    batch: Batch,
    index: Callable[..., tuple[Tensor, Any]],
    num_axes: int,
    positions: Tensor,
    inputs: Mapping[str, Any],
) -> Tensor:
    """(axes, rows, width): the axes of each sample's own rotary index.

    `index` is the model's own `get_rope_index`, which runs on one sample at a
    time: on a packed row, it would count on from the sample before. `inputs` are the batch's
    extras for the model, with `mm_token_type_ids` if it takes them.
    """
    accepted = inspect.signature(index).parameters
    inputs = {name: _on_cpu(value) for name, value in inputs.items() if name in accepted}
    ragged = [name for name, value in inputs.items() if isinstance(value, RaggedTensor)]
    tokens, plain = batch.tokens.cpu().reshape(-1), positions.cpu().reshape(-1)
    planes = plain.expand(num_axes, -1).clone()
    begins, lengths = batch.cu_seqlens.tolist(), batch.seqlens.tolist()
    tiles = (batch.sample_ids >= 0).nonzero()[:, 0].tolist()
    for segment, tile in enumerate(tiles):
        slots = slice(begins[tile], begins[tile] + lengths[tile])
        given = {name: _of_segment(value, slots, segment) for name, value in inputs.items()}
        if any(given[name] is not None for name in ragged):  # text alone has plain positions
            if "attention_mask" in accepted:
                given["attention_mask"] = torch.ones(1, lengths[tile], dtype=torch.int64)
            planes[:, slots] = index(input_ids=tokens[None, slots], **given)[0][:, 0]
    return planes.view(num_axes, *positions.shape).to(positions.device)


def takes_text_plane(model: Any) -> bool:
    """Whether the model takes the positions of text as a plane before the rotary axes, from which
    transformers reads the boundaries of segments: four planes, of which it removes the first."""
    homes = {type(module).__module__ for module in model.modules()}
    homes = {home for home in homes if home.startswith("transformers.models.")}
    return any("shape[0] == 4" in inspect.getsource(sys.modules[home]) for home in homes)


def rope_axes(model: Any) -> int:
    """The number of rotary axes: of time, height and width, unless the config has more."""
    for module in model.modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
        if isinstance(parameters, Mapping) and parameters.get("mrope_section"):
            return max(3, len(parameters["mrope_section"]))
    return 3


def _on_cpu(value: Any) -> Any:
    return value.to("cpu") if isinstance(value, (Tensor, RaggedTensor)) else value


def _of_segment(value: Any, slots: slice, segment: int) -> Any:
    """What belongs to one segment: (1, length) of a token-aligned tensor, its entries of a ragged
    one (None if it has none), its entry of one per sequence."""
    if isinstance(value, RaggedTensor):
        first, last = value.offsets[segment : segment + 2].tolist()
        return value.values[first:last] if last > first else None
    if isinstance(value, Tensor) and value.ndim >= 2:
        return value.flatten(0, 1)[None, slots]
    return value[segment : segment + 1] if isinstance(value, Tensor) else value
