"""train: a training run from its settings to its end, on this rank.

train -> prepare: data, model, optimizer, the newest checkpoint -> run: step by step -> Outcome
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from evenstep.config.runs import changed_settings, peak_of_steps, store_settings
from evenstep.config.settings import Settings
from evenstep.core.recipe import Recipe, Steps, SyncEvery
from evenstep.core.step import Step
from evenstep.data.planned import PlannedStream
from evenstep.errors import ConfigError, MicroBatchError
from evenstep.report.simulation.memory import USABLE
from evenstep.tensors.losses import cross_entropy
from evenstep.tensors.preference import dpo
from evenstep.train.normalization import GroupMean, TokenMean
from evenstep.train.result import StepResult, Stopwatch, gathered
from evenstep.train.runner import Runner
from evenstep.train.watch import Watch
from evenstep.trainer.checkpoints import Checkpoints, Place
from evenstep.trainer.export import export_model
from evenstep.trainer.job import Job, job_of
from evenstep.trainer.logs import Log, writers
from evenstep.trainer.model import adamw, build, cost_of, forward_for, peak_flops, wrapped
from evenstep.trainer.ranks import Ranks, joined, reserved
from evenstep.trainer.samples import Samples, fitted, recipe_for, stored_samples, with_references

_WATCH_S = 300.0  # without a sign of life, a rank counts as failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended.

    steps       steps of the whole run that are done
    loss        the loss of the last step that was not skipped; None if no step was run
    validation  the last loss on held-out data; None without any
    best        the step and the loss of the best evaluation
    stopped     whether a signal ended it before the last step
    skipped     steps of the whole run that were skipped because they were not finite
    seconds     of this call
    saving      seconds of these that the loop waited for checkpoints
    overhead    share of the time of steps, without checkpoints and evaluations, that is neither
                forward, backward nor optimizer; None if there was one step only
    """

    steps: int
    loss: float | None
    validation: float | None
    best: tuple[int, float] | None
    stopped: bool
    skipped: int
    seconds: float
    saving: float
    overhead: float | None


@dataclass(frozen=True, slots=True)
class State:
    """What a run trains with, on this rank."""

    model: Any
    optimizer: torch.optim.Optimizer
    runner: Runner
    samples: Samples
    stream: PlannedStream
    evaluate: Callable[[], dict[str, float]] | None
    """The losses on held-out data, by name; None without any."""
    place: Place
    checkpoints: Checkpoints


def train(settings: Settings) -> Outcome:
    """Train until `stream.max_num_steps`, or until SIGINT or SIGTERM, which save a checkpoint.

    In this process, or as one of the ranks that torchrun, Slurm or Ray started; all of them call
    it. Continues from the newest complete checkpoint in `trainer.out`, if there is one.

        outcome = train(load_settings(Path("run.yaml")))
    """
    began, job = time.perf_counter(), job_of(settings)
    with (
        joined(settings.trainer.device) as ranks,
        reserved(job.folder, ranks),
        StopRequest() as request,
    ):
        outcome, first = prepare_and_run(job, ranks, request), ranks.first
    if settings.trainer.save and first and not outcome.stopped:  # the model is free by now
        export_model(job.folder, Path(settings.trainer.save))
    return replace(outcome, seconds=time.perf_counter() - began)


def prepare_and_run(job: Job, ranks: Ranks, request: StopRequest) -> Outcome:
    """Everything that needs the model."""
    changed = changed_settings(job.folder, job.settings)
    state = prepare(job, ranks)
    remember(job, ranks, state, changed)
    try:
        with Watch(timeout=_WATCH_S) if ranks.world.size > 1 else nullcontext():
            return run(job, ranks, state, request)
    finally:
        state.checkpoints.wait()


# Before the first step ----------------------------------------------------------------------------


