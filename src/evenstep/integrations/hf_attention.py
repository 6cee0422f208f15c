"""Evenstep's attention as an attention implementation of transformers.

    import evenstep.integrations.hf_attention
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="evenstep")

    use_attention(model)  # or on a loaded model, with a check that its layers call it

Segments are told apart by `cu_seq_lens_q`, else by `position_ids` that restart. A 2-D padding mask
is honoured. With neither, each row is one segment. Where samples share prefixes, `key_slots` and
`cu_seq_lens_k` say which keys a segment sees; where ranks share samples, `exchange` does too.
Sliding windows, soft caps and sinks are exact.
Refused, with an error: chunks, image blocks that see both ways, position biases, a cache, masks of
other shapes, and every keyword that is not understood.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from evenstep.errors import ConfigError
from evenstep.integrations.hf_arguments import configs_in, hf_kwargs, traits_of
from evenstep.integrations.huggingface import BOUNDARIES_GIVEN, carries_state, support_of
from evenstep.integrations.mixers import mixers_of
from evenstep.integrations.probes import packed_row
from evenstep.tensors.batch import BatchExchange, Boundaries, on_host
from evenstep.tensors.segment_attention import Call, attend
from evenstep.train.framework import undisturbed

__all__ = ["register_attention", "use_attention"]


NAME = "evenstep"

# Keywords of `model(...)` and of attention layers that do not change attention.
_IGNORED = {
    "cache_position", "deterministic", "labels", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "return_dict", "seq_idx", "shift_labels",
    "use_cache",
}  # fmt: skip
_REASONS = {
    "position_bias": "adds a position bias to its scores",
    "output_attentions": "asks for attention weights, which are never computed",
    "cache": "uses a paged cache",
    "indices": "selects keys by indices",
    "block_indices": "selects blocks of keys",
}


def attention_function(
    module: nn.Module,
    query: Tensor,  # (rows, heads, width, dim)
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    key_slots: Tensor | None = None,
    exchange: BatchExchange | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: attention within segments, (rows, width, heads, dim).

    `model(**hf_kwargs(batch))` passes the boundaries of a batch.
    """
    _refuse_keywords(module, keywords)
    _refuse_lengths(module, query, key, cu_seq_lens_q, cu_seq_lens_k, key_slots)
    rule = rule_of(attention_mask)
    if rule is None:  # what the layer says, not its mask
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        rule = Rule(causal, sliding_window, attention_mask is not None)
    hints = Hints(
        rows=query.shape[0],
        width=query.shape[2],
        device=query.device,
        cu_seqlens=cu_seq_lens_q,
        longest=None if max_length_q is None else int(max_length_q),
        padding=_padding_mask(attention_mask) if rule.padded else None,
        # Encoders and vision towers have positions that say nothing about segments.
        positions=position_ids if rule.causal else None,
    )
    if key_slots is not None:  # samples share prefixes, or ranks share samples
        assert cu_seq_lens_k is not None
        received = 0 if exchange is None else sum(exchange.received)
        keys = (key_slots, cu_seq_lens_k, int(max_length_k or len(key_slots)), received)
        hints = replace(hints, keys=keys)
    if sliding_window not in (None, rule.window):
        raise ConfigError(
            f"a layer passes sliding_window={sliding_window}, but its mask has "
            f"{'no window' if rule.window is None else f'a window of {rule.window}'}. Use "
            f"attn_implementation='sdpa' for this model."
        )
    bounds = hints.boundaries()
    if not torch.compiler.is_compiling() and (calls := _CALLS.get()) is not None:
        calls.append((module, bounds))
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return value.new_zeros(shape), None
    # One dtype for all three: that of autocast, else that of the value, which is as projected.
    kind = value.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if exchange is not None:
        key, value = exchange.join(key, value, rule.causal)
    call = Call(
        query, key, value, bounds, rule.causal, rule.window, scaling, softcap, s_aux, dropout
    )
    return attend(call).transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make attn_implementation="evenstep" known to transformers. Importing this module does it.

    >>> register_attention()
    >>> from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    >>> "evenstep" in ALL_ATTENTION_FUNCTIONS
    True
    """
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def use_attention(model: Any, **inputs: Any) -> Any:
    """Switch a loaded model, or the model inside a PeftModel, to Evenstep's attention.

    A forward of a few tokens checks that every attention layer that runs calls it and receives
    the boundaries of segments, because transformers only logs a warning where it is not called.
    If not, raises `ConfigError` with the reason and leaves the model as it was. `inputs` are
    further arguments of that forward, for models that need more than tokens.

        model = use_attention(AutoModelForCausalLM.from_pretrained(name))
    """
    roots = _roots(model)
    if not roots:
        raise ConfigError(
            f"{type(model).__name__} holds no transformers model. Use evenstep.tensors.attention "
            f"in your own attention layers."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has parameters on the meta device, so it cannot be checked. "
            f"Load its weights first, or build it with attn_implementation={NAME!r}."
        )
    modules = [module for root in roots for module in root.modules()]
    configs = [c for m in modules for c in configs_in(getattr(m, "config", None))]
    before = {id(config): (config, config._attn_implementation) for config in configs}
    on_rows = any(mixers_of(root) for root in roots)
    why: str | None = "interrupted"
    try:
        for root in roots:
            root.set_attn_implementation(NAME)
        why = fault_of(model, **inputs)
    finally:
        for config, implementation in () if why is None else before.values():
            # The setter would change nested configurations as well.
            config._attn_implementation_internal = implementation
    if why is not None:
        if on_rows:
            support_of(model)  # wraps the mixers again, for the implementation from before
        raise ConfigError(
            f"{type(roots[0]).__name__} does not run with attn_implementation={NAME!r}: {why}. "
            f"Keep its implementation, with the padded layout."
        )
    return model


# Whether a model calls the function, with boundaries ----------------------------------------------

_PAIR = (3, 2)
"""The segments of the packed row that is run."""
_CALLS: ContextVar[list[tuple[nn.Module, Boundaries]] | None] = ContextVar("calls", default=None)
"""Where the attention function records its calls during that forward, instead of computing."""


def fault_of(model: Any, **inputs: Any) -> str | None:
    """Why a model that has this attention implementation would not run it within segments, by one
    packed forward with recorded calls; None if it would."""
    calls: list[tuple[nn.Module, Boundaries]] = []
    ran: list[nn.Module] = []  # attention layers, by their names
    roots = _roots(model)
    if not roots:
        return None
    inside: set[nn.Module] = set()  # mixers, which run on rows, with or without attention
    if carries_state(model):
        support_of(model)
        inside = {
            part for root in roots for mixer in mixers_of(root).values() for part in mixer.modules()
        }
    try:
        tokens = torch.tensor(traits_of(roots[0]).plain_tokens(sum(_PAIR)))
        batch = packed_row(tokens.split(_PAIR))
        batch = batch.to(roots[0].get_input_embeddings().weight.device)
        with undisturbed(model), ExitStack() as stack:
            for part in model.modules():
                if "attention" in type(part).__name__.lower():
                    hook = part.register_forward_pre_hook(lambda part, _: ran.append(part))
                    stack.callback(hook.remove)
            stack.callback(_CALLS.reset, _CALLS.set(calls))
            model(**hf_kwargs(batch, roots[0] if inside else None), **inputs)
    except ConfigError as error:
        return str(error).rstrip(".")
    except Exception as error:
        line = str(error).strip().partition("\n")[0][:200]
        return f"a forward of {sum(_PAIR)} tokens failed with {type(error).__name__}: {line}"
    calls = [call for call in calls if call[0] not in inside]
    ran = [layer for layer in ran if layer not in inside]
    if not calls and not inside:
        return "its attention layers do not call transformers' attention interface"
    called = {part for module, _ in calls for part in module.modules()}
    for layer in ran:
        if called.isdisjoint(layer.modules()):
            return f"its {type(layer).__name__} does not call transformers' attention interface"
    for module, bounds in calls:
        if bounds.cu_seqlens.tolist() != batch.cu_seqlens.tolist():
            kind = type(module).__name__
            return f"its {kind} receives neither cu_seq_lens_q nor position_ids that restart"
    return None


def _roots(model: Any) -> list[Any]:
    """The outermost transformers models inside a module."""
    if isinstance(model, PreTrainedModel):
        return [model]
    children = model.children() if isinstance(model, nn.Module) else ()
    return [root for child in children for root in _roots(child)]


# What is refused ----------------------------------------------------------------------------------


def _refuse_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        if value is None or value is False or name in _IGNORED:
            continue
        reason = _REASONS.get(name, f"passes {name!r}, which is not understood")
        raise ConfigError(
            f"{type(module).__name__} {reason}. Use attn_implementation='sdpa' or 'eager' and the "
            f"padded layout, or leave out the keyword {name!r} if it is yours."
        )


def _refuse_lengths(
    module: nn.Module, query: Tensor, key: Tensor, ends: Tensor | None, key_ends: Tensor | None,
    key_slots: Tensor | None,
) -> None:  # fmt: skip
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"{type(module).__name__} has {key.shape[2]} keys for {query.shape[2]} queries, from a "
            f"cache, a prefix or another sequence. Pass use_cache=False, and generate with "
            f"attn_implementation='sdpa'."
        )
    compiled = torch.compiler.is_compiling()
    if key_slots is None and not compiled and "key_slots" in BOUNDARIES_GIVEN.get():
        raise ConfigError(
            f"{type(module).__name__} does not receive the slots of its keys, so samples cannot "
            f"share prefixes, nor ranks samples. Plan without prefixes and without sharing."
        )
    if ends is None and key_ends is not None:
        raise ConfigError("cu_seq_lens_k is given without cu_seq_lens_q. Pass both.")
    if ends is None or key_ends is None or ends is key_ends or key_slots is not None:
        return
    # Compiled code must not read the device.
    if ends.shape != key_ends.shape or not (compiled or torch.equal(ends, key_ends)):
        raise ConfigError(
            "cu_seq_lens_q and cu_seq_lens_k differ. Pass the same boundaries for queries and keys."
        )


# The mask function that transformers calls --------------------------------------------------------
#
# No width × width mask is built. What comes back is the 2-D padding mask of the caller, or ones,
# and carries the rule that the mask stands for: some layers say themselves neither that they are
# causal nor what their window is. Rules that attention within segments cannot follow are refused:
# chunks, image blocks that see both ways, and unknown ones.


class Rule(NamedTuple):
    """What a mask stands for."""

    causal: bool
    window: int | None
    padded: bool  # whether the tensor is a padding mask, not just ones


# Rules of transformers.masking_utils that attention within segments follows.
_FOLLOWED = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "padding_mask_function.<locals>.inner_mask",
}
_AND, _OR = "and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"


def mask_function(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    device: Any = None,
    **options: Any,
) -> Tensor:
    """A (rows, width) bool tensor, the padding mask or ones, that carries its `Rule`."""
    if rule_of(attention_mask) is not None:
        # A model that made its mask passes it to its language model, which keeps it as it is.
        assert attention_mask is not None
        return attention_mask
    chunk = getattr(config, "attention_chunk_size", None)
    slides = getattr(config, "sliding_window", None) == chunk and kv_length <= (chunk or 0)
    if local_size is not None and local_size == chunk and not slides:
        raise ConfigError(
            f"attn_implementation='evenstep' does not support chunked attention "
            f"(attention_chunk_size={chunk}). Use attn_implementation='sdpa' and the padded layout."
        )
    causal = "allow_is_bidirectional_skip" not in options
    if device is None:
        device = "cpu" if attention_mask is None else attention_mask.device
    if mask_function is not None:
        custom = options.get("use_vmap")
        _refuse_unknown(mask_function, batch_size, kv_length, device, custom, causal)
    window = local_size
    if window is not None and not causal:
        window += 1  # a window of transformers that sees both ways includes this distance
    if attention_mask is None:
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        mask = attention_mask.view(attention_mask.shape)  # the caller's own gets no attribute
    mask._evenstep_rule = Rule(causal, window, attention_mask is not None)
    return mask


def rule_of(mask: Any) -> Rule | None:
    """The rule that a mask carries; None for other masks."""
    rule: Rule | None = getattr(mask, "_evenstep_rule", None)
    return rule


def _padding_mask(mask: Any) -> Tensor:
    """The mask of the caller, which must be one of padding."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
        shape = f" of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else ""
        raise ConfigError(
            f"attn_implementation='evenstep' takes a 2-D padding mask or none, got "
            f"{type(mask).__name__}{shape}. Give boundaries as cu_seq_lens_q or position_ids, or "
            f"use attn_implementation='sdpa'."
        )
    return mask


