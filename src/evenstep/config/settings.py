"""Settings: everything that a configuration file says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from evenstep.core.recipe import Recipe
from evenstep.core.validate import seed_number, truth_field, whole_field
from evenstep.data.streams.pool import Pool


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """How samples are read. The names are those of `PlannedStream` and `PooledStream`.

    With a pool the stream is a `PooledStream`.

    >>> StreamSettings(pool=Pool(samples=32), seed=42).options()["seed"]
    42
    """

    pool: Pool | None = None
    seed: int = 0
    shuffle: bool = True
    infinite_loop: bool = False
    max_num_steps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", seed_number(self.seed))
        for name in ("shuffle", "infinite_loop"):
            truth_field(self, f"stream.{name}")
        if self.max_num_steps is not None:
            whole_field(self, "stream.max_num_steps", least=0)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the stream."""
        pool = {} if self.pool is None else {"pool": self.pool}
        names = ("seed", "shuffle", "infinite_loop", "max_num_steps")
        return {**pool, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """How steps are run.

    per_micro_batch_normalization  divide the loss of each micro-batch by its own labels, summed
                                   over ranks, and by the number of micro-batches, instead of by
                                   the labels of the step
    """

    per_micro_batch_normalization: bool = False

    def __post_init__(self) -> None:
        truth_field(self, "trainer.per_micro_batch_normalization")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A recipe for training, one for log-probabilities if there is one, and how to read and run.

    >>> from evenstep import Packed
    >>> Settings(recipe=Recipe(layout=Packed(max_tokens=8192))).log_probs is None
    True
    """

    recipe: Recipe
    log_probs: Recipe | None = None
    stream: StreamSettings = field(default_factory=StreamSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every value; `log_probs` is a whole recipe."""
        log_probs = None if self.log_probs is None else self.log_probs.to_dict()
        return {
            **self.recipe.to_dict(),
            "log_probs": log_probs,
            "stream": asdict(self.stream),
            "trainer": asdict(self.trainer),
        }