def prepare(job: Job, ranks: Ranks) -> State:
    """Read the data, build the model, and load the newest checkpoint."""
    settings, (samples, held_out) = job.settings, stored_samples(job, ranks)
    torch.manual_seed(settings.stream.seed)
    bare = build(settings.model, job.corpus.vocabulary())
    cost = cost_of(bare)
    recipe = recipe_for(job, ranks.world.size, cost)
    if settings.model.path is not None:
        recipe = fitted(recipe, bare, samples)
    model = wrapped(bare, settings.trainer, ranks)
    forward = forward_for(model, settings.trainer, ranks.device)
    if settings.trainer.job == "dpo":
        scoring = (job, ranks, model, forward, recipe)
        samples = with_references(samples, *scoring)
        held_out = held_out and with_references(held_out, *scoring)
    optimizer = adamw(model, settings.optimizer)
    checkpoints = Checkpoints(job.folder / "checkpoints", settings.trainer.keep, ranks)
    torch.manual_seed(settings.stream.seed + 1 + ranks.world.rank)  # dropout differs between ranks
    place = checkpoints.resume(model, optimizer, settings.trainer.fall_back)
    if place.step > job.steps:
        raise ConfigError(
            f"stream.max_num_steps is {job.steps}, but {place.step} steps are done in "
            f"{job.folder}. Raise it, or set trainer.out to another folder."
        )
    stream = samples.steps(job, recipe, ranks.world)
    if place.cursor is not None:
        stream.load_state_dict(place.cursor)
    pairs = settings.trainer.job == "dpo"
    runner = Runner(
        model=model,
        loss=dpo(beta=settings.trainer.beta) if pairs else cross_entropy(),
        normalization=GroupMean() if pairs else TokenMean(),
        mode="per_micro_batch" if settings.trainer.per_micro_batch_normalization else None,
        collective=ranks.collective,
        collate=samples.collate,
        forward=forward,
        device=ranks.device,
        cost=cost,
        reduce_every=reduce_every(job, ranks, model, samples, recipe),
        on_nonfinite="skip" if settings.trainer.on_nonfinite == "skip" else "raise",
        peak_flops=peak_flops(ranks.device, settings.trainer.precision),
    )
    evaluate = None if held_out is None else evaluator(job, ranks, runner, held_out, recipe)
    return State(model, optimizer, runner, samples, stream, evaluate, place, checkpoints)


def reduce_every(job: Job, ranks: Ranks, model: Any, samples: Samples, recipe: Recipe) -> SyncEvery:
    """When gradients of fully_shard are scattered: as asked, else once per step unless a rank lacks
    the memory to sum them before."""
    settings, size = job.settings, ranks.world.size
    if size == 1 or settings.trainer.parallel == "ddp":
        return "step"
    if settings.trainer.reduce_every is not None or ranks.device.type != "cuda":
        return settings.trainer.reduce_every or "step"
    plans, weights = samples.first_plans(job, recipe, ranks.world), list(model.parameters())
    trained = sum(each.numel() for each in weights if each.requires_grad)
    trained /= sum(each.numel() for each in weights)
    summed, scattered = (peak_of_steps(settings, size, plans, trained, e) for e in (False, True))
    room = USABLE * torch.cuda.get_device_properties(ranks.device).total_memory
    return "micro_batch" if ranks.any(room < summed > scattered) else "step"


def evaluator(
    job: Job, ranks: Ranks, runner: Runner, held_out: Samples, recipe: Recipe
) -> Callable[[], dict[str, float]]:
    """A function that gives the losses on held-out samples: of all, and of each source."""
    names, size = job.corpus.sources, min(len(held_out.file), 64 * ranks.world.size)
    recipe = replace(recipe, steps=Steps(samples=size))  # none of them is left over
    numbers = held_out.sources() if len(names) > 1 else None
    runner = replace(runner, collate=held_out.collate)

    def evaluate() -> dict[str, float]:
        steps = held_out.stream(recipe, ranks.world, shuffle=False)
        result = runner.evaluate(steps, numbers)
        by_source = zip(names, result.sources, strict=False)
        losses = {f"validation/loss/{name}": loss for name, loss in by_source}
        for name in ("accuracy", "margin") if held_out.pairs else ():
            losses[f"validation/{name}"] = result.metrics[name]
        return {"validation/loss": result.loss, **losses}

    return evaluate


def remember(job: Job, ranks: Ranks, state: State, changed: dict[str, tuple[Any, Any]]) -> None:
    """Add to `starts.jsonl` what determines the steps from here on, to plan them again later, and
    what changed since the last start."""
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
            "data": [str(path.resolve()) for path in state.samples.file.paths],
            "pairs": state.samples.pairs,
            "reduce_every": state.runner.reduce_every,
            "changed": {name: list(values) for name, values in changed.items()},
        }
    )
    starts.close()
    for name, (before, now) in changed.items():
        with suppress(OSError):  # its reader has ended
            sys.stderr.write(f"{name} was {before}, is {now} from step {place.step} on\n")
    store_settings(job.folder, job.settings)


