"""EvenstepMixin: the Hugging Face Trainer, and trainers derived from it, on planned steps."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import tqdm
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from evenstep.core.layout import Padded
from evenstep.core.plan import MicroBatch
from evenstep.core.recipe import Recipe, Steps, World
from evenstep.core.text import whole_number
from evenstep.data.dataset import (
    Iterated,
    MeasuredMapped,
    as_measured,
    as_source,
    is_source,
    measured_lengths,
)
from evenstep.data.planned import PlannedStream
from evenstep.data.pooled import PooledStream
from evenstep.data.source import (
    MeasuredSource,
    Progress,
    check_masks_read,
    check_some_loss,
    has_random_access,
)
from evenstep.errors import ConfigError, CursorError
from evenstep.integrations.accelerate import check_accelerator, check_fingerprints, check_labels
from evenstep.integrations.dataloader import StreamLoader
from evenstep.integrations.hf_arguments import (
    HfCollate,
    adds_router_loss,
    core_of,
    hf_kwargs,
    loss_inputs,
    text_config,
    traits_of,
)
from evenstep.integrations.huggingface import check_layout
from evenstep.integrations.run_state import gather_state
from evenstep.integrations.sampler import (
    CountedCollate,
    PartDataset,
    PlannedBatchSampler,
    pop_predicted,
)
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch
from evenstep.tensors.collate import SAMPLE_KEYS, Collator
from evenstep.tensors.losses import load_balancing
from evenstep.train.collectives import Alone, Distributed, has_group
from evenstep.train.framework import undisturbed
from evenstep.train.normalization import AllTokens, expert_frequencies, weighted

__all__ = ["EvenstepMixin"]


_POSITION = "evenstep.json"  # the file in a checkpoint with the position of the data


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
    checkpoint is exact, and refused if the data or settings have changed so that it cannot be.
    That none of the first thousand samples, or of a step, has a loss token is an error.
    `per_device_train_batch_size` and `data_collator` are for evaluation only.

    A dataset without a length, such as a streamed one, needs `max_steps`. Its micro-batches come
    from an endless `PooledStream`, whose position is saved with every checkpoint.

    recipe   what is planned. `steps` defaults to `Steps(micro_batches=gradient_accumulation_steps)`
    lengths  per sample, its number of tokens, or the name of a column. By default each sample is
             read once, unless the dataset is a source that knows them
    collate  the collator of samples, for extras
    allow    of a dataset without a length: settings that may have changed since the checkpoint that
             is resumed from, such as `{"budget"}`; see `PooledStream.load_state_dict`
    """

    # Of the trainer that this is mixed into.
    args: Any
    model: Any
    model_wrapped: Any
    label_smoother: Any
    accelerator: Any
    train_dataset: Any
    state: Any

    def __init__(
        self,
        *arguments: Any,
        recipe: Recipe,
        lengths: ArrayLike | str | None = None,
        collate: Collator | None = None,
        allow: Collection[str] = (),
        **options: Any,
    ) -> None:
        self.recipe, self._lengths, self._allow = recipe, lengths, allow
        self._collate = Collator() if collate is None else collate
        super().__init__(*arguments, **options)
        _check_arguments(self.args)
        if getattr(self, "label_smoother", None) is not None:
            # transformers shifts the labels of classes that it knows by name only.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        self.add_callback(_StepEvents(self))  # type: ignore[attr-defined]
        self.step_sampler: PlannedBatchSampler | None = None
        self.pooled_loader: StreamLoader | None = None
        self._resumed: Any = None
        self._router: RouterLoss | None = None

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Train as the trainer does; it skips no data on resume if the dataset has no length."""
        self._resumed = resume_from_checkpoint
        if resume_from_checkpoint is True:
            self._resumed = get_last_checkpoint(self.args.output_dir)
        if self._endless:
            self.args.ignore_data_skip = True
        return super().train(resume_from_checkpoint, *arguments, **options)  # type: ignore[misc]

    @property
    def _endless(self) -> bool:
        """Whether the dataset can only be read in order."""
        return self.train_dataset is not None and not has_random_access(
            as_source(self.train_dataset)
        )

    def get_train_dataloader(self) -> DataLoaderShard | Iterator[dict[str, Any]]:
        """The planned micro-batches of this process; those of a pool without known lengths."""
        args, stream = self.args, self._stream()
        self._check_stream(stream)
        names = ("num_workers", "persistent_workers", "prefetch_factor")
        workers = {name: getattr(args, f"dataloader_{name}") for name in names}
        if isinstance(stream, PooledStream):
            loader = StreamLoader(stream, collate=CountedCollate(self._collator()), **workers)
            if self._resumed:
                loader.load_state_dict(_read_position(Path(self._resumed)), self._allow)
            self.pooled_loader = loader
            return (inputs for step in loader for inputs in step.batches or ())
        self.step_sampler = sampler = self._sampler(stream)
        resumed = Path(self._resumed) if self._resumed and not args.ignore_data_skip else None
        if resumed is not None and (resumed / _POSITION).exists():
            sampler.check_position(_read_position(resumed))
        if getattr(self, "is_deepspeed_enabled", False) and sampler.has_fillers:
            raise ConfigError(
                "epochs have different numbers of steps, and with DeepSpeed the steps that fill up "
                "shorter ones would change parameters. Set Steps(samples=...) in the recipe."
            )
        return DataLoaderShard(
            PartDataset(sampler, self._collator()),
            device=self.accelerator.device,
            batch_sampler=sampler,
            collate_fn=dict,  # the dataset has made the inputs
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            **workers,
        )

    def get_batch_samples(self, *arguments: Any, **options: Any) -> tuple[list[Any], Any]:
        """The micro-batches of a step and the number of their labels on all processes, by which
        the loss is divided; 1 for a step that fills up an epoch."""
        step = super().get_batch_samples(*arguments, **options)  # type: ignore[misc]
        batches, labels = step
        predicted = sum(map(pop_predicted, batches))
        if self._router is not None and batches:
            self._router.count(self.model_wrapped, [inputs[BATCH] for inputs in batches])
        if not torch.is_tensor(labels):
            return batches, labels
        sampler = self.step_sampler
        if sampler is None or not sampler.is_filler(self.state.global_step):
            check_labels(self.accelerator, labels, predicted)
        return batches, labels.clamp(min=1)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """The loss of a micro-batch, with its part of the load-balancing loss of the step."""
        if self._router is None or BATCH not in inputs:
            return super().compute_loss(model, inputs, *arguments, **options)  # type: ignore[misc]
        with self._router.in_step(inputs.pop(BATCH)):
            return super().compute_loss(model, inputs, *arguments, **options)  # type: ignore[misc]

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """One micro-batch, also if autocast is around the whole run."""
        torch.clear_autocast_cache()  # casts of weights before the last update
        return super().training_step(*arguments, **options)  # type: ignore[misc]

    # The stream --------------------------------------------------------------------------------

    def _collator(self) -> HfCollate:
        """Makes the inputs. TRL sets `aux_loss_enabled`, and adds the loss itself."""
        kind = HfCollate
        by_trl = bool(getattr(self, "aux_loss_enabled", False))
        if adds_router_loss(self.model) or by_trl:
            self._router = RouterLoss(self.model, added_by_trainer=by_trl)
            kind = RouterCollate
        return kind(model=self.model, collate=self._collate)

    def _stream(self) -> PlannedStream | PooledStream:
        """Planned steps; an endless pool of a dataset without a length, for `max_steps` steps."""
        args, recipe, accelerator = self.args, self.recipe, self.accelerator
        world = World(accelerator.process_index, accelerator.num_processes)
        if recipe.topology.dp == 1:
            recipe = replace(recipe, topology=replace(recipe.topology, dp=world.size))
        seed = int(args.seed if args.data_seed is None else args.data_seed)
        fixed = Steps(micro_batches=args.gradient_accumulation_steps)
        if not self._endless:
            if self._allow:
                raise ConfigError("allow has no effect on a dataset with a length. Remove it.")
            recipe = replace(recipe, steps=fixed) if recipe.steps == Steps() else recipe
            source = self._source()
            check_some_loss(source)
            return PlannedStream(source, recipe, world=world, seed=seed)
        if recipe.steps not in (Steps(), fixed) or self._lengths is not None:
            raise ConfigError(
                f"steps of a dataset without a length have {fixed.micro_batches} micro-batches, "
                f"and lengths have no effect. Set Steps(micro_batches={fixed.micro_batches}), or "
                f"pass a dataset with a length."
            )
        dataset = self.train_dataset
        if not is_source(dataset):
            dataset = Iterated(dataset, transform=_Chosen(self._names))
        # Steps of one: the position is known after each micro-batch, and the trainer accumulates.
        recipe = replace(recipe, steps=Steps(micro_batches=1))
        return PooledStream(dataset, recipe, world=world, seed=seed, infinite_loop=True)

    @property
    def _names(self) -> set[str] | None:
        """The keys of samples that are kept; None: all."""
        if not self.args.remove_unused_columns:
            return None
        names = {*SAMPLE_KEYS, *self._collate.extras}
        # TRL leaves the mask in its samples if it is not to be used.
        return names if getattr(self, "completion_only_loss", True) else names - {"completion_mask"}

    def _source(self) -> MeasuredSource:
        dataset, lengths = self.train_dataset, self._lengths
        if dataset is None:
            raise ConfigError("training needs a train_dataset. Pass samples or a source.")
        if hasattr(dataset, "lengths_of") and lengths is None:
            return as_measured(dataset)
        chosen = _Chosen(self._names)
        if len(dataset):
            chosen(dataset[0])
        if lengths is None:
            with tqdm(desc="Measuring samples", delay=2, leave=False) as bar:
                lengths = measured_lengths(dataset, None, _advance(bar))
        return MeasuredMapped(dataset, lengths=lengths, transform=chosen)

    def _sampler(self, stream: PlannedStream) -> PlannedBatchSampler:
        args = self.args
        sampler = PlannedBatchSampler(stream, per_step=args.gradient_accumulation_steps)
        epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:  # enough epochs, whichever is the longest
            epochs = math.ceil(args.max_steps / max(sampler.steps_of(0), 1))
        sampler.epochs = whole_number("epochs", epochs)
        with tqdm(desc="Counting steps", delay=2, leave=False) as bar:
            sampler.progress = _advance(bar)
            len(sampler)  # counts once
        sampler.progress = None
        return sampler

    def _check_stream(self, stream: PlannedStream | PooledStream) -> None:
        check_accelerator(self.accelerator, stream)
        if isinstance(stream, PlannedStream):
            check_fingerprints(stream)
        options = ("label_smoother", "compute_loss_func")
        if self.recipe.overflow == "split" and any(getattr(self, n, None) for n in options):
            raise ConfigError(
                "label_smoothing_factor and compute_loss_func read 'labels', which have no label "
                "where a sample is split. Set overflow to 'truncate', 'drop' or 'alone', or leave "
                "them out."
            )
        check_layout(self.model, self.recipe.layout)


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
    if getattr(args, "neftune_noise_alpha", None) is not None:
        raise ConfigError(
            "neftune_noise_alpha scales its noise by the width of a row, which is that of a packed "
            "or padded micro-batch, not of a sample. Remove it."
        )


class _StepEvents(TrainerCallback):  # type: ignore[misc]
    """What the trainer's steps need of its data."""

    def __init__(self, trainer: EvenstepMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **others: Any
    ) -> None:
        """Make a step that fills up a shorter epoch change nothing: optimizers leave parameters
        without a gradient as they are, and keep their state."""
        sampler = self._trainer.step_sampler
        if sampler is not None and sampler.is_filler(state.global_step):
            for parameter in model.parameters():
                parameter.grad = None

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the position of the data with every checkpoint."""
        loader, sampler = self._trainer.pooled_loader, self._trainer.step_sampler
        position = None
        if loader is not None:
            position = gather_state(loader)  # on every process
        elif sampler is not None and args.should_save:
            position = sampler.position_after(state.global_step)
        if position is not None and args.should_save:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (checkpoint / _POSITION).write_text(json.dumps(position))


class _Chosen:
    """A sample without the columns that the collator does not take, as the Trainer drops those
    that the model does not take. Raises if one of them looks like a mask."""

    def __init__(self, names: set[str] | None) -> None:
        self.names = names

    def __call__(self, sample: Any) -> Any:
        if self.names is None or not isinstance(sample, Mapping):
            return sample
        remedy = "Rename it if it is one, or remove the column."
        check_masks_read(_token_masks(sample), self.names, remedy)
        return {name: value for name, value in sample.items() if name in self.names}


def _token_masks(sample: Mapping[str, Any]) -> Iterator[str]:
    """Columns that could be masks of tokens: 0 and 1, as many as `input_ids`."""
    tokens = sample.get("input_ids", ())
    for name in [name for name in sample if name.lower().endswith(("mask", "masks"))]:
        with suppress(TypeError, ValueError):  # no numbers
            values = np.asarray(sample[name])
            if values.shape == (len(tokens),) and set(values.tolist()) <= {0, 1}:
                yield name


def _read_position(checkpoint: Path) -> dict[str, Any]:
    """The position of the data in a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / _POSITION).read_text())
    except (OSError, ValueError) as error:
        raise CursorError(
            f"{checkpoint} has no position of the data that can be read ({error}). Resume from an "
            f"earlier checkpoint."
        ) from None
    return state


