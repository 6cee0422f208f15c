"""Hugging Face: keyword arguments for models, and which models support packed batches."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import warnings
from typing import Any, NamedTuple

from evenstep.core.layout import Layout
from evenstep.tensors.batch import Batch
from evenstep.tensors.masks import one_segment_per_row

# Layer types in which attention depends on the mask only.
_MASKED_LAYERS = {"full_attention", "sliding_attention"}
_MASK_MAKERS = {"create_causal_mask", "create_sliding_window_causal_mask"}


def hf_kwargs(batch: Batch, *, labels: bool = False) -> dict[str, Any]:
    """Keyword arguments for `model(**hf_kwargs(batch))`.

    Rows of several segments mark boundaries twice: `cu_seq_lens_q/k` and `max_length_q/k` for
    flash attention, and `position_ids` that restart at 0 for other implementations. They come
    without an attention mask and without a cache; otherwise transformers ignores the boundaries
    and segments attend to earlier ones. Rows of one segment have an attention mask instead.

    With `labels=True`, the model computes its own loss. It shifts the labels; the first label of
    each segment is ignored.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> hf_kwargs(batch)["cu_seq_lens_q"].tolist()
    [0, 2, 3]
    """
    kwargs = {
        "input_ids": batch.tokens,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    if batch.rows > 1 and one_segment_per_row(batch):
        mask = batch.token_mask
        # A row of padding attends to itself: softmax over a fully masked row is NaN.
        kwargs["attention_mask"] = (mask | ~mask.any(1, keepdim=True)).long()
    else:
        kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_k"] = batch.cu_seqlens
        kwargs["max_length_q"] = kwargs["max_length_k"] = batch.max_seqlen
    if labels:
        kwargs["labels"] = batch.unshifted_labels
    return kwargs


class Support(NamedTuple):
    """Whether a model supports packed batches, and why.

    >>> safe, why = Support(True, "flash_attention_2 reads the boundaries from cu_seq_lens")
    """

    safe: bool
    why: str


def supports_packing(model: Any) -> Support:
    """Whether attention of a transformers model stays within segments, given `hf_kwargs`.

    Decided from the layers and the attention implementation, without running the model. Unknown
    ones are reported as unsafe. `evenstep.testing.find_leaks` tests it by running the model.

        safe, why = supports_packing(AutoModelForCausalLM.from_pretrained(name))
    """
    modules = [module for module in model.modules() if hasattr(module, "config")]
    if not modules:
        return Support(False, f"{_name(model)} has no config; test it with find_leaks")
    config = modules[0].config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    support = _layers(model, config)
    if support is not None:
        return support
    signatures = (inspect.signature(module.forward) for module in modules)
    if not any("position_ids" in signature.parameters for signature in signatures):
        return Support(False, "its forward does not take position_ids")
    return _implementation(model, config)


def choose_layout(model: Any, layout: Layout) -> Layout:
    """The layout if the model supports it, else the padded layout with the same bounds.

    Falling back emits a warning. Call this before planning: a packed plan cannot be padded within
    its budget.

        recipe = Recipe(layout=choose_layout(model, Packed(max_tokens=8192)))
    """
    padded = layout.padded()
    if padded == layout:
        return layout
    support = supports_packing(model)
    if support.safe:
        return layout
    warnings.warn(
        f"{_name(model)} does not support packed batches: {support.why}. Using the padded layout "
        f"instead.",
        stacklevel=2,
    )
    return padded


def _layers(model: Any, config: Any) -> Support | None:
    """Unsupported if a layer mixes segments whatever the mask; None if there is no such layer."""
    if getattr(config, "is_encoder_decoder", False):
        return Support(
            False, "the attention of its encoder is bidirectional and crosses segment boundaries"
        )
    encodes = getattr(config, "is_decoder", True) is False
    if (encodes and _calls(model, "create_bidirectional_mask")) or not getattr(
        config, "is_causal", True
    ):
        return Support(False, "its attention is bidirectional and crosses segment boundaries")
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        return Support(False, "its recurrent state carries over from one segment to the next")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS)
    if others:
        return Support(False, f"its {', '.join(others)} layers cross segment boundaries")
    return None


def _implementation(model: Any, config: Any) -> Support:
    name = str(getattr(config, "_attn_implementation", None))
    if "flash" in name and "paged" not in name:
        if not any(
            getattr(module, "_supports_attention_backend", False) for module in model.modules()
        ):
            return Support(False, f"its {name} code does not pass cu_seq_lens on")
        return Support(True, f"{name} reads the boundaries from cu_seq_lens")
    if name not in ("sdpa", "eager", "flex_attention"):
        return Support(False, f"its attention implementation {name!r} is unknown")
    from transformers import masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        return Support(False, f"{name} masks of the installed transformers ignore position_ids")
    makers = _calls(model, *_MASK_MAKERS)
    if not makers:
        return Support(
            False, f"it does not build its {name} mask with the functions that detect boundaries"
        )
    if not all(makers.values()):
        at = next(where for where, positions in makers.items() if not positions)
        return Support(False, f"{at} builds its {name} mask without position_ids")
    return Support(True, f"{name} masks detect boundaries where position_ids restart")


def _calls(model: Any, *makers: str) -> dict[str, bool]:
    """Classes in the model that build masks, and whether they pass position_ids."""
    found: dict[str, bool] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        module = sys.modules.get(kind.__module__)
        if hasattr(kind, "config_class") and any(hasattr(module, maker) for maker in makers):
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
            calls = _calls_of(tree, makers)
            if calls:
                found[kind.__name__] = _gives_positions(tree, calls)
    return found


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


def _name(model: Any) -> str:
    return type(model).__name__


__all__ = ["Support", "choose_layout", "hf_kwargs", "supports_packing"]
