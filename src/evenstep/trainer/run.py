"""run: the loop of a training run, on this rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from evenstep.core.recipe import Recipe
from evenstep.data.sources.token_file import TokenFile
from evenstep.data.streams.planned import PlannedStream
from evenstep.errors import ConfigError, EvenstepError, FileError
from evenstep.tensors.losses import cross_entropy
from evenstep.train.result import StepResult
from evenstep.train.runner import Runner
from evenstep.train.watch import Watch
from evenstep.trainer.checkpoints import Checkpoints, Place
from evenstep.trainer.clock import Clock
from evenstep.trainer.logs import Board, Line, Log
from evenstep.trainer.model import build, cost_of, forward_for, wrapped
from evenstep.trainer.outcome import Outcome
from evenstep.trainer.peaks import peak_flops
from evenstep.trainer.ranks import Ranks, joined
from evenstep.trainer.signals import StopRequest
from evenstep.trainer.trainer import Trainer

_WATCH_S = 300.0  # without a sign of life, a rank counts as failed


def run(trainer: Trainer) -> Outcome:
    """Train as `trainer` says. All ranks call it."""
    began = time.perf_counter()
    with joined(trainer.device) as ranks, StopRequest() as request:
        state = prepared(trainer, ranks)
        watched = Watch(timeout=_WATCH_S) if ranks.world.size > 1 else nullcontext()
        with watched:
            done = train(trainer, ranks, state, request)
        return replace(done, seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class State:
    """What a run trains with, on this rank."""

    model: Any
    optimizer: torch.optim.Optimizer
    runner: Runner
    stream: PlannedStream
    place: Place
    checkpoints: Checkpoints


def prepared(trainer: Trainer, ranks: Ranks) -> State:
    """Read the data, build the model, and load the newest checkpoint."""
    corpus = tokenized(trainer, ranks)
    torch.manual_seed(trainer.seed)
    bare = build(trainer.model, trainer.data.vocabulary())
    cost = cost_of(bare)
    recipe = recipe_for(trainer, ranks, bare, corpus)
    model = wrapped(bare, trainer, ranks)
    optimizer = adamw(model, trainer)
    checkpoints = Checkpoints(trainer.folder / "checkpoints", trainer.keep, ranks)
    torch.manual_seed(trainer.seed + 1 + ranks.world.rank)  # dropout differs between ranks
    newest, place = checkpoints.newest(), Place(0, None)
    if newest is not None:
        place = checkpoints.load(newest, model, optimizer)
    stream = PlannedStream(
        corpus,
        recipe,
        world=ranks.world,
        seed=trainer.seed,
        max_num_steps=trainer.max_num_steps,
        infinite_loop=True,
    )
    if place.cursor is not None:
        stream.load_state_dict(place.cursor)
    runner = Runner(
        model=model,
        loss=cross_entropy(),
        collective=ranks.collective,
        forward=forward_for(model, trainer, ranks.device),
        device=ranks.device,
        cost=cost,
        peak_flops=peak_flops(ranks.device, trainer.precision),
    )
    return State(model, optimizer, runner, stream, place, checkpoints)


def train(trainer: Trainer, ranks: Ranks, state: State, request: StopRequest) -> Outcome:
    """The steps from the state's place on."""
    done, loss, stopped = state.place.step, None, False
    cursor = state.place.cursor
    clock = Clock()
    with writers(trainer, ranks, done) as write:
        for step in clock.each(state.stream):
            result = clock.run(state.runner, step)
            clock.update(partial(update, trainer, state, done))
            loss, cursor = result.loss, step.cursor.to_dict()
            times = gathered(ranks, result)
            write({"step": done, "epoch": step.epoch, **record(result, state.optimizer), **times})
            done += 1
            stopped = ranks.any(request.asked)
            if stopped or done % trainer.save_every == 0 or done == trainer.max_num_steps:
                with clock.saving:
                    state.checkpoints.save(Place(done, cursor), state.model, state.optimizer)
            clock.end()
            if stopped:
                break
    ended = stopped and done < trainer.max_num_steps
    return Outcome(
        steps=done,
        loss=loss,
        stopped=ended,
        seconds=0.0,
        saving=clock.saving.seconds,
        overhead=clock.overhead,
    )


