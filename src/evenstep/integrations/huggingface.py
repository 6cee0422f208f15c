"""Hugging Face: how models are called with batches, and which support packed ones.

hf_forward        (model, batch) -> logits or hidden states, for `Runner`, scoring and own loops
hf_kwargs         a batch as keyword arguments of a model
HfCollate         the samples of a micro-batch as keyword arguments, with labels
hf_head           hidden states -> logits
supports_packing  whether packed segments leave a model's results as they are
choose_layout     the layout, or the padded one if the model does not support it
rope_limit        up to which length RoPE does not depend on neighbours
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from evenstep.core.layout import Layout, Packed, Padded
from evenstep.core.text import one_of
from evenstep.errors import ConfigError
from evenstep.integrations.hf_arguments import (
    HfCollate,
    RopeLimit,
    core_of,
    hf_kwargs,
    refuse_router_loss,
    refuse_shard,
    rope_limit,
    text_config,
    traits_of,
)
from evenstep.integrations.mixers import (
    Mixer,
    Rows,
    class_of,
    equal_lengths,
    has_mixers,
    mixers_of,
    register_mixer,
    registered_in,
    release,
)
from evenstep.integrations.probes import MixerSearch, Probe, carrying_lengths, probing
from evenstep.tensors.batch import PER_SLOT, Batch
from evenstep.tensors.head import Head
from evenstep.tensors.losses import select_output
from evenstep.tensors.segment_attention import one_segment_per_row
from evenstep.train.framework import mark_plain, register_forward, unwrapped
from evenstep.train.model_head import Answer, ModelHead

__all__ = [
    "HfCollate",
    "RopeLimit",
    "Support",
    "choose_layout",
    "hf_forward",
    "hf_head",
    "hf_kwargs",
    "register_mixer",
    "rope_limit",
    "supports_packing",
]


Outputs: TypeAlias = Literal["logits", "hidden", "router_logits"]
Unsupported: TypeAlias = Literal["raise", "pad"]


def hf_forward(
    model: Any,
    *,
    outputs: Outputs = "logits",
    temperature: float = 1.0,
    unsupported: Unsupported = "raise",
) -> Callable[[Any, Batch], Any]:
    """The `forward` of a Hugging Face model for `Runner`, `compute_log_probs` and other loops.

    Both use it by themselves if they are given such a model and no `forward`. At the first packed
    batch it checks `supports_packing`. The model may be in DDP, torch.compile, peft or fully_shard;
    the forward calls the wrapper that it is given, so that gradients are exchanged.

    outputs      "logits"; "hidden" for the last hidden states, (rows, width, hidden size), see
                 `hf_head`, without computing logits; "router_logits" for a mixture of experts: a
                 dict of `logits` and `router_logits`, (rows, width, layers, experts), for
                 `load_balancing`. Without it, a model whose config says output_router_logits=True
                 is refused in training
    temperature  what logits are divided by
    unsupported  for packed batches that the model does not support: "raise", or "pad", which warns
                 once and runs each segment in a row of its own. That takes more memory than the
                 plan allows for; `choose_layout` plans padded rows instead

        forward = hf_forward(model)
        logits = forward(model, batch)  # (rows, width, vocabulary)
    """
    one_of("outputs", outputs, Outputs)
    one_of("unsupported", unsupported, Unsupported)
    if not temperature > 0:
        raise ConfigError(f"temperature must be above 0, got {temperature}.")
    if outputs == "hidden" and temperature != 1.0:
        raise ConfigError(
            "temperature divides logits, but outputs='hidden' has none. Divide the logits that "
            "you compute from hidden states."
        )
    return _make_forward(outputs, temperature, unsupported)


@cache
def _make_forward(
    outputs: Outputs, temperature: float, unsupported: Unsupported
) -> Callable[[Any, Batch], Any]:
    def forward(model: Any, batch: Batch) -> Any:
        refuse_shard(batch)
        if outputs != "router_logits" and torch.is_grad_enabled():
            second = "Pass forward=hf_forward(model, outputs='router_logits') and a second loss"
            refuse_router_loss(model, f"{second}, load_balancing")
        _check_attention(model)
        sees = batch.tree is not None or batch.exchange is not None
        if sees or isinstance(unwrapped(model), FSDPModule) or carries_state(unwrapped(model)):
            # Its forwards communicate, so all ranks judge it now, packed batch or not; also, see
            # `check_layout`. Segments that see others are refused where layers carry state.
            support_of(model)
        on_unsupported = "raise" if sees else unsupported
        if one_segment_per_row(batch) or _may_pack(model, batch, on_unsupported):
            tensors = _run(model, batch, outputs)
        else:
            padded, slots = _in_own_rows(batch)
            tensors = _run(model, padded, outputs)
            for name, values in tensors.items():  # back to the packed row, zeros in padding
                packed = values.new_zeros((batch.rows * batch.width, *values.shape[2:]))
                packed = packed.index_copy(0, slots, values[padded.token_mask])
                tensors[name] = packed.unflatten(0, (batch.rows, batch.width))
        if temperature != 1.0:
            tensors["logits"] = tensors["logits"] / temperature
        return tensors if outputs == "router_logits" else tensors[outputs]

    return forward if outputs == "hidden" else mark_plain(forward)


def hf_head(model: Any) -> Head:
    """The model's last layer, with the scale and soft cap of its forward, for `head=` of losses.

    Runners use it by themselves (head="model"). It is for loops of your own, with the hidden states
    of `hf_forward(model, outputs="hidden")`. Scale and soft cap are read off a small forward; a
    model that does more with its logits is refused.

        hidden = hf_forward(model, outputs="hidden")(model, batch)
        loss = cross_entropy(head=hf_head(model))(hidden, batch).loss
    """
    head = ModelHead.of(model, hf_forward(model))
    if isinstance(head, ModelHead) and head.head is not None:
        return head.head
    raise ConfigError(
        f"the head of {type(core_of(model)).__name__} cannot be used: "
        f"{head or 'it has no output embeddings'}. Use its logits: hf_forward(model)."
    )


BOUNDARIES_GIVEN: ContextVar[Collection[str]] = ContextVar("boundaries_given", default=())
"""The arguments of a model that runs, if our attention is given the boundaries of segments."""


def _run(model: Any, batch: Batch, outputs: Outputs) -> dict[str, Tensor]:
    """What the model returns for a batch, (rows, width, ...) each, by its name."""
    kwargs = hf_kwargs(batch, model)
    given = "cu_seq_lens_q" in kwargs and _implementation_of(core_of(model)) == "evenstep"
    before = BOUNDARIES_GIVEN.set(kwargs if given else ())
    try:
        return _outputs(model, batch, outputs, kwargs)
    finally:
        BOUNDARIES_GIVEN.reset(before)


def _outputs(
    model: Any, batch: Batch, outputs: Outputs, kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    core, traits = core_of(model), traits_of(model)
    if outputs == "hidden":
        layer = core.get_output_embeddings()
        if layer is None:
            return {"hidden": model(**kwargs).last_hidden_state}
        return {"hidden": _hidden(model, batch, layer, kwargs)}
    tensors: dict[str, Tensor] = {}
    results: Any = None
    if outputs == "router_logits":
        taken = traits.takes_any or "output_router_logits" in traits.parameters
        if taken:
            results = model(**kwargs, output_router_logits=True)
        if getattr(results, "router_logits", None) is None:
            raise ConfigError(
                f"{traits.name} returns no router logits. Use outputs='logits', or a mixture of "
                f"experts whose forward takes output_router_logits."
            )
        slots = batch.rows * batch.width
        layers = [layer for layer in results.router_logits if isinstance(layer, Tensor)]
        if any(layer.ndim == 2 and len(layer) != slots for layer in layers):
            raise ConfigError(
                f"{traits.name} computes its router logits inside of layers that run on rows of "
                f"one segment each, so they are not those of the packed row. Use outputs='logits'."
            )
        tensors[outputs] = select_output(results, outputs, batch.rows, batch.width)
    else:
        results = model(**kwargs)
    logits = getattr(results, "logits", None)
    if logits is None:
        raise ConfigError(
            f"{traits.name} returns no logits. Use a class with a language model head, or "
            f"hf_forward(model, outputs='hidden')."
        )
    if logits.shape[1] != batch.width:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} returns logits of {logits.shape[1]} tokens per row "
            f"for {batch.width}, as with the virtual tokens of prompt tuning. Pass a forward that "
            f"returns one output per token."
        )
    return {"logits": logits, **tensors}


def _hidden(model: Any, batch: Batch, layer: Any, kwargs: dict[str, Any]) -> Tensor:
    """What the model's last layer gets."""

    def call(model: Any, batch: Any) -> Any:
        return model(**kwargs)

    answer = ModelHead(layer, None).run(call, model, batch, lambda hidden, _: [hidden])
    if not isinstance(answer, Answer):
        raise ConfigError(
            f"{type(core_of(model)).__name__} does not call its last layer with one hidden state "
            f"per slot. Use its logits: hf_forward(model)."
        )
    return answer.results[0]


