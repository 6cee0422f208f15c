"""Leaks: checks that neither other segments nor padding affect a segment.

Works by perturbation, for any model. All tokens of one segment are changed, then its length.
Outputs of other segments, and the gradients of these outputs, must not change. The same for padding
and its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import Segments, offsets_of
from evenstep.core.text import seed_number
from evenstep.errors import EvenstepError, InputError
from evenstep.tensors.batch import Batch, Extra, RaggedTensor
from evenstep.tensors.collate import Collator
from evenstep.testing.gradients import Gradients, errors_of_parameters

Model: TypeAlias = Callable[[Batch], Tensor]

PADDING = -1


class LeakError(EvenstepError, AssertionError):
    """A segment or padding affects other segments."""


@dataclass(frozen=True, slots=True)
class Leak:
    """An effect of one segment on others. Segments are numbered as in `Batch.segment_ids`.

    >>> from evenstep.testing import find_leaks  # find_leaks(model, batch) returns a list of these
    """

    changed: int
    """The segment whose tokens were changed, or `PADDING` for all padding."""
    moved: tuple[int, ...]
    """The segments whose outputs changed; for gradients, all other segments."""
    what: Literal["outputs", "gradients"]
    by: float
    """The largest change, relative to the largest value."""
    layer: str | None = None
    """Name of the first layer whose outputs changed while its inputs did not."""
    layer_type: str | None = None
    change: Literal["tokens", "length"] = "tokens"
    """What was changed in the segment."""

    def __str__(self) -> str:
        changed = "padding" if self.changed == PADDING else f"segment {self.changed}"
        changed = f"the length of {changed}" if self.change == "length" else changed
        layer = self.layer or "the model itself"
        where = f", first in {layer} ({self.layer_type})" if self.layer_type else ""
        segments = ", ".join(map(str, self.moved))
        return f"changing {changed} moved the {self.what} of {segments} by {self.by:.1e}{where}"


def find_leaks(
    model: Model,
    batch: Batch,
    *,
    module: nn.Module | None = None,
    vocab: int | None = None,
    gradients: bool = True,
    lengths: bool = True,
    keep_tokens: Sequence[int] = (),
    tolerance: float = 1e-5,
    seed: int = 0,
) -> list[Leak]:
    """Change one segment at a time and list the effects on others; empty if there are none.

    model      any callable from a batch to one output per slot, (rows, width, ...)
    module     the `nn.Module` inside `model`, if that is not one itself; needed to check gradients
               and to name the layer that leaks
    vocab      number of token ids (default: the size of the last axis of the outputs)
    gradients  whether to check gradients of parameters
    lengths    whether to shorten each segment to one token and to lengthen it to twice the longest;
               the model gets batches of other widths
    keep_tokens  token ids that are neither changed nor inserted, such as those of images
    tolerance  changes up to this, relative to the largest value, count as rounding

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> leaky = lambda batch: batch.tokens.cumsum(1).double()[..., None]
    >>> print(*find_leaks(leaky, batch, vocab=10), sep="")
    changing segment 0 moved the outputs of 1 by 5.0e-01
    """
    if batch.keys is not None:
        raise InputError(
            "segments of this batch see others, by a shared prefix or on other ranks, so changes "
            "of one must move others. Plan without prefixes, sharing and context parallelism."
        )
    if module is None and isinstance(model, nn.Module):
        module = model
    probe = _Probe(model, batch, module, vocab, tolerance, seed, keep_tokens)
    leaks = []
    for segment in probe.segments():
        leak = probe.outputs(segment)
        if leak is None and gradients and module is not None:
            leak = probe.gradients(segment)
        if leak is None and lengths and segment != PADDING:
            leak = probe.lengths(segment)
        if leak is not None:
            leaks.append(leak)
    return leaks


def assert_no_leaks(model: Model, batch: Batch, **options: Any) -> None:
    """Raise a `LeakError` that lists all leaks; options as for `find_leaks`.

    >>> from evenstep.testing import assert_no_leaks  # assert_no_leaks(model, batch)
    """
    leaks = find_leaks(model, batch, **options)
    if leaks:
        raise LeakError(
            f"{'; '.join(map(str, leaks))}. Use an attention that respects segment boundaries, or "
            f"the padded layout."
        )


class _Probe:
    """Runs a model on a batch, and on that batch with some tokens changed."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        module: nn.Module | None,
        vocab: int | None,
        tolerance: float,
        seed: int,
        keep_tokens: Sequence[int] = (),
    ) -> None:
        self.model, self.batch, self.module, self.tolerance = model, batch, module, tolerance
        self.real = batch.token_mask
        self.random = torch.Generator().manual_seed(seed_number(seed))
        with torch.no_grad():
            self.base = model(batch)
            again = model(batch)
        self.vocab = vocab or int(self.base.shape[-1])
        self._check(again)
        self.kept = torch.tensor(sorted(keep_tokens), dtype=torch.int64, device=batch.device)
        every = torch.arange(self.vocab, device=batch.device)
        self.choices = every[~torch.isin(every, self.kept)]
        draw = torch.randn(self.base.shape, generator=self.random)
        self.weights = draw.to(self.base.device, self.base.dtype)

    def _check(self, again: Tensor) -> None:
        base, batch = self.base, self.batch
        if tuple(base.shape[:2]) != (batch.rows, batch.width):
            raise InputError(
                f"the model must return one output per slot, ({batch.rows}, {batch.width}, ...), "
                f"got shape {tuple(base.shape)}."
            )
        if self.vocab < 2:
            raise InputError(
                f"vocab must be at least 2, got {self.vocab}. Pass the number of token ids as "
                f"vocab."
            )
        if not base[self.real].isfinite().all():
            raise InputError(
                "the model returns infinite or NaN outputs for real tokens. Look for fully masked "
                "rows in an attention mask."
            )
        difference = (again - base)[self.real].abs()
        if not bool((difference <= self.tolerance * self.scale).all()):
            raise InputError(
                "the model returns different outputs for the same batch. Turn off randomness, for "
                "example with model.eval()."
            )

    @property
    def scale(self) -> Tensor:
        """The largest output of a real token."""
        real = self.base[self.real]
        return real.abs().max() if real.numel() else real.new_zeros(())

    def segments(self) -> Iterator[int]:
        """All segments to change in turn, and padding if there is any."""
        yield from self.batch.segment_ids[self.real].unique().tolist()
        if not self.real.all():
            yield PADDING

    def outputs(self, segment: int) -> Leak | None:
        """Change the tokens of the segment and compare the outputs of others."""
        others = self._others(segment)
        return self._compared(segment, "tokens", others, self._change(segment), others)

    def lengths(self, segment: int) -> Leak | None:
        """Shorten and lengthen the segment and compare the outputs of others."""
        others = self._others(segment)
        if not others.any():
            return None
        changes = (relaid(self.batch, segment, tokens) for tokens in self._resized(segment))
        leaks = (self._compared(segment, "length", others, c.batch, c.others) for c in changes)
        return next((leak for leak in leaks if leak is not None), None)

    def _compared(
        self,
        segment: int,
        change: Literal["tokens", "length"],
        others: Tensor,
        changed: Batch,
        changed_slots: Tensor,
    ) -> Leak | None:
        """Whether outputs of these slots differ in the changed batch, where they may be others."""
        with torch.no_grad():
            difference = self.model(changed)[changed_slots] - self.base[others]
        size, limit = difference.abs().flatten(1).amax(1), self.tolerance * self.scale
        moves = ~(size <= limit)  # also if it is NaN
        if not moves.any():
            return None
        moved = tuple(self.batch.segment_ids[others][moves].unique().tolist())
        layer = self._locate(changed, others, changed_slots)
        leak = Leak(segment, moved, "outputs", float(size.max() / self.scale), *layer)
        return replace(leak, change=change)

    def _resized(self, segment: int) -> Iterator[Tensor]:
        """The tokens of a segment cut to one, but with all kept tokens; then continued to twice
        the length of the longest segment."""
        tokens = self.batch.tokens[self._slots(segment)]
        kept = torch.isin(tokens, self.kept).nonzero()[:, 0].tolist()
        least = max([1, *(at + 1 for at in kept)])
        if least < len(tokens):
            yield tokens[:least]
        more = 2 * int(self.batch.seqlens.max()) - len(tokens)
        drawn = torch.randint(len(self.choices), (more,), generator=self.random)
        yield torch.cat((tokens, self.choices[drawn.to(self.batch.device)]))

    def gradients(self, segment: int) -> Leak | None:
        """Change the segment and compare the parameters' gradients of the outputs of others."""
        others = self._others(segment)
        base, changed = (self._gradient(b, others) for b in (self.batch, self._change(segment)))
        move = max(errors_of_parameters(changed, base).values(), default=0.0)
        if move <= self.tolerance:
            return None
        moved = tuple(self.batch.segment_ids[others].unique().tolist())
        return Leak(segment, moved, "gradients", move)

    def _gradient(self, batch: Batch, slots: Tensor) -> Gradients:
        assert self.module is not None
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            total = (self.model(batch) * self.weights)[slots].sum()
        if not parameters or not total.requires_grad:
            return {}
        found = torch.autograd.grad(
            total, [*parameters.values()], allow_unused=True, materialize_grads=True
        )
        return dict(zip(parameters, found, strict=True))

    def _slots(self, segment: int) -> Tensor:
        return ~self.real if segment == PADDING else self.real & (self.batch.segment_ids == segment)

    def _others(self, segment: int) -> Tensor:
        return self.real & ~self._slots(segment)

    def _change(self, segment: int) -> Batch:
        """The batch with every token of the segment replaced by another one."""
        tokens, count = self.batch.tokens, len(self.choices)
        shift = torch.randint(1, count, tokens.shape, generator=self.random)
        place = torch.searchsorted(self.choices, tokens) + shift.to(self.batch.device)
        changes = self._slots(segment) & ~torch.isin(tokens, self.kept)
        return replace(self.batch, tokens=torch.where(changes, self.choices[place % count], tokens))

    # Locating the layer --------------------------------------------------------------------------

    def _locate(
        self, changed: Batch, slots: Tensor, changed_slots: Tensor
    ) -> tuple[str, str] | tuple[None, None]:
        """Name and type of the first layer, in order of completion, whose outputs at these slots
        changed while its inputs did not."""
        if self.module is None:
            return None, None
        runs = []
        for batch, others in ((self.batch, slots), (changed, changed_slots)):
            with torch.no_grad(), self._recorded(others) as layers:
                self.model(batch)
            runs.append(layers)
        for before, after in zip(*runs, strict=False):
            if self._differ(before.outputs, after.outputs) and not self._differ(
                before.inputs, after.inputs
            ):
                return before.name, before.kind
        return None, None

    def _differ(self, before: list[Tensor], after: list[Tensor]) -> bool:
        return any(
            not bool(((b - a).abs() <= self.tolerance * a.abs().max()).all())
            for a, b in zip(before, after, strict=False)
            if a.numel() and a.shape == b.shape
        )

    @contextmanager
    def _recorded(self, slots: Tensor) -> Iterator[list[_Layer]]:
        """Record every layer's inputs and outputs at some slots, in order of completion."""
        layers: list[_Layer] = []

        def hook(name: str) -> Callable[..., None]:
            def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                given = [*self._at(args, slots), *self._at(kwargs, slots)]
                layers.append(
                    _Layer(name, type(module).__name__, given, [*self._at(output, slots)])
                )

            return record

        assert self.module is not None
        hooks = [
            layer.register_forward_hook(hook(name), with_kwargs=True)
            for name, layer in self.module.named_modules()
        ]
        try:
            yield layers
        finally:
            for each in hooks:
                each.remove()

    def _at(self, value: Any, slots: Tensor) -> Iterator[Tensor]:
        """All tensors in a value that have one entry per slot, at some slots."""
        if isinstance(value, Tensor):
            rows, width = slots.shape
            if not value.is_floating_point():
                return
            if value.ndim > 2 and tuple(value.shape[:2]) == (rows, width):
                yield value[slots].detach().clone()
            elif value.ndim > 1 and value.shape[0] == rows * width:
                yield value[slots.flatten()].detach().clone()
        elif isinstance(value, (list, tuple)):
            for each in value:
                yield from self._at(each, slots)
        elif isinstance(value, dict):
            yield from self._at(list(value.values()), slots)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Inputs and outputs of a layer at the recorded slots."""

    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Relaid:
    """A batch with other tokens in one segment, and the slots of all others, in order."""

    batch: Batch
    others: Tensor


def relaid(batch: Batch, tile: int, tokens: Tensor) -> Relaid:
    """The batch with `tokens` in the segment of this tile; rows are as wide as needed.

    Extras per token are cut, or their last entry is repeated; other extras stay.
    """
    here = batch.to("cpu")
    tiles = (here.sample_ids >= 0).nonzero()[:, 0].tolist()
    samples = [_sample(here, number, at) for number, at in enumerate(tiles)]
    changed = tiles.index(tile)
    samples[changed] = _resized(here, samples[changed], tokens.cpu())
    lengths = np.array([len(sample["input_ids"]) for sample in samples], np.int64)
    rows = (here.cu_seqlens[:-1].numpy()[tiles] // here.width).astype(np.int64)
    offsets = offsets_of(np.bincount(rows, minlength=here.rows).astype(np.int64))
    used = np.add.reduceat(np.append(lengths, 0), offsets[:-1]) * (np.diff(offsets) > 0)
    number = np.arange(len(samples))
    micro = MicroBatch(
        segments=Segments(number, np.zeros(len(samples), np.int64), lengths),
        row_offsets=offsets,
        width=max(here.width, int(used.max())),
        sample_lengths=lengths,
    )
    found = Collator(extras=_declared(here))(micro, samples)
    ids = torch.where(found.sample_ids < 0, -1, here.sample_ids[tiles][found.sample_ids.clamp(0)])
    others = found.token_mask & (found.sample_ids[found.segment_ids] != changed)
    moved = replace(found, sample_ids=ids, aligned=dict(here.aligned)).to(batch.device)
    return Relaid(moved, others.to(batch.device))


def _declared(batch: Batch) -> dict[str, Extra]:
    found = {}
    for name, extra in batch.extras.items():
        aligned: Any = {"label": "token"}.get(batch.aligned[name], batch.aligned[name])
        values = extra.values if isinstance(extra, RaggedTensor) else extra
        shape = tuple(values.shape[2 if aligned == "token" else 1 :])
        found[name] = Extra(aligned=aligned, dtype=values.dtype, shape=shape)
    return found


def _sample(batch: Batch, number: int, tile: int) -> dict[str, Tensor]:
    """Tokens and extras of one segment."""
    begin = int(batch.cu_seqlens[tile])
    slots = slice(begin, begin + int(batch.seqlens[tile]))
    sample = {"input_ids": batch.tokens.flatten()[slots]}
    for name, extra in batch.extras.items():
        if isinstance(extra, RaggedTensor):
            sample[name] = extra.values[extra.offsets[number] : extra.offsets[number + 1]]
        elif batch.aligned[name] == "sequence":
            sample[name] = extra[number]
        else:
            sample[name] = extra.flatten(0, 1)[slots]
    return sample


def _resized(batch: Batch, sample: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    last = len(sample["input_ids"]) - 1
    index = torch.arange(len(tokens)).clamp(max=last)
    per_token = {name for name in batch.extras if batch.aligned[name] in ("token", "label")}
    resized = {name: v[index] if name in per_token else v for name, v in sample.items()}
    return {**resized, "input_ids": tokens}
