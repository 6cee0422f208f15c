"""Which transformers models keep packed segments apart.

`supports_packing` decides in this order, and the first reason against it is the answer:

1. layers that mix segments whatever the attention function does: bidirectional, recurrent, chunked
2. what the code says about the boundaries that reach the attention function
3. a few small forwards: packed samples against other neighbours, and against each sample alone

`switch` and `fault_of` ask a narrower question with one small forward: whether every attention
layer of a model calls our attention function, with the boundaries of segments.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from evenstep.core.layout import Layout, Packed
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, EvenstepError
from evenstep.integrations.hf_arguments import (
    configs_in,
    core_of,
    hf_kwargs,
    text_config,
    traits_of,
)
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch, Boundaries
from evenstep.tensors.collate import Collator
from evenstep.train.framework import unwrapped

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
    limit = traits_of(model).rope_limit if support.safe else None
    if limit is not None and (longest is None or not limit.allows(torch.tensor([0, longest]))):
        return Support(False, limit.why)
    return support


def choose_layout(model: Any, layout: Layout, *, longest: int | None = None) -> Layout:
    """The layout if the model supports it, else the padded layout with the same bounds.

    Falling back emits a warning. Call this before planning: a packed plan cannot be padded within
    its budget. A RoPE type that depends on neighbours does so in padded rows too, so it is warned
    about and the layout is kept. `longest` is the length of the longest sample, if known.

        recipe = Recipe(layout=choose_layout(model, Packed(max_tokens=8192)))
    """
    padded = layout.padded()
    if padded == layout:
        return layout
    name, support = type(unwrapped(model)).__name__, _decide(model)
    if not support.safe:
        warnings.warn(
            f"{name} does not support packed batches: {support.why}. Using the padded layout "
            f"instead.",
            stacklevel=2,
        )
        return padded
    lengths = supports_packing(model, longest=longest)
    if not lengths.safe:
        warnings.warn(f"{name} can run only some micro-batches: {lengths.why}.", stacklevel=2)
    if support.cost and (layout.budget or 0) > LONG:
        warnings.warn(f"{name}: {support.cost}.", stacklevel=2)
    return layout


_SUPPORT: WeakKeyDictionary[Any, dict[str, Support]] = WeakKeyDictionary()


def support_of(model: Any) -> Support:
    """`supports_packing` of segments whose lengths the model's RoPE allows in one micro-batch,
    decided once per model and attention implementation."""
    model = unwrapped(model)
    by_name = _SUPPORT.setdefault(model, {})
    name = _implementation_of(model)
    if name not in by_name:
        by_name[name] = _decide(model)
    return by_name[name]


# The decision ----------------------------------------------------------------------------------


def _decide(model: Any) -> Support:
    model = unwrapped(model)
    if text_config(model) is None:
        return Support(False, f"{type(model).__name__} has no config; test it with find_leaks")
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        return Support(False, "its peft adapter puts virtual tokens before the row, not a sample")
    reason = _mixing_layers(model)
    if reason is not None:
        return Support(False, reason)
    name = _implementation_of(model)
    # None: the code does not tell, which is enough for implementations that it is not known of.
    keeps_apart, why = _read_attention(model, name)
    if not keeps_apart and (name in _BUILT_IN or "flash" in name):
        return Support(False, why)
    if _can_probe(model, name):
        reason = _probe_packing(model)
        if reason is not None:
            return Support(False, reason)
        if not keeps_apart:
            keeps_apart, why = True, f"{name} keeps segments apart in small forwards"
    return Support(bool(keeps_apart), why, _cost(name) if keeps_apart else "")


def _implementation_of(model: Any) -> str:
    """The name of the attention implementation of the language model."""
    return str(getattr(text_config(model), "_attn_implementation", None))


def _cost(name: str) -> str:
    if name not in ("sdpa", "eager"):
        return ""
    return (
        f"{name} builds a dense mask of width x width and computes all of it, which makes packed "
        f"rows above {LONG:,} slots slower than padded ones. Use attn_implementation='evenstep' "
        f"(import evenstep.integrations.hf_attention) or flash attention"
    )


# What the code says ----------------------------------------------------------------------------

# Layer types in which attention depends on the mask only.
_MASKED_LAYERS = {"full_attention", "sliding_attention"}
_MASK_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")


def _mixing_layers(model: Any) -> str | None:
    """Why layers of the model mix segments whatever the attention function does, else None."""
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        return "the attention of its encoder is bidirectional and crosses segment boundaries"
    encodes = getattr(config, "is_decoder", True) is False
    if (encodes and _mask_makers(model, "create_bidirectional_mask")) or not getattr(
        config, "is_causal", True
    ):
        return "its attention is bidirectional and crosses segment boundaries"
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        return "its recurrent state carries over from one segment to the next"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS)
    if others:
        return f"its {', '.join(others)} layers cross segment boundaries"
    return None


def _read_attention(model: Any, name: str) -> tuple[bool | None, str]:
    """Whether the code passes boundaries to the attention function (None: it does not tell), and
    why."""
    with_config = [module for module in model.modules() if hasattr(module, "config")]
    signatures = (inspect.signature(module.forward) for module in with_config)
    if not any("position_ids" in signature.parameters for signature in signatures):
        return False, "its forward does not take position_ids"
    if "flash" in name and "paged" not in name:
        if not any(
            getattr(module, "_supports_attention_backend", False) for module in model.modules()
        ):
            return False, f"its {name} code does not pass cu_seq_lens on"
        return True, f"{name} reads the boundaries from cu_seq_lens"
    if name in _BUILT_IN:
        return _read_masks(model, name)
    return None, f"its attention implementation {name!r} is unknown"


def _read_masks(model: Any, name: str) -> tuple[bool | None, str]:
    from transformers import masking_utils

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        return False, f"{name} masks of the installed transformers ignore position_ids"
    makers = _mask_makers(model, *_MASK_MAKERS)
    if not makers:
        return None, f"it does not build its {name} mask with the functions that detect boundaries"
    without = [kind for kind, passes_positions in makers.items() if not passes_positions]
    if without:
        return None, f"{without[0]} builds its {name} mask without position_ids"
    return True, f"{name} masks detect boundaries where position_ids restart"


def _mask_makers(model: Any, *makers: str) -> dict[str, bool]:
    """Classes in the model that build masks, and whether they pass position_ids."""
    passes_positions: dict[str, bool] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        # The class with source code, not one that fully_shard makes.
        kind = next(base for base in kind.__mro__ if "torch.distributed" not in base.__module__)
        module = sys.modules.get(kind.__module__)
        if hasattr(kind, "config_class") and any(hasattr(module, maker) for maker in makers):
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
            calls = _calls_of(tree, makers)
            if calls:
                passes_positions[kind.__name__] = _passes_positions(tree, calls)
    return passes_positions


def _calls_of(tree: ast.AST, makers: tuple[str, ...]) -> list[ast.Call]:
    """create_causal_mask(...), or make(...) after make = create_causal_mask if ... else ..."""
    names = set(makers)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and not isinstance(node.value, (ast.Call, ast.Dict)):
            assigned = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            if assigned & set(makers):
                names |= {name.id for name in node.targets if isinstance(name, ast.Name)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", None) in names]


def _passes_positions(tree: ast.AST, calls: list[ast.Call]) -> bool:
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


# Small forwards that compare packed samples with each sample alone ------------------------------

_LENGTHS = (5, 9, 4)
_TAIL = 3
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _can_probe(model: Any, name: str) -> bool:
    """Whether small forwards can run: parameters exist, and where flash attention can be used."""
    devices = {parameter.device.type for parameter in model.parameters()}
    return bool(devices) and "meta" not in devices and not ("flash" in name and devices == {"cpu"})


def _probe_packing(model: Any) -> str | None:
    """Why packed outputs of the model depend on neighbours or differ from each sample alone; None
    if they do not.

    Runs the model in evaluation mode, without gradients, on a few short samples; random numbers,
    training mode and gradients are as before. With fully_shard, call it on all ranks.
    """
    with _undisturbed(model):
        try:
            return _Probe(model).reason()
        except Exception as error:
            return f"a small packed forward raised {type(error).__name__}: {_first_line(error)}"


class _Probe:
    def __init__(self, model: Any) -> None:
        self.model, self.traits = model, traits_of(model)
        parameter = next(model.parameters())
        self.device = parameter.device
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        self.half = half = half or torch.is_autocast_enabled(self.device.type)
        # Of the largest output. Neighbours of the same lengths leave the shapes of all operations
        # as they are, so nothing is rounded differently.
        self.exact = 1e-2 if half else 1e-5
        self.close = 6e-2 if half else 1e-3 if self.device.type == "cuda" else 1e-4
        vocab = core_of(model).get_input_embeddings().weight.shape[0]
        plain = [token for token in self.traits.plain_tokens(62) if token < vocab]
        self.tokens = torch.tensor(plain[1:])
        longest = max(_LENGTHS) if self.traits.rope_limit is None else self.traits.rope_limit.tokens
        self.lengths = [max(1, min(length, longest - 1)) for length in _LENGTHS]
        self.random = torch.Generator().manual_seed(0)

    def reason(self) -> str | None:
        traits, samples = self.traits, [self._sample(length) for length in self.lengths]
        # Images come without `cu_seq_lens`; see `hf_kwargs`.
        for with_boundaries in (True, False) if traits.has_tower else (True,):
            packed = self._packed(samples, with_boundaries)
            why = self._neighbours(samples, packed, with_boundaries)
            if why := why or self._compare_alone(samples, packed):
                return why
        if traits.rope_indexer is not None and (why := self._still_positions(samples)):
            return why
        return self._both_ways() if traits.has_tower or any(traits.media) else None

    def _neighbours(
        self, samples: list[Tensor], packed: list[Tensor], with_boundaries: bool
    ) -> str | None:
        """Change the tokens of one sample, then of the other two."""
        for changed in ((1,), (0, 2)):
            others = [self._sample(len(s)) if k in changed else s for k, s in enumerate(samples)]
            outputs = self._packed(others, with_boundaries)
            kept = [k for k in range(len(samples)) if k not in changed]
            moved = self._distance([outputs[k] for k in kept], [packed[k] for k in kept])
            if not moved <= self.exact:
                return f"packed segments affect each other (outputs moved by {moved:.1e})"
        return None

    def _compare_alone(self, samples: list[Tensor], packed: list[Tensor]) -> str | None:
        alone = [self._run({"input_ids": s[None].to(self.device)})[0] for s in samples]
        moved = self._distance(packed, alone)
        if not moved <= self.close:
            return f"packed outputs differ from those of each sample alone (by {moved:.1e})"
        return None

    def _still_positions(self, samples: list[Tensor]) -> str | None:
        """Positions that stand still, as in an image, must not be taken for boundaries."""
        lengths = [len(sample) for sample in samples]
        planes = hf_kwargs(self._row(samples), self.model)["position_ids"].clone()
        first, text = lengths[0], int(self.traits.text_plane)
        planes[text:, :, first + 1 : first + 4] = 1
        packed = self._packed(samples, False, planes)
        alone = []
        for sample, positions in zip(samples, planes.split([*lengths, _TAIL], -1), strict=False):
            tokens = sample[None].to(self.device)
            mask = torch.ones_like(tokens)  # which switches the search for boundaries off
            inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
            alone.append(self._run(inputs)[0])
        moved = self._distance(packed, alone)
        if not moved <= self.close:
            return f"it takes the positions of images for boundaries (outputs moved by {moved:.1e})"
        return None

    def _both_ways(self) -> str | None:
        """Whether a token sees later ones of its own kind, as in an image or a prefix."""
        first = self._sample(6)
        last = first.clone()
        last[-1] = self.tokens[(self.tokens == first[-1]).nonzero()[0, 0] - 1]
        for name in ("token_type_ids", "mm_token_type_ids"):
            for kind in (0, 1) if name in self.traits.parameters else ():
                types = {name: torch.full((1, 6), kind, device=self.device)}
                try:
                    before, after = (
                        self._run({"input_ids": tokens[None].to(self.device), **types})[0, :-1]
                        for tokens in (first, last)
                    )
                except EvenstepError as error:  # our attention, which is causal
                    return str(error).partition(". ")[0]
                except Exception:  # the model refuses such tokens without an image
                    continue
                if not self._distance([after], [before]) <= self.exact:
                    return f"tokens with {name}={kind} see each other both ways"
        return None

    def _distance(self, outputs: list[Tensor], expected: list[Tensor]) -> float:
        """The largest difference, relative to the largest value. In half precision the largest
        median of a sample: rounding may send single tokens to other experts."""
        scale = max(float(e.abs().max()) for e in expected) or 1.0
        differences = [(o - e).abs().amax(-1) for o, e in zip(outputs, expected, strict=True)]
        return max(float(d.median() if self.half else d.max()) for d in differences) / scale

    def _sample(self, length: int) -> Tensor:
        return self.tokens[torch.randint(len(self.tokens), (length,), generator=self.random)]

    def _row(self, samples: Sequence[Tensor]) -> Batch:
        """The samples in one packed row, with padding at its end."""
        lengths = [len(sample) for sample in samples]
        width = sum(lengths) + _TAIL
        recipe = Recipe(layout=Packed(max_tokens=width, pad_to=width), balance="none")
        (micro,) = make_plan(lengths, recipe)[0, 0]
        return Collator()(micro, [{"input_ids": sample} for sample in samples]).to(self.device)

    def _packed(
        self, samples: Sequence[Tensor], with_boundaries: bool, positions: Tensor | None = None
    ) -> list[Tensor]:
        """The outputs of each sample in one packed row."""
        batch = self._row(samples)
        kwargs = hf_kwargs(batch, self.model)
        if positions is not None:
            kwargs["position_ids"] = positions
        if not with_boundaries:
            kwargs = {name: value for name, value in kwargs.items() if name not in _BOUNDARIES}
        outputs = self._run(kwargs)
        if tuple(outputs.shape[:2]) != (batch.rows, batch.width):
            raise ValueError(f"outputs of shape {tuple(outputs.shape)}, not one per slot")
        if not bool(outputs.isfinite().all()):
            raise ValueError("outputs that are not finite")
        return list(outputs[0].split([*map(len, samples), _TAIL])[:-1])

    def _run(self, kwargs: dict[str, Any]) -> Tensor:
        outputs = self.model(**self.traits.accepted({"use_cache": False, **kwargs}))
        for name in ("logits", "last_hidden_state"):
            values: Tensor | None = getattr(outputs, name, None)
            if values is not None:
                return values
        raise ValueError("outputs without logits or last_hidden_state")


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients, compilation and warnings; everything as before after."""
    training = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device.index for device in devices]),
            torch.no_grad(),
            # Compiled layers would run neither the attention function again, nor hooks.
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        torch.clear_autocast_cache()  # casts without a gradient


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# Whether a model calls our attention function with boundaries ------------------------------------

