"""The load-balanced datasets of cosmos-rl, implemented with a `PooledStream`.

Parameters, defaults and batches are as documented there. Unlike there, resuming is exact and reads
only the pool, seeds of readers and epochs never collide, and an error in a sample is raised with
the id of the sample instead of ending the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal

from torch.utils.data import IterableDataset

from evenstep.core.layout import Layout, Packed, Padded
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.rounding import divided_up
from evenstep.core.topology import Topology
from evenstep.core.validate import seed_number, truth_value
from evenstep.core.world import World
from evenstep.data.sources.iterated import Iterated
from evenstep.data.sources.mapped import Mapped
from evenstep.data.sources.source import Source, has_random_access
from evenstep.data.streams.pool import Pool
from evenstep.data.streams.pooled import PooledStream
from evenstep.integrations.dataloader import StreamDataset
from evenstep.integrations.huggingface import choose_layout

__all__ = ["LoadBalancedDataset", "ShardedIterableDataset"]


class ShardedIterableDataset(IterableDataset):  # type: ignore[misc]
    """One rank's share of a dataset, in a different order in every epoch.

    Each DataLoader worker of each rank is a reader, number `dp_rank * num_workers + worker_id`.
    Their shares are disjoint and together hold every sample once.

    >>> sorted(ShardedIterableDataset([5, 6, 7], dp_rank=0, dp_world_size=1))
    [5, 6, 7]
    """

    def __init__(
        self,
        base_dataset: Any,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__()
        self.base_dataset = base_dataset
        self.world = World(dp_rank, dp_world_size)
        self.seed, self.shuffle = seed_number(seed), truth_value("shuffle", shuffle)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Iterate in the order of `epoch` from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        """The number of samples of this rank, rounded up; approximate with several workers."""
        return divided_up(len(self.base_dataset), self.world.size)

    def __iter__(self) -> Iterator[Any]:
        # A pool of one sample of length 1 leaves only the order and the sharing between readers.
        source = source_of(self.base_dataset)
        stream = PooledStream(
            source,
            Recipe(layout=Packed(max_tokens=1), topology=Topology(dp=self.world.size)),
            pool=Pool(samples=1, strategy="greedy"),
            world=self.world,
            seed=self.seed,
            # An iterable dataset has an order of its own.
            shuffle=self.shuffle and has_random_access(source),
            length_of=_one,
        )
        stream.set_epoch(self.epoch)
        for step in StreamDataset(stream):
            for _, samples in step:
                yield from samples.values()


class LoadBalancedDataset(IterableDataset):  # type: ignore[misc]
    """Batches of similar work and different size, from a pool on every rank and worker.

    Each item is a list of `accumulate_steps` batches, the work of one optimizer step. A batch is a
    list of samples. Their number times the longest length, or with `seq_packing_enabled` the sum
    of their lengths, is at most `max_tokens_for_batch`. A sample of at least `max_tokens_len`
    tokens (default: the budget) is a batch of its own. Use `DataLoader(dataset, batch_size=None)`.

    If `model` is given and does not support packed sequences, batches are formed for padding, with
    a warning.

    >>> data = [{"input_ids": [0] * n} for n in (7, 6, 8, 5, 1, 3, 8, 6)]
    >>> dataset = LoadBalancedDataset(data, max_tokens_for_batch=16, infinite_loop=False)
    >>> sum(len(batch) for item in dataset for batch in item)
    8
    """

    def __init__(
        self,
        base_dataset: Any,
        pool_size: int = 32,
        max_tokens_for_batch: int = 32768,
        length_key: str = "input_ids",
        batching_strategy: Literal["prefer_closest", "prefer_first"] = "prefer_closest",
        max_tokens_len: int | None = None,
        seq_packing_enabled: bool = False,
        seed: int = 0,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        accumulate_steps: int = 1,
        infinite_loop: bool = True,
        max_num_steps: int | None = None,
        model: Any = None,
    ) -> None:
        super().__init__()
        world, shuffle = World(dp_rank, dp_world_size), True
        if isinstance(base_dataset, ShardedIterableDataset):
            world, seed, shuffle = base_dataset.world, base_dataset.seed, base_dataset.shuffle
            base_dataset = base_dataset.base_dataset
        layout: Layout = Padded(max_tokens=max_tokens_for_batch)
        if truth_value("seq_packing_enabled", seq_packing_enabled):
            layout = Packed(max_tokens=max_tokens_for_batch)
            layout = layout if model is None else choose_layout(model, layout)
        named = batching_strategy in layout.pool_strategies
        source = source_of(base_dataset)
        self.stream = PooledStream(
            source,
            Recipe(
                layout=layout,
                topology=Topology(dp=world.size),
                steps=Steps(micro_batches=accumulate_steps),
                overflow="alone",
            ),
            pool=Pool(samples=pool_size, strategy=batching_strategy if named else "greedy"),
            world=world,
            seed=seed,
            shuffle=shuffle and has_random_access(source),
            max_num_steps=max_num_steps,
            infinite_loop=infinite_loop,
            length_of=_Length(length_key, max_tokens_len, max_tokens_for_batch),
        )
        self._steps = StreamDataset(self.stream)

    def __iter__(self) -> Iterator[list[list[Any]]]:
        for step in self._steps:
            yield [
                [samples[sample_id] for sample_id in micro.segments.sample.tolist()]
                for micro, samples in step
                if not micro.is_empty
            ]

    def __len__(self) -> int:
        """`max_num_steps`, or an upper bound: the samples of this rank / `accumulate_steps`."""
        return len(self.stream)

    def set_epoch(self, epoch: int) -> None:
        """Start at the beginning of `epoch`. With `infinite_loop`, later epochs follow."""
        self._steps.set_epoch(epoch)

    def skip_batches(self, steps: int) -> None:
        """Start `steps` items later. This reads their samples; `load_state_dict` does not."""
        self._steps.skip_batches(steps)

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker, for torchdata's `StatefulDataLoader`."""
        return self._steps.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the item that the state was taken at."""
        self._steps.load_state_dict(state)


class _Length:
    """The length of a sample: the number under `key`, or the length of the value there."""

    def __init__(self, key: str, alone: int | None, budget: int) -> None:
        self.key, self.alone, self.budget = key, alone, budget

    def __call__(self, sample: Any) -> int:
        found = sample[self.key] if isinstance(sample, Mapping) else sample
        length = len(found) if isinstance(found, Sized) else int(found)
        # A sample that must be a batch of its own fills the budget.
        return max(length, self.budget) if self.alone and length >= self.alone else length


def source_of(dataset: Any) -> Source:
    """Any torch dataset as a source. Every item is one sample, even if it is a list."""
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not by_index:
        return Iterated(dataset, transform=_single)
    return Mapped(dataset, transform=_single)


def _single(item: Any) -> list[Any]:
    return [item]


def _one(sample: Any) -> int:
    return 1
