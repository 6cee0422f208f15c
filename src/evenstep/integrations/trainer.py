"""EvenstepMixin: the Hugging Face Trainer, and trainers derived from it, on planned steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import tqdm
from numpy.typing import ArrayLike
from transformers import TrainerCallback

from evenstep.core.layout import Packed
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.world import World
from evenstep.data.sources.as_source import as_measured
from evenstep.data.sources.mapped import MeasuredMapped
from evenstep.data.sources.measure import measured_lengths
from evenstep.data.sources.source import MeasuredSource
from evenstep.data.streams.planned import PlannedStream
from evenstep.data.streams.step_work import Progress
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.accelerate import check_accelerator, check_fingerprints
from evenstep.integrations.hf_collate import HfCollate
from evenstep.integrations.step_sampler import Part, PartDataset, StepSampler
from evenstep.integrations.supports import judged_once
from evenstep.tensors.collate import Collator

__all__ = ["EvenstepMixin"]

_COLUMNS = ("input_ids", "labels", "loss_mask", "assistant_masks", "loss_masking_spans",
            "attention_mask")  # fmt: skip


class EvenstepMixin:
    """Planned micro-batches for transformers' Trainer, and TRL's SFTTrainer.

        class PackedTrainer(EvenstepMixin, Trainer):
            pass

        recipe = Recipe(layout=Packed(max_tokens=8192))
        PackedTrainer(model, arguments, train_dataset=samples, recipe=recipe).train()

    `train_dataset` holds tokens: samples as the `Collator` takes them, or an Evenstep source. A
    step of the plan is an optimizer step of `gradient_accumulation_steps` micro-batches, or of
    fewer if the recipe says `Steps(samples=...)`; empty ones follow. Each sample runs once per
    epoch, in an order that depends on `data_seed` (else `seed`) and the epoch. Resuming from a
    checkpoint is exact. `per_device_train_batch_size` and `data_collator` are for evaluation only.

    recipe   what is planned. `steps` defaults to `Steps(micro_batches=gradient_accumulation_steps)`
    lengths  per sample, its number of tokens, or the name of a column. By default each sample is
             read once, unless the dataset is a source that knows them
    collate  the collator of samples, for extras
    """

    # Of the trainer that this is mixed into.
    args: Any
    model: Any
    accelerator: Any
    train_dataset: Any

    def __init__(
        self,
        *arguments: Any,
        recipe: Recipe,
        lengths: ArrayLike | str | None = None,
        collate: Collator | None = None,
        **options: Any,
    ) -> None:
        self.recipe, self._lengths = recipe, lengths
        self._collate = Collator() if collate is None else collate
        super().__init__(*arguments, **options)
        _check_arguments(self.args)
        self.add_callback(_SkipFillers(self))  # type: ignore[attr-defined]
        self.step_sampler: StepSampler | None = None

    def get_train_dataloader(self) -> DataLoaderShard:
        """The planned micro-batches of this process."""
        stream = self._stream()
        check_accelerator(self.accelerator, stream)
        check_fingerprints(self.accelerator, stream)
        if isinstance(self.recipe.layout, Packed):
            self._check_packing()
        self.step_sampler = sampler = self._sampler(stream)
        if getattr(self, "is_deepspeed_enabled", False) and sampler.has_fillers:
            raise ConfigError(
                "epochs have different numbers of steps, and with DeepSpeed the steps that fill up "
                "shorter ones would change parameters. Set Steps(samples=...) in the recipe."
            )
        args = self.args
        return DataLoaderShard(
            PartDataset(sampler),
            device=self.accelerator.device,
            batch_sampler=sampler,
            collate_fn=_Inputs(HfCollate(model=self.model, collate=self._collate)),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def get_batch_samples(self, *arguments: Any, **options: Any) -> tuple[list[Any], Any]:
        """The micro-batches of a step and the number of their labels on all processes; 1 if there
        are none, because the loss is divided by it."""
        found = super().get_batch_samples(*arguments, **options)  # type: ignore[misc]
        batches, labels = found
        return batches, labels.clamp(min=1) if torch.is_tensor(labels) else labels

    # The stream --------------------------------------------------------------------------------

    def _stream(self) -> PlannedStream:
        args, processes = self.args, self.accelerator.num_processes
        recipe = self.recipe
        if recipe.steps == Steps():
            recipe = replace(recipe, steps=Steps(micro_batches=args.gradient_accumulation_steps))
        if recipe.topology.dp == 1:
            recipe = replace(recipe, topology=replace(recipe.topology, dp=processes))
        seed = args.seed if args.data_seed is None else args.data_seed
        world = World(self.accelerator.process_index, processes)
        return PlannedStream(self._source(), recipe, world=world, seed=seed)

    def _source(self) -> MeasuredSource:
        dataset, lengths = self.train_dataset, self._lengths
        if dataset is None:
            raise ConfigError("training needs a train_dataset. Pass samples or a source.")
        if hasattr(dataset, "lengths_of") and lengths is None:
            return as_measured(dataset)
        if not hasattr(dataset, "__len__"):
            raise InputError(
                f"train_dataset is a {type(dataset).__name__} without a length, but steps are "
                f"planned ahead. Pass a map-style dataset, or use a PooledStream with a Runner."
            )
        if lengths is None:
            with tqdm(desc="Measuring samples", delay=2, leave=False) as bar:
                lengths = measured_lengths(dataset, None, _advance(bar))
        names = {*_COLUMNS, *self._collate.extras} if self.args.remove_unused_columns else None
        return MeasuredMapped(dataset, lengths=lengths, transform=_Chosen(names))

    def _sampler(self, stream: PlannedStream) -> StepSampler:
        args, per_step = self.args, self.args.gradient_accumulation_steps
        epochs = math.ceil(args.num_train_epochs)
        with tqdm(desc="Counting steps", delay=2, leave=False) as bar:
            progress = _advance(bar)
            if args.max_steps > 0:  # enough epochs, whichever is the longest
                first = StepSampler(stream, per_step=per_step, progress=progress).steps_of(0)
                epochs = math.ceil(args.max_steps / max(first, 1))
            sampler = StepSampler(stream, per_step=per_step, epochs=epochs, progress=progress)
            len(sampler)  # counts once
        sampler.progress = None
        return sampler

    def _check_packing(self) -> None:
        support = judged_once(self.model)
        if not support.safe:
            raise ConfigError(
                f"{type(self.model).__name__} does not support packed batches: {support.why}. Use "
                f"Recipe(layout=choose_layout(model, layout)), or use_attention(model) of "
                f"evenstep.integrations.hf_attention."
            )


def _advance(bar: Any) -> Progress:
    """Advance a bar of tqdm."""

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return progress


def _check_arguments(args: Any) -> None:
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigError(
            "DataParallel divides batches by rows, which packed batches do not have. Start one "
            "process per GPU with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES."
        )
    if not getattr(args, "average_tokens_across_devices", False) and args.world_size > 1:
        raise ConfigError(
            "average_tokens_across_devices must be True: each process would divide by its own "
            "number of labels, which differs between processes. Remove the option."
        )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random" or getattr(args, "group_by_length", False):
        raise ConfigError(
            f"train_sampling_strategy={strategy!r} has no effect on planned steps, which choose "
            f"their samples themselves. Remove it (and group_by_length)."
        )


class _SkipFillers(TrainerCallback):  # type: ignore[misc]
    """Makes the steps that fill up a shorter epoch change nothing: optimizers leave parameters
    without a gradient as they are, and keep their state."""

    def __init__(self, trainer: EvenstepMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **others: Any
    ) -> None:
        sampler = self._trainer.step_sampler
        if sampler is not None and sampler.is_filler(state.global_step):
            for parameter in model.parameters():
                parameter.grad = None


class _Inputs:
    """Collates a micro-batch."""

    def __init__(self, collate: HfCollate) -> None:
        self.collate = collate

    def __call__(self, read: tuple[Part, dict[int, Any]]) -> dict[str, Any]:
        part, samples = read
        return self.collate(part.micro, samples)


class _Chosen:
    """A sample without the columns that the collator does not take, as the Trainer drops those
    that the model does not take."""

    def __init__(self, names: set[str] | None) -> None:
        self.names = names

    def __call__(self, sample: Any) -> Any:
        if self.names is None or not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in self.names}