_PAIR = (3, 2)
"""The segments of the packed row that is run."""


class AttentionCall(NamedTuple):
    """One call of the attention function during a small forward."""

    module: nn.Module
    bounds: Boundaries


_RECORD: ContextVar[list[AttentionCall] | None] = ContextVar("attention_calls", default=None)


def call_record() -> list[AttentionCall] | None:
    """Where the attention function records its calls during a small forward, else None."""
    return _RECORD.get()


def switch(model: Any, name: str, inputs: dict[str, Any]) -> None:
    """Set the attention implementation, check it, and restore the previous one if it fails."""
    roots = _roots(model)
    if not roots:
        raise ConfigError(
            f"{type(model).__name__} holds no transformers model. Use evenstep.tensors.attention "
            f"in your own attention layers."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has parameters on the meta device, so it cannot be checked. "
            f"Load its weights first, or build it with attn_implementation={name!r}."
        )
    modules = [module for root in roots for module in root.modules()]
    configs = [c for m in modules for c in configs_in(getattr(m, "config", None))]
    before = {id(config): (config, config._attn_implementation) for config in configs}
    runs = False
    try:
        for root in roots:
            root.set_attn_implementation(name)
        why = _fault(model, roots[0], inputs)
        runs = why is None
    finally:
        for config, implementation in () if runs else before.values():
            # The setter would change nested configurations as well.
            config._attn_implementation_internal = implementation
    if why is not None:
        raise ConfigError(
            f"{type(roots[0]).__name__} does not run with attn_implementation={name!r}: {why}. "
            f"Keep its implementation, with the padded layout."
        )