def _refuse_unknown(
    rule: Callable[..., Tensor],
    rows: int,
    width: int,
    device: Any,
    custom: bool | None,
    causal: bool,
) -> None:
    """Refuse rules that are not followed. Additions that make nothing more visible pass."""
    if torch.compiler.is_compiling():
        if custom:
            raise ConfigError(
                "a compiled model must not add rules of its own to the attention mask. Use "
                "attn_implementation='sdpa' or do not compile it."
            )
        if causal:
            torch._assert_async(~_ahead(rule, rows, width, device), "tokens see later tokens")
        return
    added = _added(rule)
    if causal and added and bool(_ahead(rule, rows, width, device)):
        raise ConfigError(
            "attn_implementation='evenstep' is causal, but in this batch some tokens see later "
            "ones, such as image blocks that see both ways. Use attn_implementation='sdpa' and "
            "the padded layout."
        )


def _added(rule: Any) -> bool:
    """Whether a rule adds to what causal attention sees. Raises if it is not known."""
    name = getattr(rule, "__qualname__", "")
    if not getattr(rule, "__module__", "").startswith("transformers."):
        name = ""
    if name in _FOLLOWED:
        return False
    if name in (_AND, _OR):
        parts = rule.__closure__[0].cell_contents
        if name == _AND:
            return sum(map(_added, parts)) > 0  # all of them, so that an unknown one raises
        return not all(getattr(part, "__qualname__", "") in _FOLLOWED for part in parts)
    raise ConfigError(
        f"attn_implementation='evenstep' does not know the attention rule "
        f"{getattr(rule, '__qualname__', rule)!r}. Use attn_implementation='sdpa' and the padded "
        f"layout."
    )


