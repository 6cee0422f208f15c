"""What the code of a transformers model says about packing, without running it."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

# Layer types in which attention depends on the mask only.
_MASKED_LAYERS = {"full_attention", "sliding_attention"}
_MASK_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")


class Reading(NamedTuple):
    """Whether the code keeps segments apart (None: it does not tell), and why."""

    safe: bool | None
    why: str


def text_config(model: Any) -> Any:
    """The config of the language model inside a model."""
    config = next(module.config for module in model.modules() if hasattr(module, "config"))
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def implementation_of(model: Any) -> str:
    """The name of the attention implementation of the language model."""
    return str(getattr(text_config(model), "_attn_implementation", None))


def mixing_layers(model: Any) -> str | None:
    """Why layers of the model mix segments whatever the attention function does, else None."""
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        return "the attention of its encoder is bidirectional and crosses segment boundaries"
    encodes = getattr(config, "is_decoder", True) is False
    if (encodes and _calls(model, "create_bidirectional_mask")) or not getattr(
        config, "is_causal", True
    ):
        return "its attention is bidirectional and crosses segment boundaries"
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        return "its recurrent state carries over from one segment to the next"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS)
    if others:
        return f"its {', '.join(others)} layers cross segment boundaries"
    return None


def read_attention(model: Any) -> Reading:
    """What the code says about the boundaries that reach the attention function."""
    name = implementation_of(model)
    signatures = (
        inspect.signature(module.forward) for module in model.modules() if hasattr(module, "config")
    )
    if not any("position_ids" in signature.parameters for signature in signatures):
        return Reading(False, "its forward does not take position_ids")
    if "flash" in name and "paged" not in name:
        if not any(
            getattr(module, "_supports_attention_backend", False) for module in model.modules()
        ):
            return Reading(False, f"its {name} code does not pass cu_seq_lens on")
        return Reading(True, f"{name} reads the boundaries from cu_seq_lens")
    if name in ("sdpa", "eager", "flex_attention"):
        return _read_masks(model, name)
    return Reading(None, f"its attention implementation {name!r} is unknown")


def _read_masks(model: Any, name: str) -> Reading:
    from transformers import masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        return Reading(False, f"{name} masks of the installed transformers ignore position_ids")
    makers = _calls(model, *_MASK_MAKERS)
    if not makers:
        return Reading(
            None, f"it does not build its {name} mask with the functions that detect boundaries"
        )
    if not all(makers.values()):
        at = next(where for where, positions in makers.items() if not positions)
        return Reading(None, f"{at} builds its {name} mask without position_ids")
    return Reading(True, f"{name} masks detect boundaries where position_ids restart")


def _calls(model: Any, *makers: str) -> dict[str, bool]:
    """Classes in the model that build masks, and whether they pass position_ids."""
    found: dict[str, bool] = {}
    for kind in _kinds(model):
        module = sys.modules.get(kind.__module__)
        if hasattr(kind, "config_class") and any(hasattr(module, maker) for maker in makers):
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
            calls = _calls_of(tree, makers)
            if calls:
                found[kind.__name__] = _gives_positions(tree, calls)
    return found


def _kinds(model: Any) -> Iterator[type]:
    """The classes of the model's modules with source code, not those that fully_shard makes."""
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        yield next(base for base in kind.__mro__ if "torch.distributed" not in base.__module__)


def _calls_of(tree: ast.AST, makers: tuple[str, ...]) -> list[ast.Call]:
    """create_causal_mask(...), or make(...) after make = create_causal_mask if ... else ..."""
    names = set(makers)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and not isinstance(node.value, (ast.Call, ast.Dict)):
            given = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            if given & set(makers):
                names |= {name.id for name in node.targets if isinstance(name, ast.Name)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", None) in names]


def _gives_positions(tree: ast.AST, calls: list[ast.Call]) -> bool:
    """create_causal_mask(..., position_ids=...), or (**kwargs) of a dict that has them."""
    in_dict = any(
        isinstance(key, ast.Constant) and key.value == "position_ids"
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
    )
    return all(
        any(k.arg == "position_ids" or (k.arg is None and in_dict) for k in call.keywords)
        for call in calls
    )
