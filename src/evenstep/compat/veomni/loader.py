"""Dynamic batching in the main process, and the loader of a VeOmni configuration."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from evenstep.compat.cosmos_rl import ShardedIterableDataset
from evenstep.compat.veomni.collator import MainCollator
from evenstep.compat.veomni.dataset import Buffered, DynamicBatchingSizeDataset, TokenBuffer
from evenstep.compat.veomni.lengths import (
    Length,
    get_length_by_attention_mask_fn,
    get_length_fn_by_count_mode,
    get_parallel_state,
)
from evenstep.core.text import one_of, truth_value, whole_number
from evenstep.data.pool import Pool
from evenstep.errors import ConfigError, InputError


class DynBszBuffer:
    """The samples of a `TextBatchingStrategy`, with VeOmni's names."""

    def __init__(self, get_length_fn: Length | None, get_physical_length_fn: Length | None) -> None:
        self._get_length_fn = get_length_fn
        self._get_physical_length_fn = get_physical_length_fn
        self.held = TokenBuffer()

    def append(self, item: Any) -> None:
        """Add a sample."""
        length = int((self._get_length_fn or get_length_by_attention_mask_fn)(item))
        physical = length
        if self._get_physical_length_fn is not None:
            physical = int(self._get_physical_length_fn(item))
        self.held.waiting.append(Buffered(item, length, physical))

    def __len__(self) -> int:
        return len(self.held.waiting)

    @property
    def all_token_cnt(self) -> int:
        """Counted tokens."""
        return self.held.tokens

    @property
    def all_physical_token_cnt(self) -> int:
        """All tokens."""
        return self.held.physical