# Step by step -------------------------------------------------------------------------------------


def run(job: Job, ranks: Ranks, state: State, request: StopRequest) -> Outcome:
    """The steps from the state's place on."""
    place, clock, trainer = state.place, Clock(), job.settings.trainer
    loss = validation = None
    stopped, evaluate_every = False, trainer.evaluate_every or trainer.save_every
    with writers(job, ranks, place.step) as write:
        for step in clock.each(state.stream):
            result = state.runner.run(step).reduce(ranks.collective)
            clock.model += result.timings.compute
            skipped = place.skipped + result.skipped
            with clock.updating:
                update(job, state, place.step, result.skipped, skipped)
            values = record(result, state.optimizer) | gathered(result, ranks.collective)
            values |= {"step": place.step, "epoch": step.epoch}
            values["seconds/plan"] = clock.planning.seconds
            loss = loss if result.skipped else result.loss
            done = place.step + 1
            place = Place(done, step.cursor.to_dict(), skipped, place.best)
            stopped = ranks.any(request.asked)
            due = stopped or done == job.steps or done % trainer.save_every == 0
            better = False
            if state.evaluate is not None and (done == job.steps or done % evaluate_every == 0):
                with clock.evaluating:
                    values |= state.evaluate()
                validation = values["validation/loss"]
                better = place.best is None or validation < place.best[1]
                place = place._replace(best=(done, validation) if better else place.best)
            write(values)
            if due or better:
                with clock.saving:
                    state.checkpoints.save(place, state.model, state.optimizer)
            if stopped:
                break
        with clock.saving:
            state.checkpoints.finish()
    return Outcome(
        steps=place.step,
        loss=loss,
        validation=validation,
        best=place.best,
        stopped=stopped and place.step < job.steps,
        skipped=place.skipped,
        seconds=0.0,
        saving=clock.saving.seconds,
        overhead=clock.overhead,
    )


def update(job: Job, state: State, done: int, skip: bool, skipped: int) -> None:
    """Set the learning rate, clip the gradient and update the weights, or skip that; of the run,
    `skipped` steps by now."""
    options, most = job.settings.optimizer, job.settings.trainer.max_skipped
    for group in state.optimizer.param_groups:
        group["lr"] = options.rate(done, job.steps)
    if skipped > most:
        raise MicroBatchError(
            f"the loss or gradient of {skipped} steps of the run was not finite, more than "
            f"trainer.max_skipped={most}. Lower optimizer.lr; trainer.on_nonfinite=stop names the "
            f"samples of such a step."
        )
    if skip:
        return
    if options.clip is not None:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), options.clip)
    state.optimizer.step()
    state.optimizer.zero_grad()


def record(result: StepResult, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is logged of a step."""
    values = {"lr": optimizer.param_groups[0]["lr"], **result.to_dict()}
    return {**values, "skipped": True} if result.skipped else values


class Clock:
    """Where the time of steps goes: the model and the optimizer, or all else."""

    def __init__(self) -> None:
        self.planning, self.updating = Stopwatch(), Stopwatch()
        self.saving, self.evaluating = Stopwatch(), Stopwatch()  # which are not parts of a step
        self.model = self._began = self.whole = 0.0

    def each(self, stream: Iterable[Step]) -> Iterator[Step]:
        """The steps. The first also compiles kernels, so that it is left out of the whole time."""
        steps = iter(stream)
        while True:
            self.planning.seconds = 0.0
            with self.planning:
                step = next(steps, None)
            if step is None:
                return
            yield step
            beside = self.saving.seconds + self.evaluating.seconds
            if self._began:
                self.whole = time.perf_counter() - beside - self._began
            else:
                self._began, self.model = time.perf_counter() - beside, 0.0
                self.updating.seconds = 0.0

    @property
    def overhead(self) -> float | None:
        """The share of all else; None before the second step."""
        return 1 - (self.model + self.updating.seconds) / self.whole if self.whole else None


class StopRequest:
    """Whether SIGINT or SIGTERM asked this process to stop. A second one ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            asking = (signal.SIGINT, signal.SIGTERM)
            self._before = {each: signal.signal(each, self._note) for each in asking}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.__exit__()
            signal.raise_signal(number)
        self.asked = True