_WARNED: WeakSet[Any] = WeakSet()
_CHECKED: WeakSet[Any] = WeakSet()


def _check_attention(model: Any) -> None:
    """Refuse a model that was built with our attention and does not call it: its own code takes no
    2-D mask, so padded rows would be wrong as well. transformers only logs a warning."""
    inner = unwrapped(model)
    if inner in _CHECKED or _implementation_of(core_of(model)) != "evenstep":
        return
    from evenstep.integrations.hf_attention import fault_of

    with _judging(inner):
        why = None if inner in _CHECKED else fault_of(inner)
    if why is not None:
        raise ConfigError(
            f"{type(inner).__name__} does not run with attn_implementation='evenstep': {why}. "
            f"Use another implementation, with the padded layout."
        )
    _CHECKED.add(inner)


def _may_pack(model: Any, batch: Batch, unsupported: Unsupported) -> bool:
    """Whether the model may run the packed batch as it is."""
    inner = unwrapped(model)
    support = support_of(inner)
    if support.safe:
        if support.cost and batch.width > LONG:
            _warn_once(inner, f"{type(inner).__name__}: {support.cost}.")
        return True
    fault = f"{type(inner).__name__} does not support packed batches: {support.why}."
    if unsupported == "raise":
        raise ConfigError(
            f"{fault} Plan with choose_layout(model, layout), try use_attention(model) of "
            f"evenstep.integrations.hf_attention, or pass forward=hf_forward(model, "
            f"unsupported='pad')."
        )
    _warn_once(inner, f"{fault} Running each segment in a row of its own.")
    return False


