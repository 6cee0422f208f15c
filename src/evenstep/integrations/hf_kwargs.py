"""hf_kwargs: a batch as keyword arguments of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigError, InputError
from evenstep.integrations.hf_model import Traits, core_of, refuse_router_loss, traits_of
from evenstep.integrations.rope import rope_planes
from evenstep.tensors.batch import Batch, BatchShard, RaggedTensor
from evenstep.tensors.segment_attention import one_segment_per_row

_TYPES = ("mm_token_type_ids", "token_type_ids")
# Arguments that this module sets itself, or that change what a model returns.
_OWN = ("input_ids", "attention_mask", "position_ids", "labels", "past_key_values", "inputs_embeds")


def hf_kwargs(batch: Batch, model: Any = None, *, labels: bool = False) -> dict[str, Any]:
    """Keyword arguments for `model(**hf_kwargs(batch, model))`.

    Rows of several segments mark boundaries twice: `cu_seq_lens_q/k` and `max_length_q/k` for
    flash attention, and `position_ids` that restart at 0 for other implementations. They come
    without an attention mask and without a cache; otherwise transformers ignores the boundaries
    and segments attend to earlier ones. Rows of one segment have an attention mask instead.

    With `model`, the arguments also are what that model needs: extras of the batch that its
    forward takes (`pixel_values`, `image_grid_thw`, ...), positions of multimodal RoPE, positions
    that start at `padding_idx + 1` (RoBERTa), and a token in padding that is not the padding token,
    whose zero embedding gives Gemma-3n NaN gradients. Batches that its RoPE cannot run are refused.
    `hf_forward` passes the model.

    With `labels=True`, the model computes its own loss, as a sum over the labels
    (`num_items_in_batch` is 1): what `Runner` takes, and 0 for a micro-batch without labels. It
    needs `model`: one whose loss is not such a sum is refused, also for the load-balancing loss
    that `output_router_logits=True` adds to it.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> hf_kwargs(batch)["cu_seq_lens_q"].tolist()
    [0, 2, 3]
    """
    refuse_shard(batch)
    real = batch.token_mask
    traits = None if model is None else traits_of(model)
    if traits is not None and traits.encodes_and_decodes:
        raise ConfigError(
            f"{type(model).__name__} has an encoder and a decoder, which take two sequences per "
            f"sample. Pass a forward that gives it both, over padded rows."
        )
    inputs = _extras(batch, traits)
    kwargs: dict[str, Any] = {
        "input_ids": _filled(batch, real, traits),
        "position_ids": _positions(batch, real, model, traits, inputs),
        "use_cache": False,
        **{name: _value(extra) for name, extra in inputs.items() if _holds(extra)},
    }
    if one_segment_per_row(batch) and (batch.rows > 1 or not bool(real.all())):
        # A row of padding attends to itself: softmax over a fully masked row is NaN.
        kwargs["attention_mask"] = (real | ~real.any(1, keepdim=True)).long()
    elif not (traits and traits.has_tower and any(map(_is_media, inputs.values()))):
        # Not with images: transformers passes these on to the vision tower, which has its own.
        kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_k"] = batch.cu_seqlens
        kwargs["max_length_q"] = kwargs["max_length_k"] = batch.max_seqlen
    if labels:
        kwargs |= loss_inputs(batch, model)
        refuse_router_loss(
            model, "Use `hf_forward(model, outputs='router_logits')` with the loss load_balancing"
        )
    return kwargs if traits is None else traits.accepted(kwargs)


def refuse_shard(batch: Any) -> None:
    """Raise if `batch` is a shard: a transformers model attends within its own tokens."""
    if isinstance(batch, BatchShard):
        raise InputError(
            "a Hugging Face model cannot run a batch shard, because its attention sees only the "
            "tokens of one rank. Pass the whole batch, or use a model whose attention gathers "
            "keys, such as context_attention of evenstep.train."
        )


# Extras ----------------------------------------------------------------------------------------


def _extras(batch: Batch, traits: Traits | None) -> dict[str, Any]:
    """The extras that the model's forward takes, and the type of each token if it is derived."""
    if traits is None:
        _refuse_vision(batch)
        return {}
    accepted = traits.parameters
    found: dict[str, Any] = {
        name: extra
        for name, extra in batch.extras.items()
        if name in accepted and name not in _OWN and batch.aligned.get(name) != "label"
    }
    given = [name for name, extra in found.items() if isinstance(extra, RaggedTensor)]
    if given:
        split = bool((batch.starts > 0).any()) or batch.continuation is not None
        if split:
            raise InputError(
                f"a sample with {given[0]!r} was split, and its parts cannot share it. Use "
                f"another overflow than 'split'."
            )
    for name in _TYPES:
        if name in found:
            found[name] = found[name].long()
    if given and "mm_token_type_ids" in accepted and "mm_token_type_ids" not in found:
        found["mm_token_type_ids"] = _types(batch.tokens, traits.media)
    return found


