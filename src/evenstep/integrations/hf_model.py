"""Traits: what the code and the configs of a transformers model say about its inputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from evenstep.errors import ConfigError
from evenstep.integrations.rope import (
    RopeLimit,
    rope_axes,
    rope_indexer,
    rope_limit,
    takes_text_plane,
)
from evenstep.train.forwards import unwrapped


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model needs to be called with. Holds no reference to the model."""

    name: str
    parameters: Mapping[str, inspect.Parameter]  # of its forward
    takes_any: bool
    """Whether the forward takes any keyword argument."""
    sums_loss: bool
    """Whether the model's own loss is a sum, given `num_items_in_batch`."""
    special: frozenset[int]
    """Token ids with a special meaning, such as those of padding and images."""
    media: tuple[int | None, ...]
    """The ids of image and video tokens."""
    padding: int | None
    """The `padding_idx` that positions count from (RoBERTa); None if they count from 0."""
    rope_limit: RopeLimit | None
    rope_indexer: str | None
    rope_axes: int
    text_plane: bool
    """Whether multimodal positions begin with a plane of text positions."""
    has_tower: bool
    """Whether the model has an encoder of images or sound with attention of its own."""
    encodes_and_decodes: bool
    """Whether it takes two sequences per sample."""

    @property
    def plain_token(self) -> int:
        """The smallest token id without a special meaning."""
        return next(token for token in range(len(self.special) + 1) if token not in self.special)

    def accepted(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Without arguments that the forward would raise a TypeError for."""
        if self.takes_any:
            return kwargs
        return {name: value for name, value in kwargs.items() if name in self.parameters}


_KNOWN: WeakKeyDictionary[Any, Traits] = WeakKeyDictionary()


def core_of(model: Any) -> Any:
    """The transformers model inside DDP, torch.compile and peft."""
    model = unwrapped(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def traits_of(model: Any) -> Traits:
    """The traits of a model, read once."""
    core = core_of(model)
    if core not in _KNOWN:
        _KNOWN[core] = _read(core)
    return _KNOWN[core]


def adds_router_loss(model: Any) -> bool:
    """Whether the config asks for the load-balancing loss of a mixture of experts, which the model
    adds to its own loss, with a coefficient other than 0."""
    core = core_of(model)
    config: Any = getattr(core, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = "router_aux_loss_coef"
    coefficient = getattr(core, name, getattr(config, name, None))
    return bool(getattr(config, "output_router_logits", False)) and coefficient != 0


def refuse_router_loss(model: Any, remedy: str) -> None:
    """Raise if `adds_router_loss`: a product of means over a micro-batch depends on the plan."""
    if adds_router_loss(model):
        raise ConfigError(
            f"the config of {type(core_of(model)).__name__} has output_router_logits=True, but its "
            f"load-balancing loss of a micro-batch is not a part of that of the step. {remedy}, or "
            f"set model.config.output_router_logits=False to train without it."
        )


def _read(core: Any) -> Traits:
    parameters = inspect.signature(core.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    config, indexer = getattr(core, "config", None), rope_indexer(core)
    return Traits(
        name=type(core).__name__,
        parameters=parameters,
        takes_any=takes_any,
        sums_loss=takes_any and getattr(core, "accepts_loss_kwargs", None) is not False,
        special=frozenset(_special_tokens(core)),
        media=tuple(_media_token(config, kind) for kind in ("image", "video")),
        padding=_padding(core),
        rope_limit=rope_limit(core),
        rope_indexer=indexer,
        rope_axes=rope_axes(core),
        text_plane=indexer is not None and takes_text_plane(core),
        has_tower=any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")),
        encodes_and_decodes=bool(getattr(config, "is_encoder_decoder", False)),
    )


def _media_token(config: Any, kind: str) -> int | None:
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


def _special_tokens(core: Any) -> Iterator[int]:
    values = [getattr(module, "padding_idx", None) for module in core.modules()]
    for config in _configs(getattr(core, "config", None)):
        for name, value in vars(config).items():
            if "_token_id" in name or "_token_index" in name:
                values += value if isinstance(value, (list, tuple)) else [value]
    yield from (value for value in values if isinstance(value, int))


def _configs(config: Any) -> Iterator[Any]:
    if hasattr(config, "model_type"):
        yield config
        for value in list(vars(config).values()):
            yield from _configs(value)


def _padding(core: Any) -> int | None:
    name = "create_position_ids_from_input_ids"
    for module in core.modules():
        kind, index = type(module), getattr(module, "padding_idx", None)
        by_function = hasattr(sys.modules.get(kind.__module__), name)
        by_function = by_function and hasattr(module, "position_embeddings")
        if index is not None and (by_function or hasattr(kind, name)):
            return int(index)
    return None
