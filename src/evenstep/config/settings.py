"""Settings: everything that a configuration file says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from evenstep.config.training import ModelSettings, OptimizerSettings
from evenstep.core.recipe import Recipe, SyncEvery
from evenstep.core.text import one_of, real_field, seed_number, truth_field, whole_field
from evenstep.data.corpus import Corpus
from evenstep.data.pool import Pool
from evenstep.errors import ConfigError

Precision: TypeAlias = Literal["float32", "bfloat16"]
Parallel: TypeAlias = Literal["ddp", "fsdp2"]
StopOrSkip: TypeAlias = Literal["stop", "skip"]
JobKind: TypeAlias = Literal["sft", "pretrain", "dpo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """How samples are read. The names are those of `PlannedStream` and `PooledStream`.

    pool           with a pool the stream is a `PooledStream`
    seed           of the order of samples
    shuffle        every epoch has an order of its own; false: as stored
    infinite_loop  epochs follow each other without end
    max_num_steps  the most steps of the stream
    share_prefixes samples that begin with the same tokens compute these once; for rollouts, pass it
                   to `RolloutBatch.plan` and `compute_log_probs`

    >>> StreamSettings(pool=Pool(samples=32), seed=42).options()["seed"]
    42
    """

    pool: Pool | None = None
    seed: int = 0
    shuffle: bool = True
    infinite_loop: bool = False
    max_num_steps: int | None = None
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", seed_number(self.seed))
        for name in ("shuffle", "infinite_loop", "share_prefixes"):
            truth_field(self, f"stream.{name}")
        whole_field(self, "stream.max_num_steps", least=0, optional=True)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the stream."""
        pool = {} if self.pool is None else {"pool": self.pool}
        names = ("seed", "shuffle", "infinite_loop", "max_num_steps")
        return {**pool, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """What is trained for, how steps are run, and what is kept of them.

    job             sft: the loss is on the tokens that the data marks, of a chat those of the
                    assistant; pretrain: on all tokens; dpo: on pairs of a chosen and a rejected
                    answer (data.format: pairs)
    beta            of dpo: how far the model may move away from the one that it begins as
    out             folder for checkpoints, logs and tokenized samples
    save            folder for the trained model at the end, as `from_pretrained` reads it
    parallel        what keeps several ranks together
    reduce_every    of fsdp2, when gradients are scattered: by each micro_batch, or once per step,
                    which holds them whole until then. None: once per step if a GPU has the memory
    precision       bfloat16: mixed precision, with weights and gradients in float32
    checkpointing   recompute activations in the backward
    compile         compile the layers with torch.compile
    save_every      steps between two checkpoints; the last step is always saved
    keep            how many of the newest checkpoints remain, beside the best one on held-out data
    evaluate_every  steps between two evaluations on held-out data; None: before every checkpoint
    fall_back       continue from an older checkpoint if the newest is damaged; false: an error
    on_nonfinite    if the loss or gradient of a step is inf or NaN: stop with an error, or skip
                    the update
    max_skipped     the most steps of the run that may be skipped
    device          None: the GPU of this rank if there is one, else the CPU
    log             trackers that also get the log, by accelerate's names: tensorboard, wandb, …
    tensorboard     the same as log: tensorboard
    per_micro_batch_normalization  divide the loss of each micro-batch by its own labels, summed
                                   over ranks, and by the number of micro-batches, instead of by
                                   the labels of the step
    """

    job: JobKind = "sft"
    beta: float = 0.1
    out: str | None = None
    save: str | None = None
    parallel: Parallel = "ddp"
    reduce_every: SyncEvery | None = None
    precision: Precision = "float32"
    checkpointing: bool = False
    compile: bool = False
    save_every: int = 100
    keep: int = 2
    evaluate_every: int | None = None
    fall_back: bool = False
    on_nonfinite: StopOrSkip = "stop"
    max_skipped: int = 10
    device: str | None = None
    log: str | tuple[str, ...] = ()
    tensorboard: bool = False
    per_micro_batch_normalization: bool = False

    def __post_init__(self) -> None:
        for name in ("save_every", "keep"):
            whole_field(self, f"trainer.{name}")
        whole_field(self, "trainer.max_skipped", least=0)
        whole_field(self, "trainer.evaluate_every", optional=True)
        if not real_field(self, "trainer.beta") > 0:
            raise ConfigError("trainer.beta must be above 0.")
        log = (self.log,) if isinstance(self.log, str) else tuple(self.log)
        object.__setattr__(self, "log", log)
        for name in ("checkpointing", "compile", "fall_back", "tensorboard"):
            truth_field(self, f"trainer.{name}")
        truth_field(self, "trainer.per_micro_batch_normalization")
        one_of("trainer.job", self.job, JobKind)
        one_of("trainer.parallel", self.parallel, Parallel)
        if self.reduce_every is not None:
            one_of("trainer.reduce_every", self.reduce_every, SyncEvery)
        one_of("trainer.precision", self.precision, Precision)
        one_of("trainer.on_nonfinite", self.on_nonfinite, StopOrSkip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A recipe for training, one for log-probabilities if there is one, and what a training run
    needs besides: model, data, optimizer, how to read and how to run.

    >>> from evenstep import Packed
    >>> Settings(recipe=Recipe(layout=Packed(max_tokens=8192))).log_probs is None
    True
    """

    recipe: Recipe
    log_probs: Recipe | None = None
    stream: StreamSettings = field(default_factory=StreamSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: Corpus | None = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every value; `log_probs` is a whole recipe."""
        log_probs = None if self.log_probs is None else self.log_probs.to_dict()
        return {
            **self.recipe.to_dict(),
            "log_probs": log_probs,
            "stream": asdict(self.stream),
            "model": asdict(self.model),
            "data": None if self.data is None else asdict(self.data),
            "optimizer": asdict(self.optimizer),
            "trainer": asdict(self.trainer),
        }