# The load-balancing loss of a step, inside the loss that a model returns --------------------------
#
# With output_router_logits=True, a mixture of experts adds `router_aux_loss_coef` times a product
# of two means over the tokens of the micro-batch to its loss. Summed over micro-batches, empty ones
# too, that depends on the plan. Here the choices of experts are counted over the whole step first,
# without gradients. Then the loss is a sum over tokens (see `load_balancing`), and a hook puts this
# micro-batch's part of the sum in place of the model's term.

BATCH = "evenstep_batch"
"""The key of the `Batch` in the inputs that `RouterCollate` makes."""


class RouterCollate(HfCollate):
    """The inputs of a micro-batch, with labels, and the batch that they were made of."""

    def __call__(self, micro: MicroBatch, samples: Mapping[int, Any]) -> dict[str, Any]:
        """The arguments for one micro-batch, and `BATCH`."""
        batch = self.collate(micro, samples)
        inputs = {**hf_kwargs(batch, self.model), **loss_inputs(batch, self.model), BATCH: batch}
        return {name: value for name, value in inputs.items() if name != "num_items_in_batch"}


class RouterLoss:
    """Hugging Face's load-balancing loss over all real tokens of a step, on all ranks.

        router = RouterLoss(model)
        router.count(model, batches)  # of one step
        for batch in batches:
            with router.in_step(batch):
                model(**inputs, output_router_logits=True).loss

    The sum of the losses of the micro-batches holds `router_aux_loss_coef` times it once. The mean
    of `outputs.aux_loss` over micro-batches and ranks is its value: TRL adds that.
    """

    def __init__(self, model: Any, *, added_by_trainer: bool = False) -> None:
        self._core = core = core_of(model)
        self._added_by_trainer = added_by_trainer  # from `outputs.aux_loss`
        names, config = ("num_experts_per_tok", "router_aux_loss_coef"), text_config(core)
        settings: list[Any] = [getattr(core, name, getattr(config, name, None)) for name in names]
        self._top_k, self._coefficient = settings
        # Of a step: how often experts are chosen, (layers, experts); on all ranks, its tokens and
        # micro-batches.
        self._frequencies: Tensor | None = None
        self._tokens, self._micro_batches = 1.0, 1
        if None in settings or not self._is_defined_alike():
            raise ConfigError(
                f"{type(core).__name__} does not define its load-balancing loss as Mixtral does, "
                f"so that of a step is not known. Set model.config.output_router_logits=False to "
                f"train without it (router_aux_loss_coef=0.0 in TRL's config)."
            )

    def count(self, model: Any, batches: list[Batch]) -> None:
        """Count which experts the step's tokens choose, in one forward pass per micro-batch.

        Random numbers, as of dropout, are the ones that the training passes draw next.
        """
        ranks = Distributed() if has_group() else Alone()
        device = next(self._core.parameters()).device
        batches = [batch.to(device) for batch in batches]
        model.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._frequencies = expert_frequencies(
                model, batches, top_k=self._top_k, forward=_router_logits, collective=ranks
            )
        amounts = torch.stack([AllTokens().amount(batch) for batch in batches])
        self._tokens = max(float(ranks.all_reduce_sum(amounts.sum())), 1.0)
        self._micro_batches = len(batches) * ranks.size

    @contextmanager
    def in_step(self, batch: Batch) -> Iterator[None]:
        """Within it, the model's loss has this micro-batch's part of the step's load-balancing
        loss."""
        calls = 0
        router_logits: Any = None

        def keep(module: Any, arguments: Any, outputs: Any) -> None:
            nonlocal router_logits
            router_logits = outputs.router_logits

        def change(module: Any, arguments: Any, outputs: Any) -> Any:
            nonlocal calls
            calls += 1
            self._check_gradient(router_logits)
            part = self._part(router_logits, batch)
            if outputs.loss is None and not self._added_by_trainer:
                raise ConfigError(
                    "the load-balancing loss is a part of the loss that the model returns, but the "
                    "trainer computes another one. Set label_smoothing_factor=0.0 and pass no "
                    "compute_loss_func, or set model.config.output_router_logits=False to train "
                    "without it."
                )
            if outputs.loss is not None:
                excess = outputs.aux_loss.to(outputs.loss.device) - part.to(outputs.loss.device)
                outputs.loss = outputs.loss - self._coefficient * excess
            outputs.aux_loss = part * self._micro_batches
            return outputs

        # TRL's outputs have no router logits; those of the base model do.
        hooks = [
            self._core.base_model.register_forward_hook(keep),
            self._core.register_forward_hook(change),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if not calls:
            raise ConfigError(
                "the load-balancing loss of the step cannot be added to a compiled model. Set "
                "torch_compile=False, or model.config.output_router_logits=False."
            )

    def _check_gradient(self, logits: tuple[Tensor, ...]) -> None:
        """Raise if router logits have lost their gradient although what computes them trains."""
        trained = any(parameter.requires_grad for parameter in self._core.base_model.parameters())
        recorded = any(layer.requires_grad for layer in logits)
        if torch.is_grad_enabled() and trained and not recorded:
            raise ConfigError(
                "the load-balancing loss has no gradient, because reentrant gradient checkpointing "
                "does not record that of router logits. Set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or "
                "model.config.output_router_logits=False to train without it."
            )

    def _part(self, logits: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """A sum over the batch's tokens, which over the step is Hugging Face's loss."""
        loss = load_balancing(
            top_k=self._top_k, over="step", frequencies=self._frequencies, layers="joint"
        )
        batch = weighted(batch.to(logits[0].device), AllTokens())
        return self._top_k * loss({"router_logits": logits}, batch).loss / self._tokens

    def _is_defined_alike(self) -> bool:
        """Compare with the model's own loss on a few tokens, because some define it otherwise."""
        core = self._core
        # Six tokens and two of padding, so that there is a mask.
        plan = make_plan([6], Recipe(layout=Padded(samples=1, pad_to=8)))
        batch = Collator()(plan[0, 0][0], [{"input_ids": traits_of(core).plain_tokens(6)}])
        batch = batch.to(next(core.parameters()).device)
        with undisturbed(core):
            inputs = {**hf_kwargs(batch, core), **loss_inputs(batch, core)}
            outputs = core(**inputs, output_router_logits=True)
        logits: Any = getattr(outputs, "router_logits", None)
        if not (isinstance(logits, tuple) and isinstance(outputs.aux_loss, Tensor)):
            return False
        if not all(layer.ndim == 2 and len(layer) == 8 for layer in logits):
            return False
        self._tokens = 6.0
        self._frequencies = expert_frequencies(
            core, [batch], top_k=self._top_k, forward=lambda *_: {"router_logits": logits}
        )
        aux = self._part(logits, batch)
        nll = torch.nn.functional.cross_entropy(
            outputs.logits.float().flatten(0, 1), batch.labels.flatten(), reduction="sum"
        )
        pairs = ((aux, outputs.aux_loss), (nll + self._coefficient * aux, outputs.loss))
        return all(
            torch.allclose(ours.float(), theirs.to(ours.device).float(), rtol=2e-2)
            for ours, theirs in pairs
        )


def _router_logits(model: Any, batch: Batch) -> Any:
    few = {"logits_to_keep": 1} if "logits_to_keep" in traits_of(model).parameters else {}
    outputs = model(**hf_kwargs(batch, model), **few, output_router_logits=True)
    return {"router_logits": outputs.router_logits}