def _warn_once(model: Any, text: str) -> None:
    if model not in _WARNED:
        _WARNED.add(model)
        warnings.warn(text, stacklevel=4)


def _in_own_rows(batch: Batch) -> tuple[Batch, Tensor]:
    """The segments of a batch in rows of their own, as wide as the longest, and the slots of the
    packed batch that its tokens are from. It is for the model: labels of other rows are left out.

    a a a b b . .  ->  a a a
                       b b .
    """
    tiles = (batch.sample_ids >= 0).nonzero()[:, 0]
    begins, lengths = batch.cu_seqlens[:-1][tiles].long(), batch.seqlens[tiles]
    rows, width = len(lengths), max(int(lengths.max()), 1) if len(lengths) else 1
    gathered = Rows.of(begins, lengths, width)

    def moved(values: Tensor) -> Tensor:
        return values.flatten(0, 1)[gathered.slots]

    per_slot = {name: moved(getattr(batch, name)) for name in PER_SLOT}
    per_slot["position_ids"] = torch.arange(width, device=batch.device).expand(rows, -1)
    per_slot["segment_ids"] = torch.arange(rows, device=batch.device)[:, None].expand(-1, width)
    padded = replace(
        batch,
        **per_slot,
        cu_seqlens=torch.arange(rows + 1, device=batch.device, dtype=torch.int32) * width,
        seqlens=lengths,
        sample_ids=batch.sample_ids[tiles],
        starts=batch.starts[tiles],
        loss_tokens=batch.loss_tokens[tiles],
        max_seqlen=width,
        continuation=None,
        extras={
            name: moved(extra) if batch.aligned.get(name) in ("token", "label") else extra
            for name, extra in batch.extras.items()
        },
    )
    return padded, gathered.token_slots()


# Which models support packed batches --------------------------------------------------------------
#
# The first reason against it is the answer: what the code says of layers that mix segments and of
# the boundaries that reach the attention function, then a few small forwards, which compare packed
# samples with other neighbours and with each sample alone.

