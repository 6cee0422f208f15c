"""train: the loop of a training run, on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from evenstep.config.settings import Settings
from evenstep.train.gathered import gathered
from evenstep.train.result import StepResult
from evenstep.train.watch import Watch
from evenstep.trainer.checkpoints import Place
from evenstep.trainer.clock import Clock
from evenstep.trainer.job import Job, job_of
from evenstep.trainer.logs import Board, Line, Log
from evenstep.trainer.outcome import Outcome
from evenstep.trainer.ranks import Ranks, joined
from evenstep.trainer.signals import StopRequest
from evenstep.trainer.state import State, prepared

_WATCH_S = 300.0  # without a sign of life, a rank counts as failed


def train(settings: Settings) -> Outcome:
    """Train until `stream.max_num_steps`, or until SIGINT or SIGTERM, which save a checkpoint.

    In this process, or as one of the ranks that torchrun started; all of them call it. Continues
    from the newest complete checkpoint in `trainer.out`, if there is one.

        outcome = train(load_settings(Path("run.yaml")))
    """
    began, job = time.perf_counter(), job_of(settings)
    with joined(settings.trainer.device) as ranks, StopRequest() as request:
        state = prepared(job, ranks)
        watched = Watch(timeout=_WATCH_S) if ranks.world.size > 1 else nullcontext()
        with watched:
            done = run(job, ranks, state, request)
        return replace(done, seconds=time.perf_counter() - began)


def run(job: Job, ranks: Ranks, state: State, request: StopRequest) -> Outcome:
    """The steps from the state's place on."""
    done, loss, stopped = state.place.step, None, False
    cursor, every = state.place.cursor, job.settings.trainer.save_every
    clock = Clock()
    remember(job, ranks, state)
    with writers(job, ranks, done) as write:
        for step in clock.each(state.stream):
            result = clock.run(state.runner, step)
            clock.update(partial(update, job, state, done))
            loss, cursor = result.loss, step.cursor.to_dict()
            times = gathered(result, ranks.world, ranks.collective)
            write({"step": done, "epoch": step.epoch, **record(result, state.optimizer), **times})
            done += 1
            stopped = ranks.any(request.asked)
            if stopped or done % every == 0 or done == job.steps:
                with clock.saving:
                    state.checkpoints.save(Place(done, cursor), state.model, state.optimizer)
            clock.end()
            if stopped:
                break
    ended = stopped and done < job.steps
    return Outcome(
        steps=done,
        loss=loss,
        stopped=ended,
        seconds=0.0,
        saving=clock.saving.seconds,
        overhead=clock.overhead,
    )


def remember(job: Job, ranks: Ranks, state: State) -> None:
    """Add to `starts.jsonl` what determines the steps from here on, to plan them again later."""
    if not ranks.first:
        return
    stream, place = state.stream, state.place
    starts = Log(job.folder / "starts.jsonl", place.step)
    starts.write(
        {
            "step": place.step,
            "cursor": place.cursor,
            "seed": stream.seed,
            "shuffle": stream.shuffle,
            "recipe": stream.recipe.to_dict(),
        }
    )
    starts.close()


def update(job: Job, state: State, done: int) -> None:
    """Clip the gradient, set the learning rate and update the weights."""
    options = job.settings.optimizer
    if options.clip is not None:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), options.clip)
    for group in state.optimizer.param_groups:
        group["lr"] = options.rate(done, job.steps)
    state.optimizer.step()
    state.optimizer.zero_grad()


def record(result: StepResult, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is logged of a step."""
    return {"lr": optimizer.param_groups[0]["lr"], **result.to_dict()}


@contextmanager
def writers(job: Job, ranks: Ranks, done: int) -> Iterator[Any]:
    """A function that logs a step, on rank 0."""
    if not ranks.first:
        yield lambda values: None
        return
    with ExitStack() as stack:
        every: list[Any] = [
            Log(job.folder / "log.jsonl", done),
            Line(job.steps, done),
        ]
        if job.settings.trainer.tensorboard:
            every.append(Board(job.folder / "tensorboard", done))
        for each in every:
            stack.callback(each.close)

        def write(values: dict[str, Any]) -> None:
            for each in every:
                each.write(values)

        yield write