def _ahead(rule: Callable[..., Tensor], rows: int, width: int, device: Any) -> Tensor:
    """Whether any token sees the one after it; () bool."""
    row = torch.arange(rows, device=device)[:, None]
    head = torch.zeros_like(row)
    slot = torch.arange(max(width - 1, 0), device=device)[None, :]
    return rule(row, head, slot, slot + 1).any()


# Boundaries from what a model hands to its attention ----------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Hints:
    """What says where segments begin and end in rows × width slots.

    cu_seqlens  boundaries over all slots, row by row
    longest     at least the length of the longest segment, or None
    padding     (rows, width) True for tokens, False for padding
    positions   (rows, width) or (planes, rows, width); they restart with each segment
    keys        slots, boundaries and longest of the keys that segments see, if not their own, and
                how many keys other ranks send
    """

    rows: int
    width: int
    device: torch.device
    cu_seqlens: Tensor | None = None
    longest: int | None = None
    padding: Tensor | None = None
    positions: Tensor | None = None
    keys: tuple[Tensor, Tensor, int, int] | None = None

    def boundaries(self) -> Boundaries:
        """The boundaries, computed once per batch: all layers pass the same tensors."""
        self._check()
        tensors = [t for t in (self.padding, self.positions, self.cu_seqlens) if t is not None]
        tensors += () if self.keys is None else self.keys[:2]
        compiled = torch.compiler.is_compiling()
        if compiled or not tensors or any(tensor.is_inference() for tensor in tensors):
            # Tensors that were made in inference mode do not tell when they are changed.
            return self._seeing(_traced(self) if compiled else _read(self))
        first, *others = tensors
        versions = [tensor._version for tensor in tensors]
        key = (self.rows, self.width, [id(tensor) for tensor in others], versions)
        if first not in _READ or _READ[first][0] != key:
            # `others` stay alive with the result, so that no other tensors have their ids.
            _READ[first] = key, others, self._seeing(_read(self))
        return cast(Boundaries, _READ[first][2])

    def _seeing(self, bounds: Boundaries) -> Boundaries:
        return bounds if self.keys is None else bounds.seeing(*self.keys)

    def _check(self) -> None:
        shape = (self.rows, self.width)
        if self.padding is not None and tuple(self.padding.shape) != shape:
            raise ConfigError(
                f"the attention mask has shape {tuple(self.padding.shape)}, but the queries are "
                f"{self.rows} rows of {self.width} tokens. Pass a mask of that shape, without a "
                f"cache or a prefix."
            )
        at = self.positions
        if at is None:
            return
        fits = at.ndim in (2, 3) and at.shape[-1] == self.width and at.shape[-2] in (1, self.rows)
        # Planes of multimodal RoPE: time, height and width, and those of text before.
        if not fits or (at.ndim == 3 and at.shape[0] not in (3, 4)):
            raise ConfigError(
                f"position_ids has shape {tuple(at.shape)}, expected {shape} or 3 or 4 planes of "
                f"that. Pass one position per token."
            )

    def restarts(self) -> Tensor:
        """(rows, width) bool: slots whose position does not continue that of the slot before."""
        assert self.positions is not None
        at = self.positions
        if at.ndim == 3 and at.shape[0] == 4:
            at = at[0]  # text positions
        if at.ndim == 3:
            # Within a sample the planes of an image stand still and jump. They are all 0 only at
            # the beginning, and time never runs backwards.
            begins = (at == 0).all(0)
            begins[:, 1:] |= at[0].diff(dim=1) < 0
        else:
            begins = torch.zeros_like(at, dtype=torch.bool)
            begins[:, 1:] = at.diff(dim=1) != 1
        return begins.expand(self.rows, -1)


