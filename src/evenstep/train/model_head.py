"""Losses from the hidden states of a model, computed where its last layer would make logits.

For the time of a forward, the last layer is replaced: it gets the hidden states, runs the losses on
them and returns one number per token in place of the logits, which are not read. So hooks, wrappers
and gathered weights (DDP, fully_shard) are those of any forward of the model.

    hidden states -> [last layer: losses of hidden states, a chunk of logits at a time] -> blanks

What the model does with logits after that layer (a scale, a soft cap) is read off once: a small
forward in which the layer returns known numbers. A model that does anything else keeps its logits.
The blanks are known numbers too, so that a step whose model has changed since then is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Number
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from evenstep.core.plan import MicroBatch
from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch, BatchShard
from evenstep.tensors.collate import Collator
from evenstep.tensors.head import Head
from evenstep.tensors.losses import PerSequence, Sums, select_output
from evenstep.train.framework import (
    ASIDE,
    PLAIN,
    Forward,
    end_forward,
    undisturbed,
    unwrapped,
)

SMALL = {"cuda": 2**24, "cpu": 2**30}
"""Logits of a micro-batch, by device, up to which they are computed at once. On a GPU, no more than
240 MB would be saved; on a CPU, where losses of hidden states are not compiled, they take longer.
"""

Compute: TypeAlias = Callable[[Tensor, Any], Sequence[Tensor]]
"""(hidden states (rows, width, hidden), head) -> tensors, such as the sums of losses."""


class Answer(NamedTuple):
    """What a forward with a replaced last layer returns."""

    outputs: Any
    hidden: Tensor
    results: list[Tensor]
    """What `Compute` returned."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelHead:
    """The last layer of a model, and what its forward does with logits.

    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> from evenstep.train.framework import call
    >>> found = ModelHead.of(Decoder(DecoderShape(vocab=9)), call)
    >>> found.head.scale, found.head.soft_cap
    (1.0, None)
    """

    layer: nn.Module
    head: Head | None
    """None if only its inputs are wanted."""
    unlike: list[Tensor] = field(default_factory=list)
    """Of each forward, on its device: whether the model did something else with the blanks."""

    @classmethod
    def of(cls, model: Any, forward: Forward) -> ModelHead | str | None:
        """The head of a model that `forward` calls, why it cannot be used, or None if the model
        does not tell which layer it is (`get_output_embeddings`)."""
        inner = unwrapped(model)
        getter = getattr(inner, "get_output_embeddings", None)
        layer = None if getter is None else getter()
        if layer is None:
            return None
        if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
            return f"its last layer is a {type(layer).__name__}, not a plain nn.Linear"
        wrappers = [model, getattr(model, "module", None), inner]
        if any(getattr(each, "_orig_mod", None) is not None for each in wrappers) or any(
            each._compiled_call_impl is not None and layer in each.modules()
            for each in (inner, layer)
        ):
            return "it is compiled as a whole; compile its layers instead"
        answers, settings = _ANSWERS.setdefault(layer, WeakKeyDictionary()), _settings(inner, layer)
        before, formula = answers.get(forward, (None, ""))
        if settings != before:
            formula = _read_off(inner, forward, layer)
            answers[forward] = (before if before == CHANGES else settings), formula
        if isinstance(formula, str):
            return formula
        scale, cap = formula
        return cls(layer, Head(layer, scale=scale, soft_cap=cap))

    def run(
        self, forward: Forward, model: Any, batch: Batch | BatchShard, compute: Compute
    ) -> Answer | Any:
        """The answer of `compute`, or the outputs of the model, if its last layer does not get one
        hidden state per slot."""
        answers: list[tuple[Tensor, list[Tensor]]] = []

        def answer(hidden: Tensor) -> Tensor:
            sharded = hasattr(self.layer.weight, "device_mesh")  # by tensor parallelism
            if sharded or hidden.shape[:-1] != batch.tokens.shape:
                return _forward(self.layer, hidden)
            answers.append((hidden, list(compute(hidden, self.head))))
            blank = hidden.new_zeros((*hidden.shape[:-1], 1))
            if self.head is not None:
                blank = _known_numbers(hidden.device, blank.shape)
            blanks: Tensor = _Behind.apply(blank, False, *answers[-1][1])
            return blanks

        with _replaced(self.layer, answer):
            outputs = forward(model, batch)
        if not answers:
            return outputs
        if len(answers) > 1:
            raise ConfigError(
                f"{type(unwrapped(model)).__name__} calls its last layer {len(answers)} times in a "
                f"forward. Pass a forward of your own, whose outputs are used as they are."
            )
        ((hidden, results),) = answers
        blanks = select_output(outputs, "logits", batch.rows, batch.width)
        if self.head is not None:
            self.unlike.append(_unlike(hidden.shape[:-1], blanks.detach(), self.head))
        if blanks.requires_grad:
            results = [_Behind.apply(each, True, blanks) for each in results]
        return Answer(outputs, hidden, results)


