"""Whether a transformers model can run packed batches: what its code says, and small forwards."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from evenstep.core.layout import Layout, Packed
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, EvenstepError
from evenstep.integrations.hf_arguments import core_of, hf_kwargs, traits_of
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch, Boundaries
from evenstep.tensors.collate import Collator
from evenstep.train.forwards import unwrapped

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
    support = judged(model)
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
    name, support = type(unwrapped(model)).__name__, judged(model)
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


def judged(model: Any) -> Support:
    """`supports_packing` of segments whose lengths the model's RoPE allows in one micro-batch."""
    model = unwrapped(model)
    if not any(hasattr(module, "config") for module in model.modules()):
        return Support(False, f"{type(model).__name__} has no config; test it with find_leaks")
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
        return Support(False, "its peft adapter puts virtual tokens before the row, not a sample")
    name = implementation_of(model)
    known = name in _BUILT_IN or "flash" in name
    reason = mixing_layers(model)
    if reason is not None:
        return Support(False, reason)
    reading = read_attention(model)
    if known and not reading.safe:
        return Support(False, reading.why)
    if can_probe(model):
        reason = probe_packing(model)
        if reason is not None:
            return Support(False, reason)
        why = reading.why if reading.safe else f"{name} keeps segments apart in small forwards"
        return Support(True, why, _cost(name))
    return Support(bool(reading.safe), reading.why, _cost(name) if reading.safe else "")


_JUDGED: WeakKeyDictionary[Any, dict[str, Support]] = WeakKeyDictionary()


def judged_once(model: Any) -> Support:
    """`judged`, once per model and attention implementation."""
    model = unwrapped(model)
    known = _JUDGED.setdefault(model, {})
    name = implementation_of(model)
    if name not in known:
        known[name] = judged(model)
    return known[name]


def _cost(name: str) -> str:
    if name not in ("sdpa", "eager"):
        return ""
    return (
        f"{name} builds a dense mask of width x width and computes all of it, which makes packed "
        f"rows above {LONG:,} slots slower than padded ones. Use attn_implementation='evenstep' "
        f"(import evenstep.integrations.hf_attention) or flash attention"
    )


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


_LENGTHS = (5, 9, 4)
_TAIL = 3
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def can_probe(model: Any) -> bool:
    """Whether small forwards can run: parameters exist, and where flash attention can be used."""
    devices = {parameter.device.type for parameter in model.parameters()}
    flash = "flash" in implementation_of(model)
    return bool(devices) and "meta" not in devices and not (flash and devices == {"cpu"})


def probe_packing(model: Any) -> str | None:
    """Why packed outputs of the model depend on neighbours or differ from each sample alone; None
    if they do not.

    Runs the model in evaluation mode, without gradients, on a few short samples; random numbers,
    training mode and gradients are as before. With fully_shard, call it on all ranks.
    """
    with _undisturbed(model):
        try:
            return _Probe(model).reason()
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            return f"a small packed forward raised {type(error).__name__}: {first}"


