"""Tiny configs of transformers: every kind of layer, windows and chunks shorter than the samples.

A config is made of its class. Fields that give a size get the value of `SIZES` with their name.
Layers are those of the default config, one of each kind. `EXCEPTIONS` has what these rules get
wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tests.slow.exceptions import EXCEPTIONS
from tests.slow.sizes import OFF, SIZES, VOCAB, WINDOW, WINDOWS

TOKENS = range(3, 90)
"""Ordinary tokens; special ones are below, and those of images and sounds above."""


def tiny_config(config_class: type, window: int = WINDOW) -> Any:
    """A tiny config of this class, with windows and chunks of this size."""
    special = iter(range(TOKENS.stop, VOCAB))
    return config_class(**_arguments(config_class, window, special))


def _arguments(
    config_class: Any, window: int, special: Iterator[int], /, **defaults: Any
) -> dict[str, Any]:
    """Arguments of a config; each special token takes the next number."""
    given = EXCEPTIONS.get(config_class.model_type, {})
    if "layer_types" in given:
        given = {"num_hidden_layers": len(given["layer_types"])} | given
    subs = getattr(config_class, "sub_configs_defaults", None) or {}
    made: dict[str, Any] = dict(defaults)
    for field in dataclasses.fields(config_class):
        if field.name not in subs and field.name not in given:
            made |= _sized(field, window, special)
    for name, spec in subs.items():
        made[name] = _sub_config(spec, window, special) if name not in given else None
    if "kv_lora_rank" in made and "num_key_value_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    return made | _layers(config_class, made | given) | given


def _sized(field: dataclasses.Field[Any], window: int, special: Iterator[int]) -> dict[str, Any]:
    """The field with its size, if it has one."""
    name, value = field.name, field.default
    if name in SIZES or name in WINDOWS:
        kinds = re.sub(r"(list|tuple)\[[^]]*\]", "", str(field.type))
        size = SIZES.get(name, window)
        return {name: size} if re.search(r"\b(int|float|bool)\b", kinds) else {}
    if isinstance(value, float) and any(part in name for part in OFF):
        return {name: 0.0}
    if _is_token(name) and isinstance(value, int) and value >= TOKENS.start:
        return {name: next(special)}
    return {}


def _is_token(name: str) -> bool:
    return name.endswith(("token_id", "token_index", "_start_id", "_end_id", "newline_id"))


def _sub_config(spec: Any, window: int, special: Iterator[int]) -> dict[str, Any]:
    found = spec.config_class
    if not dataclasses.is_dataclass(found):  # AutoConfig
        found = spec.get_config_class(spec.model_type)
    kept = {
        name: value for name, value in spec.init_kwargs.items() if name not in {*SIZES, *WINDOWS}
    }
    return {"model_type": spec.model_type, **_arguments(found, window, special, **kept)}


_SWITCHES = {"use_sliding_window", "sliding_window", "max_window_layers", "first_k_dense_replace"}
"""Fields that decide which kinds of layers there are."""


def _layers(config_class: Any, made: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind: the lists of the default config, at the first layer of each kind."""
    names = {field.name for field in dataclasses.fields(config_class)}
    if "num_hidden_layers" not in names or not names & {"layer_types", "mlp_layer_types"}:
        return {}
    few = {name: made[name] for name in _SWITCHES & made.keys()}
    default = config_class(**few)
    lists = {
        name: list(value)
        for name in ("layer_types", "mlp_layer_types")
        if name in names and (value := getattr(default, name, None))
    }
    if not lists:
        return {}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=False)))
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    chosen: dict[str, Any] = {name: [kind[i] for kind in kinds] for i, name in enumerate(lists)}
    return {"num_hidden_layers": len(kinds), **chosen}
