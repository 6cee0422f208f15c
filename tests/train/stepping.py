"""Steps of wrapped models, as the processes of distributed tests run them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Packed
from evenstep.demo import Decoder
from evenstep.tensors import cross_entropy
from evenstep.train import Distributed, Loss, Runner, compute_log_probs
from tests.train.failing import _wrap
from tests.train.on_ranks import Samples, _work, decoder, run_fed
from tests.train.running import Plan, steps_of
from tests.train.steps import COLLATOR, LIMIT, NORMALIZATIONS, SHAPE, Gradient, gradient_of


@dataclass(frozen=True)
class Ran:
    """What a rank has after a step."""

    gradient: Gradient
    norm: float = 0.0
    loss: float = 0.0
    skipped: bool = False
    error: str = ""
    missing: list[str] = field(default_factory=list)
    """Parameters without a gradient."""


def _run(model: Any, rank: int, samples: Samples, known: bool = False, **options: Any) -> Ran:
    step = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=2), _work(samples), known)[rank]
    options = {"loss": cross_entropy(), "collate": COLLATOR, **options}
    ranks = Distributed()
    try:
        result = Runner(model=model, collective=ranks, **options).run(step).reduce(ranks)
    except Exception as error:
        return Ran(gradient_of(model), error=f"{type(error).__name__}: {error}")
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    norm = result.grad_norm
    return Ran(gradient_of(model), norm, result.loss, result.skipped, missing=missing)


# Wrappers that are bypassed -----------------------------------------------------------------------


def bypassed(rank: int, size: int, samples: Samples) -> dict[str, Ran]:
    ways: dict[str, Callable[[Any, Any], Any]] = {
        "module": lambda model, batch: model.module(batch),
        "called": lambda model, batch: model(batch),
        "forward": lambda model, batch: model.forward(batch),
        "twice": lambda model, batch: model(batch) + 0 * model.module(batch),
    }
    found = {}
    for name, forward in ways.items():
        for wrap in ("ddp", "unused", "views"):
            model = _wrap(decoder(torch.float64), wrap, size)
            found[f"{name}, {wrap}"] = _run(model, rank, samples, forward=forward)
    return found


def bypassed_compiled(rank: int, size: int, samples: Samples) -> dict[str, Ran]:
    model, found = _wrap(decoder(torch.float64), "ddp+compile", size), {}
    found["called, compiled"] = _run(model, rank, samples)
    forward = lambda model, batch: model._orig_mod.module(batch)  # noqa: E731
    found["module, compiled"] = _run(model, rank, samples, forward=forward)
    return found


# Unused parameters --------------------------------------------------------------------------------


class Choosing(nn.Module):  # type: ignore[misc]
    """A decoder with two more parameters: one that nothing uses, and one that some ranks use."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.uses = Decoder(SHAPE).double(), uses
        self.sometimes = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        outputs = self.inner(batch)
        return outputs * self.sometimes if self.uses else outputs


def unused(rank: int, size: int, samples: Samples) -> dict[str, Ran]:
    found = {}
    for wrap in ("plain", "unused"):
        for known in (False, True):
            model = _wrap(Choosing(uses=rank == 1), wrap, size)
            found[f"{wrap}, known={known}"] = _run(model, rank, samples, known)
    return found