LONG = 4096
"""Slots of a packed row above which a dense mask is worth a warning."""
_BUILT_IN = ("sdpa", "eager", "flex_attention")


class Support(NamedTuple):
    """Whether a model supports packed batches, and why.

    >>> safe, why, cost = Support(True, "flash_attention_2 reads the boundaries from cu_seq_lens")
    """

    safe: bool
    why: str
    cost: str = ""
    """What packing costs with the model's attention implementation; empty if nothing."""


def supports_packing(model: Any, *, longest: int | None = None) -> Support:
    """Whether packed segments leave the results of a transformers model as they are, given
    `hf_forward(model)` or `hf_kwargs(batch, model)`.

    Decided from the layers and the attention implementation, and by a few small forwards on short
    samples, unless the model has no weights yet. Unknown models are reported as unsafe. With
    fully_shard, call it on all ranks. `longest` is the length of the longest sample, if known:
    some RoPE types are independent of neighbours up to a length.

        safe, why, cost = supports_packing(AutoModelForCausalLM.from_pretrained(name))
    """
    support = _decide(model)
    limit = _exceeded_limit(model, longest) if support.safe else None
    return support if limit is None else Support(False, limit.why)


def _exceeded_limit(model: Any, longest: int | None) -> RopeLimit | None:
    """The limit of the model's RoPE, if samples may be longer."""
    limit = traits_of(model).rope_limit
    allowed = limit is None or (longest is not None and limit.allows(torch.tensor([0, longest])))
    return None if allowed else limit


def choose_layout(model: Any, layout: Layout, *, longest: int | None = None) -> Layout:
    """The layout if the model supports it, else the padded layout with the same bounds.

    Falling back emits a warning. Call this before planning: a packed plan cannot be padded within
    its budget. A RoPE type that depends on neighbours does so in padded rows too, so it is warned
    about and the layout is kept. `longest` is the length of the longest sample, if known.

        recipe = Recipe(layout=choose_layout(model, Packed(max_tokens=8192)))
    """
    if isinstance(layout, Padded):
        return layout
    name, support = type(unwrapped(model)).__name__, _decide(model)
    if not support.safe:
        warnings.warn(
            f"{name} does not support packed batches: {support.why}. Using the padded layout "
            f"instead.",
            stacklevel=2,
        )
        return layout.padded()
    limit = _exceeded_limit(model, longest)
    if limit is not None:
        warnings.warn(f"{name} can run only some micro-batches: {limit.why}.", stacklevel=2)
    if support.cost and (layout.budget or 0) > LONG:
        warnings.warn(f"{name}: {support.cost}.", stacklevel=2)
    return layout


class _Decision(NamedTuple):
    """An answer, and what it belongs to."""

    support: Support
    registered: dict[str, bool]  # classes of the model, and whether they need equal lengths
    mixers: dict[str, tuple[Mixer, Any]]  # with their forwards; every decision makes its own

    def holds(self, model: Any) -> bool:
        """Whether the model still has the classes and the mixers of this answer."""
        return (self.registered, self.mixers) == _registered_and_mixers(model)


_DECISIONS: WeakKeyDictionary[Any, dict[tuple[Any, ...], _Decision]] = WeakKeyDictionary()
"""By model, and by its attention implementation, directions and device."""


_LOCKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_LOCKING = threading.Lock()


def _judging(model: Any) -> AbstractContextManager[Any]:
    """One thread at a time: small forwards change a model's mode, its zeros and its mixers. A lock
    for each model, because ranks that are threads communicate in theirs."""
    with _LOCKING:
        lock: AbstractContextManager[Any] = _LOCKS.setdefault(core_of(model), threading.RLock())
        return lock


def _conditions(model: Any) -> tuple[Any, ...]:
    """What decides which code runs: small forwards may be possible on one device only."""
    first, config = next(model.parameters(), None), text_config(model)
    ways = [getattr(config, name, None) for name in ("is_causal", "is_decoder")]
    return _implementation_of(model), *ways, "" if first is None else first.device.type