class _Probe:
    def __init__(self, model: Any) -> None:
        self.model, self.traits = model, traits_of(model)
        core = core_of(model)
        parameter = next(model.parameters())
        self.device = parameter.device
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        self.half = half = half or torch.is_autocast_enabled(self.device.type)
        # Of the largest output. Neighbours of the same lengths leave the shapes of all operations
        # as they are, so nothing is rounded differently.
        self.exact = 1e-2 if half else 1e-5
        self.close = 6e-2 if half else 1e-3 if self.device.type == "cuda" else 1e-4
        vocab = core.get_input_embeddings().weight.shape[0]
        plain = (token for token in range(vocab) if token not in self.traits.special)
        self.tokens = torch.tensor(list(islice(plain, 1, 62)))
        longest = max(_LENGTHS) if self.traits.rope_limit is None else self.traits.rope_limit.tokens
        self.lengths = [max(1, min(length, longest - 1)) for length in _LENGTHS]
        self.random = torch.Generator().manual_seed(0)

    def reason(self) -> str | None:
        samples = [self._sample(length) for length in self.lengths]
        # Images come without `cu_seq_lens`; see `hf_kwargs`.
        for with_boundaries in (True, False) if self.traits.has_tower else (True,):
            base = self._packed(samples, with_boundaries)
            found = self._neighbours(samples, base, with_boundaries)
            found = found or self._compare_alone(samples, base)
            if found is not None:
                return found
        if self.traits.rope_indexer is not None:
            found = self._still_positions(samples)
            if found is not None:
                return found
        return self._both_ways() if self.traits.has_tower or any(self.traits.media) else None

    def _neighbours(
        self, samples: list[Tensor], base: list[Tensor], with_boundaries: bool
    ) -> str | None:
        """Change the tokens of one sample, then of the other two."""
        for changed in ((1,), (0, 2)):
            others = [self._sample(len(s)) if k in changed else s for k, s in enumerate(samples)]
            found = self._packed(others, with_boundaries)
            kept = [k for k in range(len(samples)) if k not in changed]
            moved = self._distance([found[k] for k in kept], [base[k] for k in kept])
            if not moved <= self.exact:
                return f"packed segments affect each other (outputs moved by {moved:.1e})"
        return None

    def _compare_alone(self, samples: list[Tensor], base: list[Tensor]) -> str | None:
        alone = [self._run({"input_ids": s[None].to(self.device)})[0] for s in samples]
        moved = self._distance(base, alone)
        if not moved <= self.close:
            return f"packed outputs differ from those of each sample alone (by {moved:.1e})"
        return None

    def _still_positions(self, samples: list[Tensor]) -> str | None:
        """Positions that stand still, as in an image, must not be taken for boundaries."""
        lengths = [len(sample) for sample in samples]
        planes = hf_kwargs(_row(samples).to(self.device), self.model)["position_ids"].clone()
        first, text = lengths[0], int(self.traits.text_plane)
        planes[text:, :, first + 1 : first + 4] = 1
        base = self._packed(samples, False, planes)
        alone = []
        for tokens, at in zip(samples, planes.split([*lengths, _TAIL], -1), strict=False):
            inputs = tokens[None].to(self.device)
            mask = torch.ones_like(inputs)  # which switches the search for boundaries off
            given = {"input_ids": inputs, "position_ids": at, "attention_mask": mask}
            alone.append(self._run(given)[0])
        moved = self._distance(base, alone)
        if not moved <= self.close:
            return f"it takes the positions of images for boundaries (outputs moved by {moved:.1e})"
        return None

    def _distance(self, found: list[Tensor], expected: list[Tensor]) -> float:
        """The largest difference, relative to the largest value. In half precision the largest
        median of a sample: rounding may send single tokens to other experts."""
        scale = max(float(e.abs().max()) for e in expected) or 1.0
        differences = [(f - e).abs().amax(-1) for f, e in zip(found, expected, strict=True)]
        return max(float(d.median() if self.half else d.max()) for d in differences) / scale

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

    # Running -----------------------------------------------------------------------------------

    def _sample(self, length: int) -> Tensor:
        return self.tokens[torch.randint(len(self.tokens), (length,), generator=self.random)]

    def _packed(
        self, samples: Sequence[Tensor], with_boundaries: bool, positions: Tensor | None = None
    ) -> list[Tensor]:
        """The outputs of each sample in one packed row."""
        batch = _row(samples).to(self.device)
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
        found = getattr(outputs, "logits", None)
        found = getattr(outputs, "last_hidden_state", None) if found is None else found
        if found is None:
            raise ValueError("outputs without logits or last_hidden_state")
        return found


def _row(samples: Sequence[Tensor]) -> Batch:
    lengths = [len(sample) for sample in samples]
    width = sum(lengths) + _TAIL
    recipe = Recipe(layout=Packed(max_tokens=width, pad_to=width), balance="none")
    (micro,) = make_plan(lengths, recipe)[0, 0]
    return Collator()(micro, [{"input_ids": sample} for sample in samples])


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
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        torch.clear_autocast_cache()  # casts without a gradient


LENGTHS = (3, 2)
"""The segments of the packed row that a probe runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One call of the attention function during a probe."""

    module: nn.Module
    causal: bool
    window: int | None
    bounds: Boundaries


_attention_calls: ContextVar[list[Seen] | None] = ContextVar(
    "evenstep_attention_calls", default=None
)