_READ = WeakIdKeyDictionary()
"""Boundaries that were read from a tensor and others, until it is gone."""


def _whole_rows(hints: Hints) -> Boundaries:
    ends = torch.arange(hints.rows + 1, device=hints.device, dtype=torch.int32) * hints.width
    return Boundaries(hints.rows, hints.width, ends, hints.width)


def _read(hints: Hints) -> Boundaries:
    """Boundaries with the number of segments read on the host."""
    rows, width, ends = hints.rows, hints.width, hints.cu_seqlens
    if ends is None and hints.padding is None and hints.positions is None:
        return _whole_rows(hints)
    if ends is not None:
        ends = ends.to(hints.device, torch.int32, copy=True)  # what is kept must not hold its key
        _check_ends(on_host(hints.cu_seqlens), rows, width)
        if hints.padding is None:
            return Boundaries(rows, width, ends, hints.longest or int(ends.diff().max()))
    begins = torch.zeros(rows, width, dtype=torch.bool, device=hints.device)
    begins[:, 0] = True
    if ends is not None:
        begins.view(-1)[ends[:-1][ends.diff() > 0].long()] = True
    elif hints.positions is not None and hints.padding is None:
        begins |= hints.restarts()
    real = None
    if hints.padding is not None:
        begins, real = _split_padding(hints, begins)
    first = begins.view(-1).nonzero().flatten()
    real = None if real is None else real.reshape(-1)[first]
    ends = torch.cat((first, first.new_tensor([rows * width]))).to(torch.int32)
    return Boundaries(rows, width, ends, int(ends.diff().max()), real)