def _types(tokens: Tensor, media: tuple[int | None, ...]) -> Tensor:
    """0 for text, 1 for image and 2 for video tokens, by the ids of those tokens."""
    types = torch.zeros_like(tokens)
    for kind, token in enumerate(media, 1):
        if token is not None:
            types[tokens == token] = kind
    return types


def _holds(extra: Any) -> bool:
    """Whether there is anything in it: a vision tower fails on no patches."""
    return not isinstance(extra, RaggedTensor) or len(extra.values) > 0


def _is_media(extra: Any) -> bool:
    return isinstance(extra, RaggedTensor) and _holds(extra)


def _value(extra: Any) -> Any:
    """Ragged entries are concatenated in the order of the segments, which is that of tokens."""
    return extra.values if isinstance(extra, RaggedTensor) else extra


def _refuse_vision(batch: Batch) -> None:
    for name in ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"):
        if name in batch.extras:
            raise ConfigError(
                f"the batch has {name!r}, whose use depends on the model. Pass it: "
                f"hf_kwargs(batch, model)."
            )


# Tokens and positions --------------------------------------------------------------------------


def _filled(batch: Batch, real: Tensor, traits: Traits | None) -> Tensor:
    """The tokens, with padding that is not the padding token of the model."""
    if traits is None:
        # The first real token of the batch.
        fill = batch.tokens.reshape(-1)[real.reshape(-1).to(torch.uint8).argmax()]
        return torch.where(real, batch.tokens, fill)
    return batch.tokens.masked_fill(~real, traits.plain_token)


def _positions(
    batch: Batch, real: Tensor, model: Any, traits: Traits | None, inputs: Mapping[str, Any]
) -> Tensor:
    """Positions that start at 0 in each segment. Those of padding stay below the longest segment:
    beyond it, longrope would change its frequencies and learned positions may not exist."""
    positions = batch.position_ids % batch.seqlens.max().clamp(min=1)
    if traits is None:
        return positions
    if traits.rope_limit is not None:
        traits.rope_limit.check(batch)
    if traits.rope_indexer is not None:
        index = core_of(model).get_submodule(traits.rope_indexer).get_rope_index
        planes = rope_planes(batch, index, traits.rope_axes, positions, inputs)
        return torch.cat((positions[None], planes)) if traits.text_plane else planes
    return positions if traits.padding is None else _counted(batch, real, traits.padding)


def _counted(batch: Batch, real: Tensor, padding: int) -> Tensor:
    """`padding` + 1 for the first token of a segment that is not the padding token, and so on;
    `padding` for padding tokens: what `create_position_ids_from_input_ids` gives a sample alone."""
    counts = (real & (batch.tokens != padding)).reshape(-1).long()
    done = counts.cumsum(0)
    begins = batch.cu_seqlens[:-1].long()
    before = (done - counts)[begins.clamp(max=len(done) - 1)]
    found = (done - before[batch.segment_ids.reshape(-1)]) * counts + padding
    return found.view_as(batch.tokens)


# The call --------------------------------------------------------------------------------------


def loss_inputs(batch: Batch, model: Any) -> dict[str, Any]:
    """Labels, and what makes the model's loss a sum. `shift_labels` also has the labels of a split
    sample that are in its next segment."""
    if model is None:
        raise ConfigError(
            "labels=True needs the model, because not every model's loss is a sum over labels. "
            "Pass hf_kwargs(batch, model, labels=True), HfCollate(model=model) or "
            "accelerate_loader(..., model=model)."
        )
    if not traits_of(model).sums_loss:
        raise ConfigError(
            f"{traits_of(model).name} computes a mean over the labels of a micro-batch, which is "
            f"NaN without labels and not the loss of a step. Use its logits with cross_entropy()."
        )
    return {
        "labels": batch.unshifted_labels,
        "shift_labels": batch.labels,
        "num_items_in_batch": 1,
    }
