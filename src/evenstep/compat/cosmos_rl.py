"""The load-balanced datasets of cosmos-rl, implemented with a `PooledStream`.

Parameters, defaults and batches are as documented there. Unlike there, resuming is exact and reads
only the pool, seeds of readers and epochs never collide, an error in a sample is raised with the id
of the sample instead of ending the data, and ranks of a finite dataset end after the same item.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from functools import partial
from typing import Any, Literal, Self

from torch import Tensor
from torch.utils.data import IterableDataset

from evenstep.core.layout import Layout, Packed, Padded
from evenstep.core.ragged import divided_up
from evenstep.core.recipe import Recipe, Steps, Topology, World
from evenstep.core.step import Step
from evenstep.core.text import seed_number, truth_value
from evenstep.data.dataset import Iterated, Mapped
from evenstep.data.pool import Pool
from evenstep.data.pooled import PooledStream
from evenstep.data.source import MeasuredSource, Source, has_random_access
from evenstep.data.source import length_of as count_tokens
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.dataloader import Collate, StreamDataset
from evenstep.integrations.huggingface import choose_layout

__all__ = ["LoadBalancedDataset", "ShardedIterableDataset", "get_sample_length"]

_TOKENS = 32768  # as documented, if no budget is set


def get_sample_length(sample: Any, length_key: str = "input_ids") -> int:
    """The length of the value under `length_key`, or that value if it is a number.

    Without the key, the length of the first tensor or non-empty list in the sample.

    >>> get_sample_length({"input_ids": [5, 6, 7]}), get_sample_length({"name": "a", "ids": [1, 2]})
    (3, 2)
    """
    if not isinstance(sample, Mapping):
        return len(sample) if isinstance(sample, Sized) else int(sample)
    found = sample.get(length_key)
    if isinstance(found, Sized) and not (isinstance(found, Tensor) and found.ndim == 0):
        return len(found)
    if found is not None:
        return int(found)
    for value in sample.values():
        if isinstance(value, Tensor | list) and (
            value.ndim > 0 if isinstance(value, Tensor) else value
        ):
            return len(value)
    raise InputError(
        f"the sample has no {length_key!r} and no list or tensor to take its length from; its keys "
        f"are {list(sample)}. Set length_key to the key of its tokens."
    )


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
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
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
    of their lengths, is at most `max_tokens_for_batch` (None: 32768). A sample of at least
    `max_tokens_len` tokens (default: the budget) is a batch of its own. Use
    `DataLoader(dataset, batch_size=None)`. With `collate`, batches are `Batch`es, and an item is
    what `Runner.run` takes.

    If `model` is given and does not support packed sequences, batches are formed for padding, with
    a warning. With `infinite_loop=False`, ranks end after the same item without communication:
    each counts the batches of all from the lengths of all samples, which it reads once for that
    (see `PooledStream(count_ahead=True)`). A source with known lengths (`MeasuredMapped`) as
    `base_dataset` avoids that.

    The counters `accumulated_{tokens,samples,batches}_this_rank` are of this process.

    >>> data = [{"input_ids": [0] * n} for n in (7, 6, 8, 5, 1, 3, 8, 6)]
    >>> dataset = LoadBalancedDataset(data, max_tokens_for_batch=16, infinite_loop=False)
    >>> sum(len(batch) for item in dataset for batch in item)
    8
    """

    def __init__(
        self,
        base_dataset: Any,
        pool_size: int = 32,
        max_tokens_for_batch: int | None = _TOKENS,
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
        collate: Collate | None = None,
    ) -> None:
        super().__init__()
        sharded = base_dataset
        if not isinstance(sharded, ShardedIterableDataset):
            sharded = ShardedIterableDataset(base_dataset, dp_rank, dp_world_size, seed)
        budget = _TOKENS if max_tokens_for_batch is None else max_tokens_for_batch
        self.base_dataset, self.pool_size, self.max_tokens_for_batch = sharded, pool_size, budget
        self.length_key, self.batching_strategy = length_key, batching_strategy
        self.max_tokens_len = max_tokens_len or budget
        self.seq_packing_enabled = truth_value("seq_packing_enabled", seq_packing_enabled)
        self.seed = sharded.seed
        self.dp_rank, self.dp_world_size = sharded.dp_rank, sharded.dp_world_size
        self.accumulate_steps, self.infinite_loop = accumulate_steps, infinite_loop
        self.accumulated_tokens_this_rank = 0
        self.accumulated_samples_this_rank = 0
        self.accumulated_batches_this_rank = 0
        layout = self._layout(model)
        named = batching_strategy in layout.pool_strategies
        source = source_of(sharded.base_dataset)
        length_of = partial(get_sample_length, length_key=length_key)
        self.stream = PooledStream(
            source,
            Recipe(
                layout=layout,
                topology=Topology(dp=self.dp_world_size),
                steps=Steps(micro_batches=accumulate_steps),
                overflow="alone",
            ),
            pool=Pool(
                samples=pool_size,
                strategy=batching_strategy if named else "greedy",
                alone=max_tokens_len or None,
            ),
            world=sharded.world,
            seed=self.seed,
            shuffle=sharded.shuffle and has_random_access(source),
            max_num_steps=max_num_steps,
            infinite_loop=infinite_loop,
            length_of=count_tokens if isinstance(source, MeasuredSource) else length_of,
            count_ahead=infinite_loop is False and self.dp_world_size > 1,
        )
        self._steps = StreamDataset(self.stream, collate)

    @classmethod
    def from_config(cls, base_dataset: Any, config: Mapping[str, Any], **options: Any) -> Self:
        """The dataset of a cosmos-rl configuration (its TOML as a mapping). `options` are further
        arguments: `dp_rank`, `dp_world_size`, `model`, ...

        >>> policy = {"enable_dp_load_balancing": True, "load_balanced_pool_size": 64}
        >>> config = {"train": {"max_num_steps": 100, "train_policy": policy}}
        >>> LoadBalancedDataset.from_config([{"input_ids": [1]}], config).pool_size
        64
        """
        train: Mapping[str, Any] = config.get("train", {})
        policy: Mapping[str, Any] = train.get("train_policy", {})
        if not policy.get("enable_dp_load_balancing", False):
            raise ConfigError(
                "train.train_policy.enable_dp_load_balancing is false, so this dataset would have "
                "no effect. Set it to true."
            )
        if train.get("max_num_steps") is None:
            raise ConfigError(
                "train.max_num_steps is missing. Set it to the number of optimizer steps, which "
                "enable_dp_load_balancing requires."
            )
        if "epoch" in train:
            warnings.warn(
                f"train.epoch={train['epoch']} is ignored: with enable_dp_load_balancing, training "
                f"ends after train.max_num_steps={train['max_num_steps']} steps.",
                stacklevel=2,
            )
        given = {name: policy[key] for key, name in _KEYS.items() if key in policy}
        packing = train.get("sequence_packing", False)
        steps = train["max_num_steps"]
        return cls(
            base_dataset, **given, seq_packing_enabled=packing, max_num_steps=steps, **options
        )

    def _layout(self, model: Any) -> Layout:
        if not self.seq_packing_enabled:
            return Padded(max_tokens=self.max_tokens_for_batch)
        layout = Packed(max_tokens=self.max_tokens_for_batch)
        return layout if model is None else choose_layout(model, layout)

    def __iter__(self) -> Iterator[list[Any]]:
        for step in self._steps:
            self._count(step)
            if step.batches is not None:
                yield list(step.batches)
                continue
            yield [
                [samples[sample_id] for sample_id in micro.segments.sample.tolist()]
                for micro, samples in step
                if not micro.is_empty
            ]

    def _count(self, step: Step) -> None:
        filled = [micro for micro in step.micro_batches if not micro.is_empty]
        self.accumulated_tokens_this_rank += sum(micro.slots for micro in filled)
        self.accumulated_samples_this_rank += sum(len(micro.segments) for micro in filled)
        self.accumulated_batches_this_rank += len(filled)

    def __len__(self) -> int:
        """An upper bound: the samples of this rank / `accumulate_steps`; or `max_num_steps`, if
        they are given and the data repeats."""
        if self.infinite_loop and self.stream.max_num_steps is not None:
            return len(self.stream)
        return divided_up(len(self.base_dataset), self.accumulate_steps)

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


_KEYS = {
    "load_balanced_pool_size": "pool_size",
    "load_balanced_max_tokens_for_batch": "max_tokens_for_batch",
    "load_balanced_batching_strategy": "batching_strategy",
    "load_balanced_accumulate_steps": "accumulate_steps",
    "load_balanced_batches_per_optimizer_step": "accumulate_steps",
    "dataloader_seed": "seed",
    "infinite_loop": "infinite_loop",
}
"""Keys of train.train_policy -> arguments. Two of them are in the document only."""


def source_of(dataset: Any) -> Source:
    """Any torch dataset as a source. Every item is one sample, even if it is a list. A source that
    knows its lengths stays one."""
    if isinstance(dataset, MeasuredSource):
        return dataset
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not by_index:
        return Iterated(dataset, transform=_single)
    return Mapped(dataset, transform=_single)


def _single(item: Any) -> list[Any]:
    return [item]


def _one(sample: Any) -> int:
    return 1