def fault_of(model: Any) -> str | None:
    """Why a model that has the registered attention would not run it within segments, else None."""
    roots = _roots(model)
    return _fault(model, roots[0], {}) if roots else None


def _roots(model: Any) -> list[Any]:
    """The outermost transformers models inside a module."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    children = model.children() if isinstance(model, nn.Module) else ()
    return [root for child in children for root in _roots(child)]


def _fault(model: Any, root: Any, inputs: dict[str, Any]) -> str | None:
    """Why attention would not stay within segments; None if it does."""
    try:
        calls, ran = _record_row(model, root, inputs)
    except ConfigError as error:
        return str(error).rstrip(".")
    except Exception as error:
        kind, line = type(error).__name__, _first_line(error)[:200]
        return f"a forward of {sum(_PAIR)} tokens failed with {kind}: {line}"
    if not calls:
        return "its attention layers do not call transformers' attention interface"
    called = {part for call in calls for part in call.module.modules()}
    for layer in ran:
        if layer not in called and not any(part in called for part in layer.modules()):
            return f"its {type(layer).__name__} does not call transformers' attention interface"
    for call in calls:
        if call.bounds.cu_seqlens.tolist() != [0, _PAIR[0], sum(_PAIR)]:
            kind = type(call.module).__name__
            return f"its {kind} receives neither cu_seq_lens_q nor position_ids that restart"
    return None


def _record_row(
    model: Any, root: Any, inputs: dict[str, Any]
) -> tuple[list[AttentionCall], list[nn.Module]]:
    """One packed forward: the calls of the attention function, and attention layers that ran."""
    calls: list[AttentionCall] = []
    ran: list[nn.Module] = []
    device = root.get_input_embeddings().weight.device
    ends = torch.tensor([0, _PAIR[0], sum(_PAIR)], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in _PAIR])
    tokens = torch.tensor([traits_of(root).plain_tokens(sum(_PAIR))], device=device)
    with _undisturbed(model), ExitStack() as stack:
        for part in model.modules():
            if "attention" in type(part).__name__.lower():
                hook = part.register_forward_pre_hook(lambda part, _: ran.append(part))
                stack.callback(hook.remove)
        stack.callback(_RECORD.reset, _RECORD.set(calls))
        model(
            input_ids=tokens,
            position_ids=positions[None],
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=max(_PAIR),
            max_length_k=max(_PAIR),
            use_cache=False,
            **inputs,
        )
    return calls, ran
