"""accelerate: a planned stream as a prepared dataloader, for loops with an `Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor

from evenstep.data.planned import PlannedStream
from evenstep.data.source import Progress, check_some_loss
from evenstep.data.stream import Stream
from evenstep.errors import ConfigError, CursorError, InputError
from evenstep.integrations.dataloader import Collate, refuse_reserved
from evenstep.integrations.hf_arguments import HfCollate
from evenstep.integrations.huggingface import check_layout
from evenstep.integrations.run_state import all_gather
from evenstep.integrations.sampler import (
    STATE,
    Part,
    PartDataset,
    PlannedBatchSampler,
    pop_predicted,
)
from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.train.result import ANY_CAUSE

__all__ = ["StepLoader", "accelerate_loader"]


def accelerate_loader(
    accelerator: Any,
    stream: PlannedStream,
    *,
    model: Any = None,
    collate: Collate | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> StepLoader:
    """The micro-batches of this process, on its device, as keyword arguments of the model.

        accelerator = Accelerator(gradient_accumulation_steps=4)
        world = World(accelerator.process_index, accelerator.num_processes)
        stream = PlannedStream(source, recipe, world=world)  # recipe: Steps(micro_batches=4)
        loader = accelerate_loader(accelerator, stream, model=model)
        for epoch in range(loader.epoch, 3):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()

    `num_items_in_batch` in a batch makes the gradient that of the mean over all labels of the step,
    on all ranks. The mean of the losses over the micro-batches and ranks of a step is its loss.

    `len` is exact for the epoch that is run next; `loader.num_steps(3)` is the number of optimizer
    steps of three epochs. Every pass is the next epoch, with its own order. The position is saved
    and restored by `accelerator.save_state` and `load_state`, or by the loader's `state_dict` and
    `load_state_dict`.

    collate   (micro-batch, samples by id) -> inputs with `labels` or `shift_labels`. Default:
              `HfCollate(model=model)`
    progress  called with (done, total) while `len` counts the micro-batches of an epoch
    options   of torch's `DataLoader`, such as `num_workers`
    """
    refuse_reserved(options)
    check_accelerator(accelerator, stream)
    check_fingerprints(stream)
    if collate is None:
        check_some_loss(stream.source)
    per_step = accelerator.gradient_accumulation_steps
    sampler = _OwnedSampler(stream, per_step=per_step, progress=progress)
    if model is None and collate is None:
        raise ConfigError("accelerate_loader needs model=model, or a `collate` of your own.")
    collate = HfCollate(model=model) if collate is None else collate
    judged = collate.model if isinstance(collate, HfCollate) else None
    if judged is not None and any(hasattr(each, "config") for each in judged.modules()):
        check_layout(judged, stream.recipe.layout)  # others are not models of transformers
    loader = StepLoader(sampler, collate, accelerator, **options)
    accelerator.prepare_data_loader(loader)  # for save_state; the loader stays as it is
    return loader


def check_accelerator(accelerator: Any, stream: Stream) -> None:
    """Raise if accelerate would divide batches itself, or other processes were planned for."""
    config = accelerator.dataloader_config
    for name in ("dispatch_batches", "split_batches"):
        if getattr(config, name, None):
            raise ConfigError(
                f"{name}=True would concatenate and divide batches between processes, but each "
                f"process has its own planned micro-batches. Set {name}=False."
            )
    parallel = getattr(accelerator, "parallelism_config", None)
    divided = [
        name for name in ("tp", "cp", "sp") if getattr(parallel, f"{name}_size", 1) not in (None, 1)
    ]
    if divided:
        raise ConfigError(
            f"{divided[0]}_size of the parallelism config must be 1: micro-batches are planned for "
            f"data-parallel processes. Use a Runner with Topology({divided[0]}=...)."
        )
    world, rank, size = stream.world, accelerator.process_index, accelerator.num_processes
    if (world.rank, world.size) != (rank, size):
        raise ConfigError(
            f"the stream is for rank {world.rank} of {world.size}, but this is process {rank} of "
            f"{size}. Pass the stream world=World({rank}, {size}), and topology.dp={size}."
        )


def check_fingerprints(stream: PlannedStream) -> None:
    """Raise on all processes if one has other data, another seed, recipe or position."""
    mine = f"{stream.fingerprint} {stream.start().to_dict()['digest']}"  # reads some samples
    fingerprints = all_gather(mine)
    other = [rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]]
    if other:
        raise ConfigError(
            f"process {other[0]} has other data, another seed, recipe or cursor than process 0. "
            f"Give all processes the same stream; only the rank differs."
        )


def check_labels(accelerator: Any, labels: Tensor, predicted: int) -> None:
    """Raise if a step has tokens to predict, but none of them counts in the loss, on any process.

    `labels` is their number on all processes, `predicted` the tokens to predict on this one.
    """
    if labels:
        return
    if accelerator.reduce(torch.tensor(predicted, device=accelerator.device)):
        raise InputError(f"no token of this step counts in the loss, on any process. {ANY_CAUSE}")


class _OwnedSampler(PlannedBatchSampler):
    """Refuses to be iterated by other loaders than its own."""

    claimed = False

    def __iter__(self) -> Iterator[Part]:
        if not self.claimed:
            raise ConfigError(
                "skip_first_batches makes a loader that does not count the labels of a step. Use "
                "loader.skip_steps(n), or resume with load_state_dict."
            )
        return super().__iter__()


class StepLoader(DataLoaderShard):  # type: ignore[misc]
    """A prepared dataloader of planned micro-batches, made by `accelerate_loader`.

    for epoch in range(loader.epoch, 3):
        for batch in loader:
            ...
            torch.save(loader.state_dict(), "position.pt")

    loader.load_state_dict(torch.load("position.pt"))  # in another run
    """

    end_of_dataloader: bool

    def __init__(
        self, sampler: _OwnedSampler, collate: Collate, accelerator: Any, **options: Any
    ) -> None:
        super().__init__(
            PartDataset(sampler, collate),
            device=accelerator.device if accelerator.device_placement else None,
            batch_sampler=sampler,
            collate_fn=dict,  # the dataset has made the inputs
            **options,
        )
        self.accelerator, self.step_sampler = accelerator, sampler
        self._now: dict[str, Any] | None = None
        self._is_accelerate_prepared = True
        # accelerate saves and loads the state of such loaders.
        self.use_stateful_dataloader = True

    @property
    def epoch(self) -> int:
        """The epoch of the next pass: the first one to run after a resume."""
        return int(self.iteration)

    @property
    def total_batch_size(self) -> int:
        """Raises: batches of one loader have no common size."""
        raise ConfigError(
            "total_batch_size is unknown, because planned micro-batches differ in size. For the "
            "samples of a step read recipe.steps or step.plan of the stream, for the number of "
            "steps loader.num_steps(epochs)."
        )

    def num_steps(self, epochs: int) -> int:
        """The exact number of optimizer steps of the first `epochs` epochs."""
        return self.step_sampler.num_steps(epochs)

    def __len__(self) -> int:
        return self.step_sampler.micro_batches_of(self.epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.step_sampler.claimed = True
        step: list[dict[str, Any]] = []
        predicted = 0
        for inputs in super().__iter__():
            self.step_sampler.claimed = False  # torch asks for an iterator once or twice
            state = inputs[STATE]
            predicted += pop_predicted(inputs)
            step.append(inputs)
            if state is None:
                continue
            self._check_accumulation()
            labels = self._labels(step, predicted)
            ended = bool(self.end_of_dataloader)
            for number, each in enumerate(step, 1):
                # accelerate makes an optimizer step at the end: not before the last micro-batch.
                last = number == len(step)
                self.end_of_dataloader = ended and last
                self._now = state if last else self._now
                torch.clear_autocast_cache()  # casts of weights before the last update
                yield {**each, "num_items_in_batch": labels}
            step, predicted = [], 0

    def _check_accumulation(self) -> None:
        """Raise if accelerate would make an optimizer step elsewhere than at the end of a step."""
        planned, now = self.step_sampler.per_step, self.accelerator.gradient_accumulation_steps
        if now != planned:
            raise ConfigError(
                f"gradient_accumulation_steps is {now}, but was {planned} when the loader was made "
                f"and its steps were planned. Save loader.state_dict(), and make another loader."
            )

    def _labels(self, step: list[dict[str, Any]], predicted: int) -> Tensor:
        """What a sum over labels is divided by. accelerate divides the loss by the micro-batches of
        a step, and gradients are averaged over processes."""
        shifted = [each["shift_labels"] if "shift_labels" in each else each["labels"][..., 1:]
                   for each in step]  # fmt: skip
        count = torch.stack([(labels != IGNORE_INDEX).sum() for labels in shifted]).sum()
        total = self.accelerator.reduce(count.to(self.accelerator.device))
        check_labels(self.accelerator, total, predicted)
        return total.clamp(min=1) / (len(step) * self.accelerator.num_processes)

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of `epoch`, or at a position within it that was
        loaded and not iterated yet."""
        super().set_epoch(epoch)
        self._now = self.step_sampler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step whose micro-batches were all yielded."""
        return self.step_sampler.state_dict() if self._now is None else self._now

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the step that the state was taken at."""
        if not isinstance(state, Mapping):
            raise CursorError("this is not the state of a loader. Pass what state_dict() returned.")
        sampler = self.step_sampler
        sampler.load_state_dict(state.get("cursor", state))  # "cursor": written by version 0.1.0
        if sampler.stream.size_left().steps == 0:
            sampler.set_epoch(sampler.epoch + 1)
        self.iteration, self._now = sampler.epoch, None

    def skip_steps(self, steps: int) -> None:
        """Start the next pass `steps` optimizer steps later, for loops that save how many they have
        made in an epoch: `loader.set_epoch(2)`, then `loader.skip_steps(40)`."""
        stream = self.step_sampler.stream
        stream.skip_batches(steps)
        self.load_state_dict(stream.state_dict())