def support_of(model: Any) -> Support:
    """`supports_packing` of segments whose lengths the model's RoPE allows in one micro-batch,
    decided again if the attention implementation or its direction, the device, registered classes
    or mixers are others.
    """
    model = unwrapped(model)
    with _judging(model):
        decision = _DECISIONS.get(model, {}).get(_conditions(model))
        holds = decision is not None and decision.holds(model)
        return decision.support if decision is not None and holds else _decide(model)


def check_layout(model: Any, layout: Layout) -> None:
    """Judge a model before its first batch, where forwards are not those of `hf_forward`. Raises if
    the layout is packed and the model does not support that.

    Layers that carry state run on rows from then on: those that select tokens on rows of equal
    length, in padded batches as well.
    """
    packed = isinstance(layout, Packed)
    if not packed and not carries_state(unwrapped(model)):
        return
    support = support_of(model)
    if packed and not support.safe:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} does not support packed batches: {support.why}. "
            f"Use Recipe(layout=choose_layout(model, layout)), or use_attention(model) of "
            f"evenstep.integrations.hf_attention."
        )


def _registered_and_mixers(model: Any) -> tuple[dict[str, bool], dict[str, tuple[Mixer, Any]]]:
    core = core_of(model)
    mixers = mixers_of(core) if has_mixers(core) else {}
    forwards = {name: module.__dict__.get("forward") for name, module in mixers.items()}
    return (
        {name: equal_lengths(name) for name in registered_in(model)},
        {name: (mixers[name]._evenstep_mixer, forward) for name, forward in forwards.items()},
    )


def _decide(model: Any) -> Support:
    """Judge the model and wrap its mixers, all of them or none."""
    model = unwrapped(model)
    if text_config(model) is None:
        return Support(False, f"{type(model).__name__} has no config; test it with find_leaks")
    core = core_of(model)
    with _judging(model):
        release(core)
        try:
            support = _judge(model)
        except BaseException:
            release(core)
            raise
        decisions = _DECISIONS.setdefault(model, {})
        decisions[_conditions(model)] = _Decision(support, *_registered_and_mixers(model))
    return support


def _judge(model: Any) -> Support:
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        return Support(False, "its peft adapter puts virtual tokens before the row, not a sample")
    if reason := _bidirectional(model):
        return Support(False, reason)
    name = _implementation_of(model)
    # Small forwards need parameters, and flash attention a GPU.
    devices = {parameter.device.type for parameter in model.parameters()}
    probed = bool(devices) and "meta" not in devices
    probed = probed and not ("flash" in name and devices == {"cpu"})
    if reason := carries_state(model):
        return _on_rows(model, reason) if probed else Support(False, reason)
    keeps_apart, why = _read_attention(model, name)
    if not keeps_apart and (name in _BUILT_IN or "flash" in name):
        return Support(False, why)
    if probed:
        if reason := Probe.reason_of(model):
            return Support(False, reason)
        if not keeps_apart:  # an implementation that the code does not tell of
            keeps_apart, why = True, f"{name} keeps segments apart in small forwards"
    return Support(keeps_apart, why, _cost_of(name) if keeps_apart else "")


def _cost_of(name: str) -> str:
    """What packing costs with this attention implementation."""
    if name not in ("sdpa", "eager"):
        return ""
    return (
        f"{name} builds a dense mask of width x width and computes all of it, which makes packed "
        f"rows above {LONG:,} slots slower than padded ones. Use attn_implementation='evenstep' "
        f"(import evenstep.integrations.hf_attention) or flash attention"
    )


def _implementation_of(model: Any) -> str:
    """The name of the attention implementation of the language model."""
    return str(getattr(text_config(model), "_attn_implementation", None))


def _bidirectional(model: Any) -> str | None:
    """Why attention of the model sees both ways, else None."""
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        return "the attention of its encoder is bidirectional and crosses segment boundaries"
    encodes = getattr(config, "is_decoder", True) is False
    if (encodes and _mask_calls(model, "create_bidirectional_mask")) or not getattr(
        config, "is_causal", True
    ):
        return "its attention is bidirectional and crosses segment boundaries"
    return None


