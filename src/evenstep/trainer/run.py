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
from evenstep.errors import MicroBatchError
from evenstep.train.result import StepResult, gathered
from evenstep.train.watch import Watch
from evenstep.trainer.checkpoints import Place
from evenstep.trainer.clock import Clock
from evenstep.trainer.job import Job, job_of
from evenstep.trainer.logs import Board, Line, Log
from evenstep.trainer.outcome import Outcome
from evenstep.trainer.ranks import Ranks, joined, reserved
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
    with (
        joined(settings.trainer.device) as ranks,
        reserved(job.folder, ranks),
        StopRequest() as request,
    ):
        state = prepared(job, ranks)
        watched = Watch(timeout=_WATCH_S) if ranks.world.size > 1 else nullcontext()
        with watched:
            done = run(job, ranks, state, request)
        return replace(done, seconds=time.perf_counter() - began)


def run(job: Job, ranks: Ranks, state: State, request: StopRequest) -> Outcome:
    """The steps from the state's place on."""
    done, cursor, skipped = state.place
    loss, stopped, every = None, False, job.settings.trainer.save_every
    clock = Clock()
    remember(job, ranks, state)
    with writers(job, ranks, done) as write:
        for step in clock.each(state.stream):
            result = clock.run(state.runner, step)
            skipped += result.skipped
            refuse_many(skipped, job)
            clock.update(partial(update, job, state, done, result.skipped))
            loss, cursor = loss if result.skipped else result.loss, step.cursor.to_dict()
            times = gathered(result, ranks.collective)
            write({"step": done, "epoch": step.epoch, **record(result, state.optimizer), **times})
            done += 1
            stopped = ranks.any(request.asked)
            if stopped or done % every == 0 or done == job.steps:
                with clock.saving:
                    place = Place(done, cursor, skipped)
                    state.checkpoints.save(place, state.model, state.optimizer)
            clock.end()
            if stopped:
                break
    ended = stopped and done < job.steps
    return Outcome(
        steps=done,
        loss=loss,
        stopped=ended,
        skipped=skipped,
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


def refuse_many(skipped: int, job: Job) -> None:
    """Raise if more steps of the run were skipped than may be."""
    most = job.settings.trainer.max_skipped
    if skipped > most:
        raise MicroBatchError(
            f"the loss or gradient of {skipped} steps of the run was not finite, more than "
            f"trainer.max_skipped={most}. Lower optimizer.lr; trainer.on_nonfinite=stop names the "
            f"samples of such a step."
        )


def update(job: Job, state: State, done: int, skipped: bool) -> None:
    """Clip the gradient, set the learning rate and update the weights, unless the step was
    skipped."""
    options = job.settings.optimizer
    for group in state.optimizer.param_groups:
        group["lr"] = options.rate(done, job.steps)
    if skipped:
        return
    if options.clip is not None:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), options.clip)
    state.optimizer.step()
    state.optimizer.zero_grad()


def record(result: StepResult, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is logged of a step."""
    values = {"lr": optimizer.param_groups[0]["lr"], **result.to_dict()}
    return {**values, "skipped": True} if result.skipped else values


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
