"""Small forwards that show what a model does with packed segments.

Probe        whether packed outputs are those of each sample alone
MixerSearch  which layers carry state from one segment to the next
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from evenstep.core.layout import Packed
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, EvenstepError
from evenstep.integrations.hf_arguments import core_of, hf_kwargs, text_config, traits_of
from evenstep.integrations.mixers import (
    Axes,
    Mixer,
    Mode,
    class_of,
    equal_lengths,
    is_of_tokens,
    leaves_of,
    mixers_of,
    registered_in,
    release,
    run_on_rows,
    without_boundaries,
)
from evenstep.integrations.packed_kernels import CHUNK
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch
from evenstep.tensors.collate import Collator
from evenstep.train.framework import reshard, undisturbed
from evenstep.train.gradients import local_tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def probing(model: Any) -> Iterator[None]:
    """As `undisturbed`, with noise in parameters that are zero: they would hide what passes through
    them. Zeros and version counters are as before after. With fully_shard, enter it on all ranks.
    """
    zeros: list[tuple[Tensor, Tensor]] = []
    with undisturbed(model):
        reshard(model)
        try:
            for number, parameter in enumerate(model.parameters()):
                values = local_tensor(parameter)
                if values.dtype not in _FLOATS or values.is_inference() or bool(values.any()):
                    continue
                values = values.data  # has a version counter of its own
                zeros.append((values, values.clone()))
                # Of each parameter by itself: ranks may hold other parts of those before it.
                random = torch.Generator().manual_seed(number)
                scale = values.shape[-1] ** -0.5 if values.ndim > 1 else 0.1
                values.copy_(scale * torch.randn(values.shape, generator=random))
            torch.clear_autocast_cache()  # casts of zeros
            yield
        finally:
            for values, before in zeros:
                values.copy_(before)
            reshard(model)


def packed_row(samples: Sequence[Tensor], tail: int = 0) -> Batch:
    """The samples in one packed row, with `tail` slots of padding at its end."""
    lengths = [len(sample) for sample in samples]
    width = sum(lengths) + tail
    recipe = Recipe(layout=Packed(max_tokens=width, pad_to=width), balance="none")
    (micro,) = make_plan(lengths, recipe)[0, 0]
    return Collator()(micro, [{"input_ids": sample} for sample in samples])


def _computes_in_half(model: Any, parameter: Tensor) -> bool:
    """Whether a model of such parameters computes in half precision: by their dtype, by autocast,
    or because fully_shard casts them."""
    dtypes = {parameter.dtype}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            dtypes.add(module._get_fsdp_state()._mp_policy.param_dtype)
    autocast = torch.is_autocast_enabled(parameter.device.type)
    return autocast or not dtypes.isdisjoint((torch.float16, torch.bfloat16))


_LENGTHS = (5, 9, 4)
_TAIL = 3


class Probe:
    """A few small forwards of a model, on short samples in one packed row."""

    def __init__(self, model: Any, lengths: Sequence[int] = _LENGTHS) -> None:
        self.model, self.traits = model, traits_of(model)
        parameter = next(model.parameters())
        self.device = parameter.device
        self.half = half = _computes_in_half(model, parameter)
        # Of the largest output. Neighbours of the same lengths leave the shapes of all operations
        # as they are, so nothing is rounded differently.
        self.exact = 1e-2 if half else 1e-5
        self.close = 6e-2 if half else 1e-3 if self.device.type == "cuda" else 1e-4
        vocab = _embedding_of(model).weight.shape[0]
        plain = [token for token in self.traits.plain_tokens(62) if token < vocab]
        self.tokens = torch.tensor(plain[1:])
        longest = max(lengths) + 1 if (limit := self.traits.rope_limit) is None else limit.tokens
        self.lengths = [max(1, min(length, longest - 1)) for length in lengths]
        self.random = torch.Generator().manual_seed(0)

    @classmethod
    def reason_of(cls, model: Any, lengths: Sequence[int] = _LENGTHS) -> str | None:
        """Why packed outputs depend on neighbours or differ from each sample alone, else None.
        With fully_shard, call it on all ranks."""
        with probing(model):
            try:
                return cls(model, lengths)._reason()
            except Exception as error:
                line = str(error).strip().partition("\n")[0]
                return f"a small packed forward raised {type(error).__name__}: {line}"

    def _reason(self) -> str | None:
        traits, samples = self.traits, [self.sample(length) for length in self.lengths]
        # Images come without `cu_seq_lens`; see `hf_kwargs`.
        for with_boundaries in (True, False) if traits.has_tower else (True,):
            packed = self._packed(samples, with_boundaries)
            for changed in ((1,), (0, 2)):
                others = [self.sample(len(s)) if k in changed else s for k, s in enumerate(samples)]
                outputs = self._packed(others, with_boundaries)
                kept = [k for k in range(len(samples)) if k not in changed]
                moved = self.distance([outputs[k] for k in kept], [packed[k] for k in kept])
                if not moved <= self.exact:
                    return f"packed segments affect each other (outputs moved by {moved:.1e})"
            alone = [self.run({"input_ids": s[None].to(self.device)})[0] for s in samples]
            moved = self.distance(packed, alone)
            if not moved <= self.close:
                return f"packed outputs differ from those of each sample alone (by {moved:.1e})"
        if traits.rope_indexer is not None and (why := self._still_positions(samples)):
            return why
        return self._both_ways() if traits.has_tower or any(traits.media) else None

    def _still_positions(self, samples: list[Tensor]) -> str | None:
        """Positions that stand still, as in an image, must not be taken for boundaries."""
        lengths = [len(sample) for sample in samples]
        planes = hf_kwargs(packed_row(samples, _TAIL).to(self.device), self.model)[
            "position_ids"
        ].clone()
        first, text = lengths[0], int(self.traits.text_plane)
        planes[text:, :, first + 1 : first + 4] = 1
        packed = self._packed(samples, False, planes)
        alone = []
        for sample, positions in zip(samples, planes.split([*lengths, _TAIL], -1), strict=False):
            tokens = sample[None].to(self.device)
            mask = torch.ones_like(tokens)  # which switches the search for boundaries off
            inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
            alone.append(self.run(inputs)[0])
        moved = self.distance(packed, alone)
        if not moved <= self.close:
            return f"it takes the positions of images for boundaries (outputs moved by {moved:.1e})"
        return None

    def _both_ways(self) -> str | None:
        """Whether a token sees later ones of its own kind, as in an image or a prefix."""
        first = self.sample(6)
        last = first.clone()
        last[-1] = self.tokens[(self.tokens == first[-1]).nonzero()[0, 0] - 1]
        for name in ("token_type_ids", "mm_token_type_ids"):
            for kind in (0, 1) if name in self.traits.parameters else ():
                types = {name: torch.full((1, 6), kind, device=self.device)}
                try:
                    before, after = (
                        self.run({"input_ids": tokens[None].to(self.device), **types})[0, :-1]
                        for tokens in (first, last)
                    )
                except EvenstepError as error:  # our attention, which is causal
                    return str(error).partition(". ")[0]
                except Exception:  # the model refuses such tokens without an image
                    continue
                if not self.distance([after], [before]) <= self.exact:
                    return f"tokens with {name}={kind} see each other both ways"
        return None

    def distance(self, outputs: list[Tensor], expected: list[Tensor]) -> float:
        """The largest difference, relative to the largest value. In half precision the largest
        median of a sample: rounding may send single tokens to other experts."""
        scale = max(float(e.abs().max()) for e in expected) or 1.0
        differences = [(o - e).abs().amax(-1) for o, e in zip(outputs, expected, strict=True)]
        return max(float(d.median() if self.half else d.max()) for d in differences) / scale

    def sample(self, length: int) -> Tensor:
        return self.tokens[torch.randint(len(self.tokens), (length,), generator=self.random)]

    def _packed(
        self, samples: Sequence[Tensor], with_boundaries: bool, positions: Tensor | None = None
    ) -> list[Tensor]:
        """The outputs of each sample in one packed row."""
        batch = packed_row(samples, _TAIL).to(self.device)
        kwargs = hf_kwargs(batch, self.model)
        if positions is not None:
            kwargs["position_ids"] = positions
        if not with_boundaries:
            kwargs = without_boundaries(kwargs)
        outputs = self.run(kwargs)
        if tuple(outputs.shape[:2]) != (batch.rows, batch.width):
            raise ValueError(f"outputs of shape {tuple(outputs.shape)}, not one per slot")
        if not bool(outputs.isfinite().all()):
            raise ValueError("outputs that are not finite")
        return list(outputs[0].split([*map(len, samples), _TAIL])[:-1])

    def run(self, kwargs: dict[str, Any]) -> Tensor:
        outputs = self.model(**self.traits.accepted({"use_cache": False, **kwargs}))
        for name in ("logits", "last_hidden_state"):
            values: Tensor | None = getattr(outputs, name, None)
            if values is not None:
                return values
        raise ValueError("outputs without logits or last_hidden_state")

    def gradient(self) -> Tensor:
        """That of a sum of packed outputs in the embeddings of their tokens."""
        batch = packed_row([self.sample(length) for length in self.lengths], _TAIL)
        leaves: list[Tensor] = []

        def cut(module: Any, args: Any, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        hook = _embedding_of(self.model).register_forward_hook(cut)
        try:
            with torch.enable_grad():
                outputs = self.run(hf_kwargs(batch.to(self.device), self.model))
                outputs = outputs[:, : sum(self.lengths)].float()
                weights = torch.arange(outputs.numel(), device=self.device).cos()
                total = (outputs * weights.view_as(outputs)).sum()
        finally:
            hook.remove()
        (gradient,) = torch.autograd.grad(total, leaves)
        return gradient[0]


_COUNTED = re.compile(r"top_?k|budget|rate|ratio|chunk|block|stride|pool|ngram|kernel")
"""Names of fields of a config after so many tokens of which layers may do something else."""
_MOST_COUNTED = 2048


def carrying_lengths(model: Any) -> tuple[int, int, int]:
    """Lengths of samples that are beyond what the config counts in tokens. Chunks of more than 256
    tokens carry state from token to token as well."""
    longest = 1
    for name, value in vars(text_config(core_of(model))).items():
        if _COUNTED.search(name) and "expert" not in name:
            values = value.values() if isinstance(value, Mapping) else value
            values = values if isinstance(values, Iterable) else [values]
            numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
            most = max(numbers, default=1)
            longest = max(longest, most if re.search("top_?k|budget", name) else min(most, 256))
    if longest > _MOST_COUNTED:
        raise ConfigError(
            f"its config counts {longest} tokens, and small forwards have at most {_MOST_COUNTED}"
        )
    return longest + 5, longest + 9, 4


class _Call(NamedTuple):
    """One call of a module: digests of its tensors by path, (slots,) or () each."""

    name: str
    module: Any
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    axes: dict[str, Axes | None]
    runs_on_rows: bool  # whether it returns values of tokens
    selections: tuple[int, ...]  # among how many scores it selects, inner modules included

    @property
    def kind(self) -> str:
        return class_of(self.module).__name__


class MixerSearch:
    """Finds the modules that carry state, by packed forwards with other tokens in front.

    The innermost module whose inputs at the slots of other segments stay and whose outputs change
    carries state. All modules of its class run on rows from then on, and the search begins again.
    So do modules that select among the tokens of a row, on rows of equal length: ties are resolved
    by the width of a row.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.core = model, core_of(model)
        release(self.core)
        self.probe = Probe(model, carrying_lengths(model))
        self.lengths = self.probe.lengths
        # Of several chunks.
        self.long = Probe(model, [2 * CHUNK + length for length in self.lengths]).lengths
        self.sizes = {size for parameter in model.parameters() for size in parameter.shape}
        self.samples = [self.probe.sample(length) for length in self.lengths]
        self.other = self.probe.sample(self.lengths[0])
        # Modules as they are, without boundaries, which some refuse.
        self.calls = self._calls(self.samples, with_boundaries=False)
        self.longer = self._calls([*self.samples, self.samples[0]], with_boundaries=False)
        self.kinds = set(registered_in(self.core))  # classes that run on rows
        # Classes whose callers compute with more than values of tokens.
        self.unfit: set[str] = set()

    def run(self) -> str | None:
        """Wrap all mixers; why they cannot be found, else None."""
        last: set[str] = set()
        for _ in range(24):
            self._wrap()
            kinds = self._selecting() - self.kinds
            try:
                leak = None if kinds else self._leak(self.samples, self.other)
            except _RefusedError as error:
                if not self._runs():  # so it was not the boundaries
                    if not last:
                        raise error.cause from None
                    self.unfit, self.kinds, last = self.unfit | last, self.kinds - last, set()
                    continue
                leak = next((call for call in self.calls if call.name == error.name), None)
                if leak is None or not leak.runs_on_rows or leak.kind in self.kinds:
                    raise error.cause from None
            if leak is not None:
                kinds = {leak.kind}
                if hasattr(type(leak.module), "config_class") or leak.kind in self.kinds:
                    return f"its {leak.kind} ({leak.name}) carries state between segments"
            if not kinds:
                return None
            last, self.kinds = kinds, self.kinds | kinds
        return "too many kinds of its layers carry state between segments"

    def choose_modes(self) -> None:
        """Run mixers packed instead of on rows, where their outputs and gradients stay the same:
        with their own kernels, given boundaries, or with ours. Classes that were registered stay on
        rows, because small forwards do not show their state."""
        by_kind: dict[str, list[Mixer]] = {}
        for module in mixers_of(self.core).values():
            kind = class_of(module).__name__
            if not module._evenstep_mixer.equal and kind not in registered_in(self.core):
                by_kind.setdefault(kind, []).append(module._evenstep_mixer)
        expected = self._gradient() if by_kind else None
        for mixers in by_kind.values():
            for mode in get_args(Mode):
                for mixer in mixers:
                    mixer.mode = mode
                if mode == "rows" or self._is_exact(mode, expected):
                    break

    def _is_exact(self, mode: Mode, expected: Tensor | None) -> bool:
        """Whether nothing leaks, and outputs and gradients are those of rows."""
        with probing(self.model):
            try:
                other, *samples = map(self.probe.sample, (self.long[0], *self.long))
                if self._leak(self.samples, self.other) or self._leak(samples, other):
                    return False
            except Exception:
                return False
        if Probe.reason_of(self.model, self.long) is not None:
            return False
        # Kernels whose backward fails on rows, or was not run, may be replaced by ours.
        if expected is None:
            return mode == "kernels"
        gradient = self._gradient()
        return gradient is not None and (
            self.probe.distance([gradient], [expected]) <= self.probe.close
        )

    def _gradient(self) -> Tensor | None:
        """`Probe.gradient`; None if it raises, or if backwards of the model communicate."""
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            return None
        with probing(self.model):
            try:
                return Probe(self.model, self.long).gradient()
            except Exception:
                return None

    def _runs(self) -> bool:
        try:
            return bool(self._calls(self.samples, with_boundaries=False))
        except Exception:
            return False

    def _selecting(self) -> set[str]:
        """Classes of the innermost modules that select among the tokens of a row."""
        counts: tuple[dict[str, list[Any]], ...] = ({}, {})
        for by_name, calls in zip(counts, (self.calls, self.longer), strict=True):
            for call in calls:
                by_name.setdefault(call.name, []).append(call.selections)
        selecting = {
            call.name: call.kind
            for call in self.calls
            if call.runs_on_rows
            and call.kind not in self.unfit
            and counts[0][call.name] != counts[1].get(call.name)
        }
        names = [f"{name}." if name else "" for name in selecting]
        return {
            kind
            for name, kind in selecting.items()
            if sum(other.startswith(f"{name}." if name else "") for other in names) == 1
        }

    def _wrap(self) -> None:
        selecting, mixers = self._selecting(), dict[str, Mixer]()
        for call in self.calls:
            if call.kind in self.kinds:
                mixer = mixers.setdefault(call.name, Mixer())
                mixer.axes |= call.axes
                mixer.equal |= call.kind in selecting or equal_lengths(call.kind)
        run_on_rows(self.core, mixers)

    def _leak(self, samples: Sequence[Tensor], other: Tensor) -> _Call | None:
        """The first call whose results at later segments change with another first segment, and
        whose inputs do not."""
        before, after = self._calls(samples), self._calls([other, *samples[1:]])
        first, end = len(other), sum(map(len, samples))

        def moved(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
            for path, a in one.items():
                b = two.get(path)
                if b is None or a.shape != b.shape:
                    return True
                if a.ndim:
                    a, b = a[first:end], b[first:end]
                if not bool((a - b).abs().max() <= self.probe.exact * a.abs().max()):
                    return True
            return False

        later: dict[str, list[_Call]] = {}  # by name; experts may run in one forward only
        for call in after[::-1]:
            later.setdefault(call.name, []).append(call)
        for one in before:
            two = later[one.name].pop() if later.get(one.name) else None
            if two is None or not one.runs_on_rows or one.kind in self.unfit:
                continue
            aligned = {path: d for path, d in one.results.items() if d.ndim}
            if moved(aligned, two.results) and not moved(one.inputs, two.inputs):
                return one
        return None

    def _calls(self, samples: Sequence[Tensor], with_boundaries: bool = True) -> list[_Call]:
        """All calls of modules in a packed forward, in order of completion."""
        tokens = sum(map(len, samples))
        tail = next(n for n in range(3, 4096) if tokens + n not in self.sizes)
        batch = packed_row(samples, tail).to(self.probe.device)
        kwargs = hf_kwargs(batch, self.model)
        if not with_boundaries:
            kwargs = without_boundaries(kwargs)
        calls: list[_Call] = []
        active: list[_Running] = []

        def digests(prefix: str, value: Any) -> tuple[dict[str, Tensor], dict[str, Axes | None]]:
            values: dict[str, Tensor] = {}
            axes: dict[str, Axes | None] = {}
            for path, leaf in leaves_of(value)[0]:
                if isinstance(leaf, Tensor):
                    axes[prefix + path] = at = Axes.of(leaf.shape, batch.width)
                    if at is None or len(at.width) == 1:
                        values[prefix + path] = _digest(leaf, at)
            return values, axes

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: active.append(_Running(name))

        def leave(name: str) -> Callable[..., None]:
            def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
                inputs, taken = digests("", (args, kwargs))
                results, made = digests("result", output)
                runs = any(
                    isinstance(leaf, Tensor)
                    and is_of_tokens(leaf, Axes.of(leaf.shape, batch.width))
                    for _, leaf in leaves_of(output)[0]
                )
                selections = active.pop().selections
                if active:
                    active[-1].selections += selections
                call = _Call(name, module, inputs, results, taken | made, runs, tuple(selections))
                calls.append(call)

            return record

        with ExitStack() as stack:
            for name, module in self.core.named_modules():
                before = module.register_forward_pre_hook(enter(name))
                after = module.register_forward_hook(leave(name), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(_Selections(active))
            try:
                self.probe.run(kwargs)
            except Exception as error:
                if not active or not with_boundaries:
                    raise
                raise _RefusedError(active[-1].name, error) from error
        return calls


@dataclass(slots=True)
class _Running:
    """A module whose forward runs, and among how many scores it has selected."""

    name: str
    selections: list[int] = field(default_factory=list)


def _embedding_of(model: Any) -> Any:
    """The token embedding of a transformers model, or of one inside a module around it."""
    core = core_of(model)
    having = (each for each in core.modules() if hasattr(each, "get_input_embeddings"))
    return next(having, core).get_input_embeddings()


class _RefusedError(Exception):
    """A module raised an error in a packed forward."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(name)
        self.name, self.cause = name, cause


def _digest(tensor: Tensor, axes: Axes | None) -> Tensor:
    """One number per slot, or one of the whole tensor."""
    values = tensor.detach().double()
    if axes is None:
        values = values.flatten()[None]
    else:
        values = values.movedim(axes.width[0], 0).reshape(values.shape[axes.width[0]], -1)
    weights = torch.arange(values.shape[1], device=values.device, dtype=values.dtype).cos()
    sums = values.nan_to_num() @ weights
    return sums[0] if axes is None else sums


class _Selections(TorchFunctionMode):  # type: ignore[misc]
    """Notes in the innermost module that runs that it selects by scores."""

    def __init__(self, active: list[_Running]) -> None:
        super().__init__()
        self.active = active

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.active and name in ("topk", "sort", "argsort", "kthvalue"):
            scores = args[0] if args else kwargs["input"]
            place = 2 if name in ("topk", "kthvalue") else 1
            axis = kwargs.get("dim", args[place] if len(args) > place else -1)
            if scores.is_floating_point() and isinstance(axis, int):
                self.active[-1].selections.append(scores.shape[axis])
        return func(*args, **kwargs)