def carries_state(model: Any) -> str | None:
    """Why layers carry state over boundaries whatever the attention function does, else None."""
    config = text_config(model)
    if registered := registered_in(model):
        return f"its {', '.join(registered)} carries state from one segment to the next"
    if traits_of(model).stateful:
        return "its recurrent state carries over from one segment to the next"
    masked = {"full_attention", "sliding_attention"}  # attention depends on the mask only
    others = sorted(set(getattr(config, "layer_types", None) or ()) - masked)
    return f"its {', '.join(others)} layers cross segment boundaries" if others else None


def _on_rows(model: Any, why: str) -> Support:
    """Run the layers that carry state on rows of one segment each, if that makes them exact;
    `why` says what is against it."""
    core = core_of(model)
    with probing(model):
        try:
            search = MixerSearch(model)
            reason = search.run()
        except ConfigError as error:
            reason = str(error).partition(". ")[0]
        except Exception as error:
            line = str(error).strip().partition("\n")[0]
            reason = f"a small packed forward raised {type(error).__name__}: {line}"
    reason = reason or Probe.reason_of(model, carrying_lengths(model))
    if reason is not None:
        release(core)
        return Support(False, reason)
    if not mixers_of(core):
        return Support(False, why)
    search.choose_modes()
    kinds: dict[bool, set[str]] = {}
    for module in mixers_of(core).values():
        on_rows = module._evenstep_mixer.mode == "rows"
        kinds.setdefault(on_rows, set()).add(class_of(module).__name__)
    hows = {True: "run on rows of one segment each", False: "keep packed segments apart"}
    texts = [f"{', '.join(sorted(names))} {hows[on_rows]}" for on_rows, names in kinds.items()]
    return Support(True, "; ".join(texts), _cost_of(_implementation_of(model)))


def _read_attention(model: Any, name: str) -> tuple[bool, str]:
    """Whether the code is known to pass boundaries to the attention function, and why."""
    with_config = [module for module in model.modules() if hasattr(module, "config")]
    signatures = (inspect.signature(module.forward) for module in with_config)
    if not any("position_ids" in signature.parameters for signature in signatures):
        return False, "its forward does not take position_ids"
    if "flash" in name and "paged" not in name:
        if not any(getattr(m, "_supports_attention_backend", False) for m in model.modules()):
            return False, f"its {name} code does not pass cu_seq_lens on"
        return True, f"{name} reads the boundaries from cu_seq_lens"
    if name not in _BUILT_IN:
        return False, f"its attention implementation {name!r} is unknown"
    from transformers import masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        return False, f"{name} masks of the installed transformers ignore position_ids"
    calls = _mask_calls(model, "create_causal_mask", "create_sliding_window_causal_mask")
    if not calls:
        return False, f"it does not build its {name} mask with the functions that detect boundaries"
    without = [kind for kind, passes_positions in calls.items() if not passes_positions]
    if without:
        return False, f"{without[0]} builds its {name} mask without position_ids"
    return True, f"{name} masks detect boundaries where position_ids restart"


# (...), with parentheses inside
_ARGUMENTS = r"(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))"


_READING = threading.Lock()
"""Python 3.11 may fail to parse code in two threads at a time."""


def _mask_calls(model: Any, *makers: str) -> dict[str, bool]:
    """Classes in the model that call functions of these names, and whether all calls pass
    position_ids: `create_causal_mask(..., position_ids=...)`, or `(**kwargs)` of a dict that has
    them, also as `make(...)` after `make = create_causal_mask if ... else ...`."""
    passes_positions: dict[str, bool] = {}
    for kind in dict.fromkeys(class_of(module) for module in model.modules()):
        home = sys.modules.get(kind.__module__)
        if hasattr(kind, "config_class") and any(hasattr(home, maker) for maker in makers):
            with _READING:
                source = inspect.getsource(kind)
            named = "|".join(makers)
            aliases = re.findall(rf"(\w+) = \(?\s*(?:{named})\b(?!\()", source)
            calls = re.findall(rf"\b(?:{'|'.join((named, *aliases))}){_ARGUMENTS}", source)
            in_dict = '"position_ids":' in source
            if calls:
                passes_positions[kind.__name__] = all(
                    "position_ids=" in call or ("**" in call and in_dict) for call in calls
                )
    return passes_positions


for _library in ("transformers", "peft"):
    register_forward(_library, hf_forward)