class Experts(nn.Module):  # type: ignore[misc]
    """A decoder with two parameters of one size, of which a micro-batch uses those of `uses`."""

    def __init__(self, uses: Callable[[Any], str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.uses = Decoder(SHAPE).double(), uses
        self.a = nn.Parameter(torch.full((SHAPE.vocab,), 1.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((SHAPE.vocab,), 0.5, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        outputs = self.inner(batch)
        for name in self.uses(batch):
            outputs = outputs * getattr(self, name)
        return outputs


def _uses_early(batch: Any) -> str:
    """Neither in the last micro-batch, which has the shortest samples."""
    return "ab" if int(batch.seqlens.max()) > 4 else ""


def _in_turn(begin: int) -> Callable[[Any], str]:
    turns = itertools.count(begin)
    return lambda _: "ab"[next(turns) % 2]


def unexchanged(rank: int, size: int, samples: Samples) -> dict[str, Ran]:
    """Models whose framework would not exchange all gradients, or mix those of parameters."""
    found = {}
    for name, wrap, known in (
        ("never, ddp", "ddp", False),
        ("early, unused", "unused", False),
        ("early, fsdp", "fsdp", False),
        ("early, fsdp", "fsdp", True),
        ("by rank, fsdp", "fsdp", False),
        ("by rank, fsdp", "fsdp", True),
    ):
        early = name.startswith("early")
        model = _wrap(Experts(_uses_early if early else lambda _: "ab"[rank]), wrap, size)
        found[f"{name}, known={known}"] = _run(model, rank, samples, known)
    two = {"loss": several(("token mean", "sequence mean")), "mode": "deferred"}
    ways: dict[str, dict[str, Any]] = {"each": {"reduce_every": "micro_batch"}, "separate": two}
    for name, options in ways.items():
        for moves in (0, 1):
            model = _wrap(Experts(_in_turn(moves * rank)), "fsdp", size)
            found[f"turns, {name}, moves={moves}"] = _run(model, rank, samples, **options)
    for name in ("frozen", "unfrozen", "exchanged", "ignored"):
        model, wrap = decoder(torch.float64), "ddp" if name == "frozen" else "unused"
        one, other = model.embed.weight, model.head.weight  # of one size
        one.requires_grad_(name not in ("unfrozen", "exchanged"))
        if name == "ignored":
            names = ["embed.weight"]
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, names
            )
        model = _wrap(model, wrap, size)
        if name == "exchanged":
            _run(model, rank, samples)
        model.zero_grad()
        one.requires_grad_(name != "frozen")
        other.requires_grad_(name != "exchanged")
        found[name] = _run(model, rank, samples)
        if name in ("unfrozen", "ignored"):  # the runner sums all gradients
            found[f"{name}, split"] = _run(model, rank, samples, on_memory="split")
    return found


# Several denominators -----------------------------------------------------------------------------


def several(names: tuple[str, ...]) -> dict[str, Loss]:
    return {
        name: Loss(function=cross_entropy(), normalization=NORMALIZATIONS[name], weight=2.0**-at)
        for at, name in enumerate(names)
    }


def denominators(
    rank: int, size: int, samples: Samples, wraps: list[str], names: tuple[str, ...]
) -> dict[str, Ran]:
    found = {}
    for wrap in wraps:
        for mode in (None, "deferred"):
            model = _wrap(decoder(torch.float64), wrap, size)
            loss = several(names)
            found[f"{wrap}, {mode}"] = _run(model, rank, samples, loss=loss, mode=mode)
        model = _wrap(decoder(torch.float64), wrap, size)
        share = list(range(len(samples)))[rank * 6 : 6 + rank * 6]
        result = run_fed(model, Distributed(), _work(samples), share, loss=several(names))
        found[f"{wrap}, fed"] = Ran(gradient_of(model), result.grad_norm, result.loss)
    return found


# Norms, steps that are not finite, and scalers ----------------------------------------------------


def norms(rank: int, size: int, samples: Samples, wraps: list[str]) -> dict[str, Ran]:
    return {
        f"{wrap}, known={known}": _run(
            _wrap(decoder(torch.float64), wrap, size), rank, samples, known
        )
        for wrap in wraps
        for known in (False, True)
    }


def evaluated(rank: int, size: int, samples: Samples, wraps: list[str]) -> dict[str, list[Ran]]:
    """Steps after an evaluation and after scores, before which the model cleared its gradients."""
    found: dict[str, list[Ran]] = {}
    for wrap in wraps:
        model = _wrap(decoder(torch.float64), wrap, size)
        step: Any = steps_of(Plan("planned", Packed(max_tokens=LIMIT), dp=2), _work(samples))[rank]
        runner = Runner(
            model=model, loss=cross_entropy(), collate=COLLATOR, collective=Distributed()
        )
        found[wrap] = []
        for scores in (False, True):
            _run(model, rank, samples)
            if scores:
                compute_log_probs(model, step)
            else:
                runner.evaluate([step])
            model.zero_grad()
            found[wrap].append(_run(model, rank, samples))
            model.zero_grad()
    return found


def poisoned(rank: int, size: int, samples: Samples, wraps: list[str]) -> dict[str, list[Ran]]:
    """A step that is not finite and the next one, which is."""
    found = {}
    for wrap in wraps:
        for choice in ("raise", "skip"):
            for at in (1, 2):
                model = _wrap(decoder(torch.float64), wrap, size)
                counts = iter(range(99))

                def forward(model: Any, batch: Any, at: int = at, counts: Any = counts) -> Tensor:
                    here = rank == 1 and next(counts) == at
                    return model(batch) * (math.nan if here else 1.0)

                options: dict[str, Any] = {"on_nonfinite": choice, "forward": forward}
                first = _run(model, rank, samples, **options)
                second = _run(model, rank, samples, **options)
                found[f"{wrap}, {choice} at {at}"] = [first, second]
    return found


def scaled(rank: int, size: int, samples: Samples, wraps: list[str]) -> dict[str, Any]:
    """(the unscaled gradient, the norm, the scales after a good and a bad step)."""
    found = {}
    for wrap in wraps:
        model = _wrap(decoder(torch.float64), wrap, size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        amp = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        ran = _run(model, rank, samples, scaler=amp)
        amp.unscale_(optimizer)
        good = Ran(gradient_of(model), ran.norm, error=ran.error)
        amp.step(optimizer)
        amp.update()
        scales = [amp.get_scale()]
        optimizer.zero_grad()
        bad = lambda model, batch: model(batch) * (math.inf if rank else 1.0)  # noqa: E731
        _run(model, rank, samples, scaler=amp, forward=bad)
        amp.step(optimizer)
        amp.update()
        found[wrap] = (good, [*scales, amp.get_scale()])
    return found


def everything(rank: int, size: int, parts: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Each part by its name."""
    return {name: globals()[name](rank, size, *arguments) for name, arguments in parts.items()}
