"""Hugging Face: a batch as keyword arguments, and which models keep packed segments apart."""

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

# What sees a fixed way back and depends on nothing but the mask.
_MASKED_LAYERS = {"full_attention", "sliding_attention"}
_MASK_MAKERS = {"create_causal_mask", "create_sliding_window_causal_mask"}


def hf_kwargs(batch: Batch, *, labels: bool = False) -> dict[str, Any]:
    """The keyword arguments for `model(**hf_kwargs(batch))`.

    Rows of several segments carry their boundaries twice: `cu_seq_lens_q/k` and `max_length_q/k`
    for flash attention, and positions that start again for the others. They must come without an
    attention mask and without a cache, or transformers stops looking for boundaries and every
    segment sees those before it. Rows of one segment each carry an attention mask instead.

    With `labels`, the model's own loss is asked for; it shifts by itself, and no segment's end
    predicts the next one's beginning.
    """
    kwargs = {
        "input_ids": batch.tokens,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    if batch.rows > 1 and one_segment_per_row(batch):
        mask = batch.token_mask
        # A row of padding alone sees itself: a mask that hides all of it has no softmax.
        kwargs["attention_mask"] = (mask | ~mask.any(1, keepdim=True)).long()
    else:
        kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_k"] = batch.cu_seqlens
        kwargs["max_length_q"] = kwargs["max_length_k"] = batch.max_seqlen
    if labels:
        kwargs["labels"] = batch.unshifted_labels
    return kwargs


class Support(NamedTuple):
    """Whether a model may be given packed batches, and why."""

    safe: bool
    why: str


def supports_packing(model: Any) -> Support:
    """Whether a transformers model keeps packed segments apart, given `hf_kwargs`.

    Decided from its layers and its attention implementation, without running it; what is not
    known to be safe is not. `evenstep.testing.find_leaks` proves it either way.
    """
    parts = [part for part in model.modules() if hasattr(part, "config")]
    if not parts:
        return Support(False, f"{_name(model)} has no config to decide from; ask find_leaks")
    config = parts[0].config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    support = _layers(model, config)
    if support is not None:
        return support
    if not any("position_ids" in inspect.signature(part.forward).parameters for part in parts):
        return Support(False, "it takes no position_ids, so positions would run on")
    return _implementation(model, config)


def choose_layout(model: Any, layout: Layout) -> Layout:
    """The layout itself if the model can take it; else, with a warning, the padded one that keeps
    its bounds. Ask before planning: a batch formed by sums would break the budget when padded.
    """
    padded = layout.padded()
    if padded == layout:
        return layout
    support = supports_packing(model)
    if support.safe:
        return layout
    warnings.warn(
        f"{_name(model)} cannot take packed batches: {support.why}. Falling back to the padded "
        f"layout, which wastes the padding but keeps samples apart.",
        stacklevel=2,
    )
    return padded


def _layers(model: Any, config: Any) -> Support | None:
    """Layers that no mask keeps apart; None if there is no such layer."""
    if getattr(config, "is_encoder_decoder", False):
        return Support(False, "the encoder's attention looks both ways, past every boundary")
    encodes = getattr(config, "is_decoder", True) is False
    if (encodes and _calls(model, "create_bidirectional_mask")) or not getattr(
        config, "is_causal", True
    ):
        return Support(False, "its attention looks both ways, past every boundary")
    if any(getattr(part, "_is_stateful", False) for part in model.modules()):
        return Support(False, "its recurrent state runs on from one segment to the next")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS)
    if others:
        return Support(
            False, f"its {', '.join(others)} layers carry state or blocks across boundaries"
        )
    return None


def _implementation(model: Any, config: Any) -> Support:
    name = str(getattr(config, "_attn_implementation", None))
    if "flash" in name and "paged" not in name:
        if not any(getattr(part, "_supports_attention_backend", False) for part in model.modules()):
            return Support(False, f"its own use of {name} does not pass cu_seq_lens on")
        return Support(True, f"{name} takes the boundaries from cu_seq_lens")
    if name not in ("sdpa", "eager", "flex_attention"):
        return Support(False, f"nothing is known of the attention implementation {name!r}")
    from transformers import masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        return Support(False, f"{name} masks of this transformers ignore position_ids")
    makers = _calls(model, *_MASK_MAKERS)
    if not makers:
        return Support(False, f"{name} is used without the masks that find boundaries")
    if not all(makers.values()):
        at = next(where for where, positions in makers.items() if not positions)
        return Support(False, f"{at} makes its {name} mask without position_ids")
    return Support(True, f"{name} masks find boundaries where position_ids start again")


def _calls(model: Any, *makers: str) -> dict[str, bool]:
    """The model classes in it that make masks, and whether they give position_ids to do so."""
    found: dict[str, bool] = {}
    for kind in dict.fromkeys(type(part) for part in model.modules()):
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
            given = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            if given & set(makers):
                names |= {part.id for part in node.targets if isinstance(part, ast.Name)}
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
