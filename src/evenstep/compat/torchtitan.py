"""A data loader for torchtitan: packed batches of a source, planned for all ranks.

torchtitan's `BaseDataLoader` is passed in, so that this module does not depend on a version of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from evenstep.core.layout import Packed
from evenstep.core.recipe import Overflow, Recipe, Steps, Topology, World
from evenstep.data.planned import PlannedStream
from evenstep.data.source import MeasuredSource
from evenstep.errors import ConfigError
from evenstep.tensors.collate import Collator

__all__ = ["planned_dataloader"]

TrainerBatch: TypeAlias = tuple[dict[str, Tensor], Tensor]


def planned_dataloader(base: type) -> type:
    """A subclass of torchtitan's `BaseDataLoader` whose `Config` names a source.

    The config takes `source` (a source with known lengths, or a function that makes one of the
    tokenizer), `seed`, `shuffle`, `infinite` and `overflow`, and builds with what torchtitan
    passes. A batch is `({"input", "positions"}, labels)`, each `num_tokens_per_batch` long, in
    rows of `max_context_length` joined end to end. Every rank has the same number of batches.

        from torchtitan.components.data.loader import BaseDataLoader

        EvenstepDataLoader = planned_dataloader(BaseDataLoader)
        config.dataloader = EvenstepDataLoader.Config(source=TokenFile("corpus.bin"))
    """

    class PlannedDataLoader(_Loader, base):  # type: ignore[misc]
        """The loader of this base class."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            """What to read, and in which order."""

            source: MeasuredSource | Callable[[Any], MeasuredSource]
            seed: int = 0
            shuffle: bool = True
            infinite: bool = True
            overflow: Overflow = "split"

    return PlannedDataLoader


class _Loader:
    """Everything but the base class."""

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        max_context_length: int,
        num_tokens_per_batch: int,
    ) -> None:
        if num_tokens_per_batch % max_context_length:
            raise ConfigError(
                f"num_tokens_per_batch, {num_tokens_per_batch}, must be a multiple of "
                f"max_context_length, {max_context_length}."
            )
        source = config.source(tokenizer) if callable(config.source) else config.source
        rows = num_tokens_per_batch // max_context_length
        recipe = Recipe(
            layout=Packed(rows=rows, pad_to=max_context_length),
            topology=Topology(dp=dp_world_size),
            steps=Steps(micro_batches=1),
            overflow=config.overflow,
        )
        self._stream = PlannedStream(
            source,
            recipe,
            world=World(dp_rank, dp_world_size),
            seed=config.seed,
            shuffle=config.shuffle,
            infinite_loop=config.infinite,
        )
        self._collate = Collator()

    def __iter__(self) -> Iterator[TrainerBatch]:
        for step in self._stream:
            for micro, samples in step:
                batch = self._collate(micro, samples)
                inputs = {"input": batch.tokens, "positions": batch.position_ids}
                yield (
                    {name: tensor.reshape(-1) for name, tensor in inputs.items()},
                    batch.labels.reshape(-1),
                )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch: small, and valid on any number of ranks."""
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the batch that the state was taken at. An empty state is the start."""
        if state_dict:
            self._stream.load_state_dict(state_dict)

    def close(self) -> None:
        """Nothing is open."""
