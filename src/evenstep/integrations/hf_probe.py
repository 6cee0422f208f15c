"""A check that a transformers model calls a registered attention function with boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evenstep.errors import ConfigError
from evenstep.tensors.batch import Boundaries

LENGTHS = (3, 2)
"""The segments of the packed row that a probe runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One call of the attention function during a probe."""

    module: nn.Module
    causal: bool
    window: int | None
    bounds: Boundaries


_calls: ContextVar[list[Seen] | None] = ContextVar("evenstep_attention_calls", default=None)


def probed() -> list[Seen] | None:
    """Where the attention function records its calls during a probe, else None."""
    return _calls.get()


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
    before = {id(config): (config, config._attn_implementation) for config in _configs(roots)}
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
        calls, ran = _run(model, root, inputs)
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


def _run(model: Any, root: Any, inputs: dict[str, Any]) -> tuple[list[Seen], list[nn.Module]]:
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
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


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
    if isinstance(model, PreTrainedModel):
        return [model]
    children = model.children() if isinstance(model, nn.Module) else ()
    return [root for child in children for root in _roots(child)]


def _configs(roots: list[Any]) -> Iterator[Any]:
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