_ANSWERS: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()
"""By last layer and forward: the settings of the model then, and (scale, soft cap), or why the
layer cannot be replaced."""
CHANGES = ()
"""In place of the settings of a model that has changed without them: it is read off every step."""
_WARNED: WeakSet[Any] = WeakSet()


class Heads:
    """When losses or log-probs are computed from hidden states.

    They are if the forward is known to return the model's logits as they are, and logits are large.
    With `must`, always, or else it is an error.
    """

    def __init__(self, model: Any, forward: Forward, *, able: bool, must: bool) -> None:
        self._model, self._forward, self._must = model, forward, must
        self._may = able and (must or forward in PLAIN)
        self._vocabulary = 0
        self._found: ModelHead | None = None  # in this step
        if self._may:
            getter = getattr(unwrapped(model), "get_output_embeddings", None)
            weight = getattr(None if getter is None else getter(), "weight", None)
            self._vocabulary = 0 if weight is None else len(weight)
            if self._must or isinstance(unwrapped(model), FSDPModule):
                self._find()  # ranks of fully_shard run the small forward together

    @classmethod
    def of_losses(cls, model: Any, forward: Forward, functions: Sequence[Any]) -> Heads:
        """For losses, of which all that read logits must be able to read hidden states."""
        reading = [each for each in functions if getattr(each, "output", "logits") == "logits"]
        must = any(getattr(each, "head", None) == "model" for each in reading)
        able = all(
            isinstance(each, PerSequence) and each.takes_hidden and not isinstance(each.head, Head)
            for each in reading
        )
        if must and not able:
            raise ConfigError(
                "head='model' computes no logits, but another loss of the runner needs them. Leave "
                "head out."
            )
        return cls(model, forward, able=bool(reading) and able, must=must)

    def at(self, batch: Batch | BatchShard) -> ModelHead | None:
        """The head that computes the losses of this batch; None: they are computed from logits."""
        least = SMALL.get(batch.device.type, SMALL["cuda"])
        # Ranks that share samples sum losses over each other, so all must do it at one place.
        large = batch.exchange is not None or batch.rows * batch.width * self._vocabulary > least
        return self._find() if self._may and (self._must or large) else None

    def run(
        self,
        shard: Batch | BatchShard,
        functions: Mapping[str, Any],
        batches: Mapping[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """(outputs of the model; the losses that were computed from its hidden states, by name).

        `batches` are what each function reads. If all were computed so, the hidden states stand in
        place of the outputs.
        """
        head = self.at(shard)
        if head is None:
            return self._forward(self._model, shard), {}
        losses: dict[str, Sums] = {}

        def compute(hidden: Tensor, layer: Head) -> list[Tensor]:
            for name, function in functions.items():
                if isinstance(function, PerSequence) and function.takes_hidden:
                    losses[name] = function(hidden, batches[name], layer)
            return [each.loss for each in losses.values()]

        answer = head.run(self._forward, self._model, shard, compute)
        if not isinstance(answer, Answer):
            return answer, {}
        totals = dict(zip(losses, answer.results, strict=True))
        losses = {name: replace(sums, loss=totals[name]) for name, sums in losses.items()}
        return answer.hidden if len(losses) == len(functions) else answer.outputs, losses

    def check(self) -> None:
        """Raise if the model did something else with logits than was read off. Waits for the
        forwards so far."""
        head = self._found
        if head is None or not head.unlike:
            return
        unlike, head.unlike[:] = bool(torch.stack(head.unlike).any()), []
        if unlike:
            _ANSWERS[head.layer][self._forward] = CHANGES, ""
            raise ConfigError(
                f"what {type(unwrapped(self._model)).__name__} does with its logits has changed "
                f"since its last layer was read off, so the loss of this step would be wrong. Run "
                f"the step again: from now on the layer is read off before every step. Set the "
                f"scale as an attribute of the model or its config, which is noticed, or pass a "
                f"forward of your own, whose logits are used as they are."
            )

    def _find(self) -> ModelHead | None:
        if self._found is not None:
            return self._found
        head, name = ModelHead.of(self._model, self._forward), type(unwrapped(self._model)).__name__
        if isinstance(head, ModelHead):
            self._found = head
            return head
        if self._must:
            why = head or "it has no get_output_embeddings() that returns one"
            raise ConfigError(
                f"head='model' cannot be used with {name}: {why}. Leave head out to use its logits."
            )
        self._may = False
        inner = unwrapped(self._model)
        if head is not None and inner not in _WARNED:
            _WARNED.add(inner)
            warnings.warn(
                f"the loss of {name} takes the memory of all logits: {head}.", stacklevel=2
            )
        return None


def _settings(model: Any, layer: nn.Module) -> tuple[Any, ...]:
    """What changes if the model is told to do something else with its logits: numbers of its
    configuration, its own ones, texts and functions, its buffers and frozen weights, hooks; and
    which of all weights are trained, because those behind the last layer may be."""
    config = getattr(model, "config", None)
    named = dict(getattr(config, "__dict__", {}))
    parts = [vars(each) for each in named.values() if hasattr(each, "to_dict")]
    every = [pair for each in (named, *parts) for pair in each.items()]
    settings: list[tuple[str, object]] = [
        (name, value) for name, value in every if isinstance(value, int | float | None)
    ]
    own = {name: value for name, value in vars(model).items() if name != "training"}
    for name, value in own.items():
        if isinstance(value, Number | str | None):
            settings.append((name, value))
        elif callable(value):
            settings.append((name, id(value)))
    tensors = [*own.values(), *model._buffers.values(), *model._parameters.values()]
    frozen = [(id(t), t._version) for t in tensors if isinstance(t, Tensor) and not t.requires_grad]
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    return (*settings, *frozen, *layer._forward_hooks, *model._forward_hooks, trained)


def _read_off(model: Any, forward: Forward, layer: nn.Linear) -> tuple[float, float | None] | str:
    """What `_read_mode` says, if it is the same in training and in evaluation."""
    evaluated, trained = (_read_mode(model, forward, layer, mode) for mode in (False, True))
    if evaluated == trained or isinstance(evaluated, str):
        return evaluated
    if isinstance(trained, str):
        return trained
    return "it changes logits in training, but not so in evaluation"


def _read_mode(
    model: Any, forward: Forward, layer: nn.Linear, training: bool
) -> tuple[float, float | None] | str:
    """(scale, soft cap) of what the model does with logits, or why it is neither.

    In a small forward, the layer returns three rows of known numbers over the vocabulary, in
    float64: tiny ones, which only a scale changes, usual ones, and huge ones, which show a cap.
    """
    random = torch.Generator().manual_seed(0)
    size = (3, layer.out_features)
    numbers = torch.rand(size, generator=random, dtype=torch.float64) * 120 - 60
    signs = torch.where(numbers[0] < 0, -1.0, 1.0).double()
    numbers[0], numbers[2] = signs * 2.0**-40, signs * 2.0**20
    calls = 0

    def answer(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        torch.set_grad_enabled(True)  # to see whether weights take part from here on
        return numbers.to(hidden.device).expand(*hidden.shape[:-2], -1, -1)

    batch = Collator()(MicroBatch.one_row([3]), [{"input_ids": [0, 0, 0]}])
    with undisturbed(model):
        model.training = training  # and of its layers none
        device = next(iter(model.parameters())).device
        try:
            with _replaced(layer, answer):
                outputs = forward(model, batch.to(device))
            logits = select_output(outputs, "logits", 1, 3)
        except Exception as error:
            end_forward(unwrapped(model))
            line = str(error).strip().partition("\n")[0]
            return f"a small forward raised {type(error).__name__}: {line}"
    if calls != 1:
        return f"a forward calls its last layer {calls} times"
    if logits.requires_grad:
        return "it has weights after its last layer"
    if tuple(logits.shape) != (1, *size):
        return f"it turns logits of shape {(1, *size)} into {tuple(logits.shape)}"
    formula = _fit(numbers, logits[0].detach().cpu())
    return "it changes logits by more than a scale and a soft cap" if formula is None else formula


def _fit(before: Tensor, after: Tensor) -> tuple[float, float | None] | None:
    """(scale, soft cap) with after = cap * tanh(scale * before / cap), if there are such."""
    if torch.equal(after, before.to(after.dtype)):
        return 1.0, None
    precision = torch.finfo(after.dtype).eps
    if precision > 1e-6:
        return None  # half precision does not show a scale exactly
    after = after.double()
    scale = float((after[0] / before[0]).mean())
    cap = float(after[2].abs().amax())
    for soft_cap in (None, cap):
        expected = before * scale
        if soft_cap is not None:
            expected = torch.tanh(expected / soft_cap) * soft_cap
        if torch.allclose(after, expected, rtol=64 * precision, atol=0.0):
            return scale, soft_cap
    return None


@cache
def _table(device: torch.device) -> Tensor:
    """Numbers of both signs; a cap changes the large ones, which are powers of two, so that every
    dtype holds them."""
    table = [(-1.0) ** at * 2.0 ** (6 * at - 4) for at in range(5)]
    return torch.tensor(table, dtype=torch.float64, device=device)


def _known_numbers(device: torch.device, shape: Sequence[int]) -> Tensor:
    """Those of the table, in turn."""
    table, count = _table(device), math.prod(shape)
    return table.repeat(-(-count // len(table)))[:count].view(*shape)


def _unlike(slots: Sequence[int], after: Tensor, head: Head) -> Tensor:
    """Whether a model made something else of the known numbers of slots than the head says; on its
    device."""
    known = _known_numbers(after.device, (*slots, 1))
    if after.shape != known.shape:
        return torch.ones((), dtype=torch.bool, device=after.device)
    exact, expected = head.scale == 1.0 and head.soft_cap is None, known * head.scale
    if head.soft_cap is not None:
        expected = torch.tanh(expected / head.soft_cap) * head.soft_cap
    expected = expected.to(after.dtype)
    near = 0.0 if exact else 64 * torch.finfo(after.dtype).eps
    return ~torch.isclose(after, expected, rtol=near, atol=0.0).all()


def _forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    """What the layer computes."""
    logits: Tensor = type(layer).forward(layer, hidden)
    return logits


@contextmanager
def _replaced(layer: nn.Module, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run `answer` in place of the layer's forward, except in small forwards that a check makes."""
    depth = ASIDE.get()

    def forward(hidden: Tensor) -> Tensor:
        return answer(hidden) if ASIDE.get() == depth else _forward(layer, hidden)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


class _Behind(torch.autograd.Function):  # type: ignore[misc]
    """A value whose backward runs that of others first: they get zeros, or no gradient.

    Frameworks prepare the backward of a module when the gradient of its outputs arrives. So results
    stand behind the outputs of the model, and these behind the results as they were computed.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, zeros: bool, *others: Tensor) -> Tensor:
        ctx.zeros, ctx.count = zeros, len(others)
        ctx.save_for_backward(*(others if zeros else ()))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.zeros:
            return tuple([None] * (2 + ctx.count))
        return (gradient, None, *(torch.zeros_like(each) for each in ctx.saved_tensors))