class TextBatchingStrategy:
    """A buffer that gives micro-batches of at most `token_micro_bsz` tokens.

    A micro-batch is ready when `buffer_size` samples and `token_micro_bsz` tokens wait. It is the
    oldest sample, however long, and in order each that still fits. In the first `bsz_warmup_steps`
    steps the budget grows from `bsz_warmup_init_mbtoken`. `physical_token_cap` further limits
    the tokens that `get_physical_length_fn` counts.

    >>> strategy = TextBatchingStrategy(5, buffer_size=2)
    >>> for n in (2, 5, 3):
    ...     strategy.put_item({"input_ids": [n] * n, "attention_mask": [1] * n})
    >>> strategy.is_ready_for_micro_batch()
    True
    >>> [len(sample["input_ids"]) for sample in strategy.get_micro_batch(step=0)]
    [2, 3]
    """

    def __init__(
        self,
        token_micro_bsz: int,
        buffer_size: int = 500,
        bsz_warmup_steps: int = 0,
        bsz_warmup_init_mbtoken: int = 200,
        get_length_fn: Length | None = None,
        physical_token_cap: int | None = None,
        get_physical_length_fn: Length | None = None,
    ) -> None:
        self.token_micro_bsz = whole_number("token_micro_bsz", token_micro_bsz)
        self.buffer_size = whole_number("buffer_size", buffer_size)
        self.bsz_warmup_steps = bsz_warmup_steps
        self.bsz_warmup_init_mbtoken = bsz_warmup_init_mbtoken
        warm = bsz_warmup_init_mbtoken if bsz_warmup_steps else None
        self._warmup = Pool(warmup_steps=bsz_warmup_steps, warmup_tokens=warm)
        self._step = 0
        self.physical_token_cap = physical_token_cap
        self.get_physical_length_fn = get_physical_length_fn
        self.buffer = DynBszBuffer(get_length_fn, get_physical_length_fn)

    def is_ready_for_micro_batch(self) -> bool:
        """Whether a full micro-batch can be taken."""
        return self.buffer.held.ready(
            self.buffer_size, self.token_micro_bsz, self.physical_token_cap
        )

    def put_item(self, item: Any) -> None:
        """Add a sample; one of a single token too."""
        if not len(item["input_ids"]):
            raise InputError("a sample has no tokens. Remove it from the dataset.")
        self.buffer.append(item)

    def get_cur_token_micro_bsz(self) -> int:
        """The budget of the step that the last micro-batch was taken in, or of the first step."""
        return self._warmup.budget(self.token_micro_bsz, self._step)

    def get_micro_batch(self, step: int) -> list[Any]:
        """Remove the samples of the next micro-batch, in a step of the warm-up or later."""
        self._step = step
        taken = self.buffer.held.take(self.get_cur_token_micro_bsz(), self.physical_token_cap)
        return [one.sample for one in taken]

    def empty(self) -> bool:
        """Whether no sample waits."""
        return len(self.buffer) == 0

    def state_dict(self) -> dict[str, Any]:
        """The waiting samples."""
        return {"buffer": copy.deepcopy([one.sample for one in self.buffer.held.waiting])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the samples of a state in place of those that wait."""
        self.buffer.held = TokenBuffer()
        for sample in copy.deepcopy(state["buffer"]):
            self.buffer.append(sample)


class DynamicBatchSizeDataLoader:
    """Steps of `num_micro_batch` micro-batches, formed in the main process.

    Reads `dataloader`, whose items are samples or lists of samples, again and again until `length`
    steps are done (0: as many as `dataloader` has items; -1: without end), so all ranks make as
    many. `drop_last` has no effect, because no step is ever incomplete.

    >>> data = [{"input_ids": [n] * n, "attention_mask": [1] * n} for n in (2, 5, 3, 1)]
    >>> strategy = TextBatchingStrategy(5, buffer_size=3)
    >>> loader = DynamicBatchSizeDataLoader(data, strategy, num_micro_batch=2, length=2)
    >>> [[[len(one["input_ids"]) for one in micro] for micro in step] for step in loader]
    [[[2, 3], [5]], [[1, 2], [5]]]
    """

    def __init__(
        self,
        dataloader: Any,
        batching_strategy: TextBatchingStrategy,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_micro_batch: int = 1,
        length: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.batching_strategy = batching_strategy
        self.num_micro_batch = whole_number("num_micro_batch", num_micro_batch)
        self.step = 0
        self._dataloader, self._collate_fn = dataloader, collate_fn
        self._drop_last = truth_value("drop_last", drop_last)
        self._length = sys.maxsize if length == -1 else length or len(dataloader)
        self._items = 0  # of this pass over the dataloader
        self._resumed = False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Any]]:
        if not self._resumed:
            self.step = self._items = 0
            self.batching_strategy.load_state_dict({"buffer": []})
        self._resumed = False
        batch: list[Any] = []
        # At most one step is made of each item, as a resumed loader begins with an item.
        for item in self._endless() if self.step < self._length else ():
            for sample in item if isinstance(item, list) else [item]:
                self.batching_strategy.put_item(sample)
            if self.batching_strategy.is_ready_for_micro_batch():
                samples = self.batching_strategy.get_micro_batch(self.step)
                batch.append(self._collate_fn(samples) if self._collate_fn else samples)
            if len(batch) == self.num_micro_batch:
                self.step += 1
                yield batch
                if self.step >= self._length:
                    return
                batch = []

    def _endless(self) -> Iterator[Any]:
        """The items of the dataloader, again and again."""
        skip = 0 if hasattr(self._dataloader, "state_dict") else self._items
        while True:
            before = self._items
            for number, item in enumerate(self._dataloader):
                if number >= skip:
                    self._items += 1
                    yield item
            if self._items == before == 0:
                raise InputError("the dataloader is empty. Add samples.")
            self._items = skip = 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the step that was yielded last."""
        state = {
            "step": self.step,
            "items": self._items,
            "num_micro_batch": self.num_micro_batch,
            "batching_strategy_state": self.batching_strategy.state_dict(),
        }
        if hasattr(self._dataloader, "state_dict"):
            state["dataloader_state"] = copy.deepcopy(self._dataloader.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the step that the state was taken at."""
        self.step, self._items, self._resumed = state["step"], state["items"], True
        self.batching_strategy.load_state_dict(state["batching_strategy_state"])
        if "dataloader_state" in state:
            self._dataloader.load_state_dict(state["dataloader_state"])

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataloader."""
        if hasattr(self._dataloader, "set_epoch"):
            self._dataloader.set_epoch(epoch)


def build_dataloader(
    dataloader_type: Literal["native"] = "native",
    *,
    dataset: Any,
    micro_batch_size: int,
    global_batch_size: int,
    max_seq_len: int,
    train_steps: int,
    dyn_bsz: bool = True,
    pad_to_length: bool = False,
    bsz_warmup_ratio: float = 0.0,
    bsz_warmup_init_mbtoken: int = 200,
    dyn_bsz_runtime: Literal["main", "worker"] = "main",
    dyn_bsz_count_mode: Literal["total", "effective"] = "total",
    dyn_bsz_physical_overflow_ratio: float = 1.5,
    dyn_bsz_buffer_size: int = 200,
    dyn_bsz_dataset_save_by_idx: bool = False,
    dataloader_batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    build_collate_fn: bool = True,
    collate_fn_kwargs: Mapping[str, Any] | None = None,
    num_workers: int = 0,
    worker_num_threads: int | None = None,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    drop_last: bool = True,
    save_steps: int = 0,
    **options: Any,
) -> Any:
    """Steps of global_batch_size / (micro_batch_size x dp) micro-batches.

    With `dyn_bsz` a micro-batch holds up to micro_batch_size x max_seq_len tokens. Without, it
    holds the next `micro_batch_size` samples in order. Either is one packed row; `pad_to_length`
    pads it to micro_batch_size x max_seq_len (in `effective` mode to the physical cap).
    `collate_fn_kwargs` are those of `MainCollator`; without `build_collate_fn` a micro-batch is
    the list of its samples. `dataloader_batch_size` follows from the sizes and is only checked.
    `persistent_workers` and `prefetch_factor` have no effect without workers, and `save_steps`
    never has one: any step can be saved. `options` are those of torch's `DataLoader`.

    >>> data = [{"input_ids": [n] * n, "attention_mask": [1] * n} for n in (4, 2, 3, 1)]
    >>> sizes = dict(micro_batch_size=2, global_batch_size=2, max_seq_len=5, train_steps=1)
    >>> ((row,),) = build_dataloader(
    ...     dataset=data, **sizes, shuffle=False, dyn_bsz_buffer_size=4
    ... )
    >>> row["position_ids"].tolist()
    [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0]]
    """
    one_of("dataloader_type", dataloader_type, Literal["native"])
    one_of("dyn_bsz_runtime", dyn_bsz_runtime, Literal["main", "worker"])
    if truth_value("pad_to_length", pad_to_length) and not dyn_bsz:
        raise ConfigError(
            "pad_to_length needs dyn_bsz: a fixed number of samples has no fixed length. Set "
            "dyn_bsz, or leave pad_to_length out."
        )
    if collate_fn is not None or not build_collate_fn:
        idle = {"pad_to_length": pad_to_length, "collate_fn_kwargs": collate_fn_kwargs}
        for name in (name for name, value in idle.items() if value):
            raise ConfigError(
                f"{name} is for the MainCollator, which is not used with an own collate_fn or "
                f"without build_collate_fn. Leave {name} out, or the others."
            )
    if bsz_warmup_ratio and not (dyn_bsz and dyn_bsz_runtime == "main"):
        warnings.warn(
            "bsz_warmup_ratio has no effect without dyn_bsz and dyn_bsz_runtime='main'.",
            stacklevel=2,
        )
    ranks = get_parallel_state()
    steps = _micro_batches(global_batch_size, micro_batch_size, ranks.dp_size)
    size = steps * micro_batch_size
    if dyn_bsz:
        size = 1 if dyn_bsz_runtime == "main" else steps
    if dataloader_batch_size not in (None, size):
        raise ConfigError(
            f"dataloader_batch_size must be {size} with these sizes, got {dataloader_batch_size}. "
            f"Leave it out."
        )
    if num_workers:
        options |= {"persistent_workers": persistent_workers, "prefetch_factor": prefetch_factor}
    if worker_num_threads is not None:
        own = options.get("worker_init_fn")
        options["worker_init_fn"] = _WithThreads(worker_num_threads, own)
    options["num_workers"] = num_workers
    budget = micro_batch_size * max_seq_len
    cap = _physical_cap(budget, dyn_bsz_count_mode, dyn_bsz_physical_overflow_ratio)
    collate = collate_fn
    if collate is None and build_collate_fn:
        length = {"pad_to_length": cap or budget} if pad_to_length else {}
        collate = MainCollator(**{**(collate_fn_kwargs or {}), **length})
    collate = collate or _unchanged
    counts: dict[str, Any] = {
        "get_length_fn": get_length_fn_by_count_mode(dyn_bsz_count_mode),
        "physical_token_cap": cap,
        "get_physical_length_fn": None if cap is None else get_length_by_attention_mask_fn,
    }
    if dyn_bsz and dyn_bsz_runtime == "worker":
        shared = dataset
        if not isinstance(dataset, IterableDataset):
            shared = ShardedIterableDataset(dataset, ranks.dp_rank, ranks.dp_size, seed, shuffle)
        batches = DynamicBatchingSizeDataset(
            shared, budget, dyn_bsz_buffer_size, collate, dyn_bsz_dataset_save_by_idx, **counts
        )
        return DataLoader(batches, size, drop_last=drop_last, collate_fn=list, **options)
    if not isinstance(dataset, IterableDataset):
        options["sampler"] = DistributedSampler(
            dataset, ranks.dp_size, ranks.dp_rank, shuffle=shuffle, seed=seed
        )
    if not dyn_bsz:
        fixed = _InOrder(micro_batch_size, collate)
        return DataLoader(dataset, size, drop_last=drop_last, collate_fn=fixed, **options)
    warmup = int(train_steps * bsz_warmup_ratio)
    strategy = TextBatchingStrategy(
        budget, dyn_bsz_buffer_size, warmup, bsz_warmup_init_mbtoken, **counts
    )
    items = DataLoader(dataset, batch_size=None, collate_fn=_unchanged, **options)
    return DynamicBatchSizeDataLoader(items, strategy, collate, steps, train_steps, drop_last)


def _micro_batches(global_batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """Micro-batches per step on each rank."""
    steps, left = divmod(global_batch_size, micro_batch_size * ranks)
    if left or not steps:
        raise ConfigError(
            f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size x "
            f"data-parallel ranks = {micro_batch_size} x {ranks}."
        )
    return steps


class _WithThreads:
    """Gives each worker so many threads, and calls the caller's `worker_init_fn`."""

    def __init__(self, threads: int, then: Callable[[int], None] | None = None) -> None:
        self.threads, self.then = whole_number("worker_num_threads", threads), then

    def __call__(self, worker: int) -> None:
        torch.set_num_threads(self.threads)
        if self.then is not None:
            self.then(worker)


class _InOrder:
    """The samples of a step -> its micro-batches, `size` samples each, in order."""

    def __init__(self, size: int, collate: Callable[[list[Any]], Any]) -> None:
        self.size, self.collate = size, collate

    def __call__(self, items: list[Any]) -> list[Any]:
        samples = [item[0] if isinstance(item, list) else item for item in items]
        starts = range(0, len(samples), self.size)
        return [self.collate(samples[at : at + self.size]) for at in starts]


def _unchanged(item: Any) -> Any:
    return item


def _physical_cap(budget: int, count_mode: str, ratio: float) -> int | None:
    if count_mode != "effective":
        return None
    if not ratio >= 1.0:
        raise ConfigError(
            f"dyn_bsz_physical_overflow_ratio must be >= 1.0, got {ratio}: the cap is at least the "
            f"budget."
        )
    return math.ceil(budget * ratio)