def probed() -> list[Seen] | None:
    """Where the attention function records its calls during a probe, else None."""
    return _attention_calls.get()


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
    before = {id(config): (config, config._attn_implementation) for config in _configs_of(roots)}
    try:
        for root in roots:
            root.set_attn_implementation(name)
        why = _fault(model, roots[0], inputs)
    except BaseException:
        _restore(before)
        raise
    if why is not None:
        _restore(before)
        raise ConfigError(
            f"{type(roots[0]).__name__} does not run with attn_implementation={name!r}: {why}. "
            f"Keep its implementation, with the padded layout."
        )


def fault_of(model: Any) -> str | None:
    """Why a model that has the registered attention would not run it within segments, else None."""
    roots = _roots(model)
    return _fault(model, roots[0], {}) if roots else None


def _fault(model: Any, root: Any, inputs: dict[str, Any]) -> str | None:
    """Why attention would not stay within segments; None if it does."""
    try:
        calls, ran = _run_packed_row(model, root, inputs)
    except Exception as error:
        if isinstance(error, ConfigError):
            return str(error).rstrip(".")
        kind = type(error).__name__
        return f"a forward of {sum(LENGTHS)} tokens failed with {kind}: {_first_line(error)}"
    if not calls:
        return "its attention layers do not call transformers' attention interface"
    called = {part for call in calls for part in call.module.modules()}
    for layer in ran:
        if layer not in called and not any(part in called for part in layer.modules()):
            return f"its {type(layer).__name__} does not call transformers' attention interface"
    expected = [0, LENGTHS[0], sum(LENGTHS)]
    for call in calls:
        if call.bounds.cu_seqlens.tolist() != expected:
            kind = type(call.module).__name__
            return f"its {kind} receives neither cu_seq_lens_q nor position_ids that restart"
    return None


def _run_packed_row(
    model: Any, root: Any, inputs: dict[str, Any]
) -> tuple[list[Seen], list[nn.Module]]:
    """One packed forward: the calls of the attention function, and attention layers that ran."""
    calls: list[Seen] = []
    ran: list[nn.Module] = []
    training = [part for part in model.modules() if part.training]
    with ExitStack() as stack:
        for part in model.modules():
            if "attention" in type(part).__name__.lower():
                hook = part.register_forward_pre_hook(lambda part, _: ran.append(part))
                stack.callback(hook.remove)
        stack.enter_context(_recording(calls))
        stack.enter_context(torch.no_grad())
        # Compiled layers would not run the attention function, nor its hooks, again.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for part in training:
            stack.callback(setattr, part, "training", True)
        model.eval()
        model(**_packed_row(root), **inputs)
    return calls, ran


@contextmanager
def _recording(calls: list[Seen]) -> Iterator[None]:
    token = _attention_calls.set(calls)
    try:
        yield
    finally:
        _attention_calls.reset(token)


def _packed_row(root: Any) -> dict[str, Any]:
    """Arguments of a row of two segments, without the special tokens of the model."""
    config = root.config
    special = {
        value
        for part in _config_and_parts(config)
        for name, value in vars(part).items()
        if isinstance(value, int) and name.endswith(("token_id", "token_index"))
    }
    device = root.get_input_embeddings().weight.device
    plain = [token for token in range(sum(LENGTHS) + len(special)) if token not in special]
    tokens = torch.tensor([plain[: sum(LENGTHS)]], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
    ends: Tensor = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=device)
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "use_cache": False,
    }


def _roots(model: Any) -> list[Any]:
    """The outermost transformers models inside a module."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    children = model.children() if isinstance(model, nn.Module) else ()
    return [root for child in children for root in _roots(child)]


def _configs_of(roots: list[Any]) -> Iterator[Any]:
    for root in roots:
        for part in root.modules():
            if hasattr(getattr(part, "config", None), "_attn_implementation"):
                yield from _config_and_parts(part.config)


def _config_and_parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield from _config_and_parts(part)


def _restore(before: dict[int, tuple[Any, Any]]) -> None:
    for config, implementation in before.values():
        # The setter would change nested configurations as well.
        config._attn_implementation_internal = implementation


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
