"""Trainer: a whole training run as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from evenstep.core.recipe import Recipe
from evenstep.core.validate import one_of, seed_number, truth_field, whole_field
from evenstep.data.corpus.corpus import Corpus
from evenstep.errors import ConfigError
from evenstep.trainer.options import ModelOptions, OptimizerOptions

if TYPE_CHECKING:
    from evenstep.trainer.outcome import Outcome

Precision: TypeAlias = Literal["float32", "bfloat16"]
Parallel: TypeAlias = Literal["ddp", "fsdp2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A training run: what is trained, on what, in which steps, and what is kept of it.

    `run()` trains in this process, or as one of the ranks that torchrun started. It continues from
    the newest complete checkpoint in `out`, if there is one.

    out             folder for checkpoints, logs and tokenized samples
    recipe          how steps are formed. `topology.dp` is the number of processes
    max_num_steps   steps of the whole run, over as many epochs as that takes
    parallel        what keeps several ranks together
    precision       bfloat16: mixed precision, with weights and gradients in float32
    checkpointing   recompute activations in the backward
    compile         compile the layers with torch.compile
    save_every      steps between two checkpoints; the last step is always saved
    keep            how many of the newest checkpoints remain
    device          None: the GPU of this rank if there is one, else the CPU
    tensorboard     also write logs for TensorBoard

        Trainer(out="run", data=Corpus(paths="texts/"), recipe=recipe, max_num_steps=100).run()
    """

    out: str
    data: Corpus
    recipe: Recipe
    max_num_steps: int
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: Parallel = "ddp"
    precision: Precision = "float32"
    checkpointing: bool = False
    compile: bool = False
    seed: int = 0
    save_every: int = 100
    keep: int = 2
    device: str | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if not self.out:
            raise ConfigError("out must be the path of a folder.")
        for name in ("max_num_steps", "save_every", "keep"):
            whole_field(self, name)
        for name in ("checkpointing", "compile", "tensorboard"):
            truth_field(self, name)
        one_of("parallel", self.parallel, Parallel)
        one_of("precision", self.precision, Precision)
        object.__setattr__(self, "seed", seed_number(self.seed))
        shared = {"cp": "context", "tp": "tensor", "pp": "pipeline"}
        for name, word in shared.items():
            if getattr(self.recipe.topology, name) > 1:
                raise ConfigError(
                    f"recipe.topology.{name} must be 1: the trainer has no {word} parallelism. Use "
                    f"Runner in a trainer that has."
                )

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.out)

    def run(self) -> Outcome:
        """Train until `max_num_steps`, or until SIGINT or SIGTERM, which saves a checkpoint."""
        from evenstep.trainer.run import run

        return run(self)