def update(trainer: Trainer, state: State, done: int) -> None:
    """Clip the gradient, set the learning rate and update the weights."""
    options = trainer.optimizer
    if options.clip is not None:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), options.clip)
    for group in state.optimizer.param_groups:
        group["lr"] = options.rate(done, trainer.max_num_steps)
    state.optimizer.step()
    state.optimizer.zero_grad()


def tokenized(trainer: Trainer, ranks: Ranks) -> TokenFile:
    """The samples as tokens. Rank 0 writes them; the others wait."""
    path = trainer.folder / "data.tokens"
    failure: EvenstepError | None = None
    if ranks.first:
        try:
            trainer.folder.mkdir(parents=True, exist_ok=True)
            trainer.data.stored(path, reporter())
        except OSError as error:
            failure = FileError(f"{trainer.folder} cannot be written ({error.strerror or error}).")
        except EvenstepError as error:
            failure = error
    if ranks.any(failure is not None):
        raise failure or ConfigError("rank 0 cannot read the data; see its error.")
    ranks.wait()
    return trainer.data.stored(path)


def reporter() -> Any:
    """Progress of tokenizing on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return None

    def report(done: int, total: int) -> None:
        sys.stderr.write(f"\rtokenizing {done:,} of {total:,}")
        sys.stderr.flush()

    return report


def recipe_for(trainer: Trainer, ranks: Ranks, model: Any, corpus: TokenFile) -> Recipe:
    """The recipe with the number of ranks and, unless given, the model's cost; padded if the model
    cannot pack."""
    recipe, size = trainer.recipe, ranks.world.size
    given = recipe.topology.dp
    if given not in (1, size):
        raise ConfigError(
            f"recipe.topology.dp is {given} but {size} processes were started. Remove dp, or start "
            f"torchrun --nproc-per-node {given}."
        )
    changes: dict[str, Any] = {"topology": replace(recipe.topology, dp=size)}
    if recipe.cost == type(recipe.cost)():
        changes["cost"] = cost_of(model)
    if trainer.parallel == "ddp" or size == 1:
        changes["sync_every"] = "step"
    if trainer.model.path is not None:
        from evenstep.integrations.huggingface import choose_layout

        longest = int(corpus.lengths_of(_all(corpus)).max())
        changes["layout"] = choose_layout(model, recipe.layout, longest=longest)
    return replace(recipe, **changes)


def _all(corpus: TokenFile) -> Any:
    import numpy as np

    return np.arange(len(corpus))


def adamw(model: Any, trainer: Trainer) -> torch.optim.Optimizer:
    """AdamW over the weights that are trained; weights of one dimension do not decay."""
    options = trainer.optimizer
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim > 1]
    vectors = [each for each in trained if each.ndim <= 1]
    decays = ((matrices, options.weight_decay), (vectors, 0.0))
    groups = [{"params": each, "weight_decay": decay} for each, decay in decays if each]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)


def record(result: StepResult, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is logged of a step."""
    return {"lr": optimizer.param_groups[0]["lr"], **result.to_dict()}


def gathered(ranks: Ranks, result: StepResult) -> dict[str, list[list[float]]]:
    """Planned cost and busy seconds of every micro-batch of all ranks, (ranks, micro-batches)."""
    own = torch.tensor([result.costs or [0.0] * len(result.busy), result.busy], dtype=torch.float64)
    whole = torch.zeros((ranks.world.size, *own.shape), dtype=torch.float64)
    whole[ranks.world.rank] = own
    costs, busy = ranks.collective.all_reduce_sum(whole).cpu().unbind(1)
    return {"micro_batches/cost": costs.tolist(), "micro_batches/busy": busy.tolist()}


@contextmanager
def writers(trainer: Trainer, ranks: Ranks, done: int) -> Iterator[Any]:
    """A function that logs a step, on rank 0."""
    if not ranks.first:
        yield lambda values: None
        return
    with ExitStack() as stack:
        every: list[Any] = [
            Log(trainer.folder / "log.jsonl", done),
            Line(trainer.max_num_steps, done),
        ]
        if trainer.tensorboard:
            every.append(Board(trainer.folder / "tensorboard", done))
        for each in every:
            stack.callback(each.close)

        def write(values: dict[str, Any]) -> None:
            for each in every:
                each.write(values)

        yield write