def _split_padding(hints: Hints, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Padding becomes tiles of its own. Refuses tokens of one segment on both sides of padding."""
    assert hints.padding is not None
    real = hints.padding.bool()
    if hints.positions is not None and hints.cu_seqlens is None:
        # A position that goes back, or stays at the first of its row, begins a segment. A jump need
        # not, nor a repetition: some models pass the temporal plane, which stands still in images.
        at = hints.positions[0] if hints.positions.ndim == 3 else hints.positions
        both = real[:, 1:] & real[:, :-1]
        if hints.positions.ndim == 3 and len(hints.positions) == 3:
            begins[:, 1:] |= hints.restarts()[:, 1:] & both
        else:
            at, step = at.expand_as(real), at.diff(dim=1)
            first = at.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
            begins[:, 1:] |= ((step < 0) | ((step == 0) & (at[:, 1:] == first))) & both
    segment = begins.view(-1).cumsum(0)
    changes = torch.zeros_like(begins)
    changes[:, 1:] = real[:, 1:] != real[:, :-1]
    tiles = begins | changes
    runs = torch.bincount(segment[(tiles & real).view(-1)])
    if bool((runs > 1).any()):
        raise ConfigError(
            "the attention mask has padding between the tokens of a sequence. Pad on the left or "
            "on the right."
        )
    return tiles, real


def _check_ends(ends: Tensor, rows: int, width: int) -> None:
    slots = rows * width
    if ends.ndim != 1 or len(ends) < 2:
        raise ConfigError(
            f"cu_seq_lens_q has shape {tuple(ends.shape)}, expected (segments + 1,). Pass "
            f"Batch.cu_seqlens."
        )
    if ends.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    begins = torch.arange(rows, device=ends.device) * width
    inside = torch.isin(begins, ends).all() & (ends.diff() >= 0).all()
    # One transfer from the device.
    first, last, fits = torch.stack((ends[0], ends[-1], inside.to(ends.dtype))).tolist()
    if first != 0 or last != slots:
        raise ConfigError(
            f"cu_seq_lens_q ends at {last}, but there are {slots} tokens ({rows} × {width}). Give "
            f"boundaries of all tokens that the model sees, virtual ones of prompt tuning "
            f"included, or use the padded layout."
        )
    if not fits:
        raise ConfigError(
            "cu_seq_lens_q must not decrease, and every row must begin a segment. Pass "
            "Batch.cu_seqlens."
        )


def _traced(hints: Hints) -> Boundaries:
    """Boundaries of a fixed number of tiles, some of them empty, without reading the device."""
    rows, width = hints.rows, hints.width
    slots = rows * width
    if hints.cu_seqlens is not None:
        if hints.padding is not None:
            raise ConfigError(
                "a compiled model takes cu_seq_lens_q or an attention mask, not both. Leave out "
                "the attention mask of packed rows."
            )
        torch._assert_async(
            hints.cu_seqlens[-1] == slots, "cu_seq_lens_q must end at the number of tokens"
        )
        ends = hints.cu_seqlens.to(hints.device, torch.int32)
        return Boundaries(rows, width, ends, hints.longest or width)
    if hints.padding is not None:
        real = hints.padding.bool()
        count = real.sum(1)
        first = real.long().argmax(1)
        run = torch.arange(width, device=hints.device)
        run = (run >= first[:, None]) & (run < (first + count)[:, None])
        torch._assert_async((run == real).all(), "the attention mask has padding between tokens")
        row = torch.arange(rows, device=hints.device) * width
        ends = torch.stack((row + first, row + first + count, row + width), dim=1).flatten()
        ends = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
        return Boundaries(rows, width, ends, width)
    if hints.positions is not None:
        begins = hints.restarts().clone()
        begins[:, 0] = True
        ends = torch.nonzero_static(begins.flatten(), size=slots + 1, fill_value=slots)
        return Boundaries(rows, width, ends.flatten().to(torch.int32), width)
    return _whole_rows(hints)


register_attention()

_find_packed = masking_utils.find_packed_sequence_indices


def _find_packed_unless_given(position_ids: Tensor) -> Tensor | None:
    """What transformers reads from positions, on the host, and our attention does not need."""
    if not torch.compiler.is_compiling() and BOUNDARIES_GIVEN.get():
        return None
    found: Tensor | None = _find_packed(position_ids)
    return found


masking_utils.find_packed_sequence_indices = _find_packed_unless_given
