"""DynamicBatchingSizeDataset: micro-batches of a token budget, formed where samples are read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from evenstep.compat.veomni.lengths import Length, get_length_by_attention_mask_fn
from evenstep.core.text import truth_value, whole_number
from evenstep.data.source import Sample
from evenstep.errors import ConfigError, InputError
from evenstep.planning.pool import Room, select


class Buffered(NamedTuple):
    """A sample, the tokens of it that the budget counts, and all its tokens."""

    sample: Sample
    length: int
    physical: int


@dataclass(slots=True)
class TokenBuffer:
    """Samples that wait for a micro-batch, oldest first.

    A micro-batch is the oldest sample and, in order, each that still fits: counted tokens within
    the budget and all tokens within the cap. The oldest is taken however long it is.

    >>> buffer = TokenBuffer([Buffered(name, n, n) for name, n in zip("abcd", (3, 6, 2, 4))])
    >>> [one.sample for one in buffer.take(6)], buffer.tokens
    (['a', 'c'], 10)
    """

    waiting: list[Buffered] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Counted tokens of the waiting samples."""
        return sum(one.length for one in self.waiting)

    @property
    def physical(self) -> int:
        """All tokens of the waiting samples."""
        return sum(one.physical for one in self.waiting)

    def ready(self, samples: int, budget: int, cap: int | None = None) -> bool:
        """Whether there are enough samples, and enough tokens for the budget or for the cap."""
        if len(self.waiting) < samples:
            return False
        return self.tokens >= budget or (cap is not None and self.physical >= cap)

    def take(self, budget: int, cap: int | None = None) -> list[Buffered]:
        """Remove the next micro-batch."""
        lengths = np.array([one.length for one in self.waiting], np.int64)
        physical = np.array([one.physical for one in self.waiting], np.int64)
        chosen = select("greedy", lengths, Room(capacity=budget, counted=cap), physical).tolist()
        taken = [self.waiting[at] for at in chosen]
        gone = set(chosen)
        self.waiting = [one for at, one in enumerate(self.waiting) if at not in gone]
        return taken


class DynamicBatchingSizeDataset(IterableDataset):  # type: ignore[misc]
    """Micro-batches of at most `micro_batch_seq_length` tokens, collated.

    A micro-batch is formed when the buffer holds `ready_for_micro_batch_threshold` samples and
    `micro_batch_seq_length` tokens: the oldest sample and, in order, each that still fits. At the
    end of the data the buffer is emptied. A sample over the budget is dropped with a warning and
    counted in `dropped`; with `force_generate_long_sequence` it is a micro-batch of its own.

    `get_length_fn` counts what the budget limits. `physical_token_cap` further limits the tokens
    that `get_physical_length_fn` counts. An item of `dataset` is a sample or a list of samples.

    `state_dict` resumes exactly: it holds the buffer and the position of `dataset`, which is its
    own state, or the number of its items if it has none. With `save_by_idx` it holds the indices
    of the buffered samples, which `dataset.get_item` reads again.

    >>> from evenstep.compat.veomni import MainCollator
    >>> data = [{"input_ids": [n] * n, "attention_mask": [1] * n} for n in (2, 5, 3, 1)]
    >>> batches = DynamicBatchingSizeDataset(data, 5, 3, MainCollator(), save_by_idx=False)
    >>> [batch["input_ids"].tolist()[0] for batch in batches]
    [[2, 2, 3, 3, 3], [5, 5, 5, 5, 5], [1]]
    """

    def __init__(
        self,
        dataset: Any,
        micro_batch_seq_length: int,
        ready_for_micro_batch_threshold: int,
        dynamic_batching_collate_fn: Callable[[list[Any]], Any],
        save_by_idx: bool = True,
        get_length_fn: Length = get_length_by_attention_mask_fn,
        physical_token_cap: int | None = None,
        get_physical_length_fn: Length | None = get_length_by_attention_mask_fn,
        force_generate_long_sequence: bool = False,
    ) -> None:
        super().__init__()
        self.dataset, self.get_length_fn = dataset, get_length_fn
        self.micro_batch_seq_length = whole_number("micro_batch_seq_length", micro_batch_seq_length)
        self.ready_for_micro_batch_threshold = whole_number(
            "ready_for_micro_batch_threshold", ready_for_micro_batch_threshold
        )
        self.dynamic_batching_collate_fn = dynamic_batching_collate_fn
        self.physical_token_cap = physical_token_cap
        self.get_physical_length_fn = get_physical_length_fn
        self.force_generate_long_sequence = truth_value(
            "force_generate_long_sequence", force_generate_long_sequence
        )
        self.save_by_idx = truth_value("save_by_idx", save_by_idx)
        if save_by_idx and not callable(getattr(dataset, "get_item", None)):
            raise ConfigError(
                "save_by_idx is True, but dataset does not have get_item method, which reads "
                "buffered samples again. Set save_by_idx=False to save the samples."
            )
        if hasattr(dataset, "output_index_for_resume"):
            dataset.output_index_for_resume = save_by_idx
        self.dropped = 0
        self._held = TokenBuffer()
        self._read = 0  # items of the dataset
        self._resumed = False

    @property
    def _buffer(self) -> Sequence[tuple[Any, int, int]]:
        """(sample, its tokens, its physical tokens)"""
        return [(one.sample[0], one.length, one.physical) for one in self._held.waiting]

    @property
    def _buffer_token_count(self) -> int:
        return self._held.tokens

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._held, self._read = TokenBuffer(), 0
        skipped = 0 if hasattr(self.dataset, "state_dict") else self._read
        self._resumed = False
        return self._micro_batches(islice(iter(self.dataset), skipped, None))

    def _micro_batches(self, items: Iterator[Any]) -> Iterator[Any]:
        budget, cap = self.micro_batch_seq_length, self.physical_token_cap
        for item in items:
            self._read += 1
            self._put(item)
            if self._held.ready(self.ready_for_micro_batch_threshold, budget, cap):
                yield from self._collated()
        while self._held.waiting:
            yield from self._collated()

    def _put(self, item: Any) -> None:
        item, index = item if self.save_by_idx else (item, None)
        for part, sample in enumerate(item if isinstance(item, list) else [item]):
            one = self._measured(sample, (index, part))
            if one.length > self.micro_batch_seq_length and not self.force_generate_long_sequence:
                self._drop(one.length)
            else:
                self._held.waiting.append(one)

    def _measured(self, sample: Any, place: tuple[Any, int]) -> Buffered:
        length = int(self.get_length_fn(sample))
        physical = length
        if self.get_physical_length_fn is not None:
            physical = int(self.get_physical_length_fn(sample))
        if physical < 1:
            raise InputError(
                f"a sample has {physical} tokens; expected at least 1. Remove it from the dataset."
            )
        return Buffered((sample, place), length, physical)

    def _drop(self, length: int) -> None:
        self.dropped += 1
        if self.dropped == 1:
            warnings.warn(
                f"dropping samples over micro_batch_seq_length={self.micro_batch_seq_length}, the "
                f"first of {length} tokens; `dropped` counts them. Set "
                f"force_generate_long_sequence=True to keep them.",
                stacklevel=2,
            )

    def _collated(self) -> Iterator[Any]:
        taken = self._held.take(self.micro_batch_seq_length, self.physical_token_cap)
        batch = self.dynamic_batching_collate_fn([one.sample[0] for one in taken])
        if batch is not None:
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the micro-batch that was yielded last."""
        which = 1 if self.save_by_idx else 0  # of (sample, its place)
        entries = [one.sample[which] for one in self._held.waiting]
        state: dict[str, Any] = {
            "save_by_idx": self.save_by_idx,
            "buffer": copy.deepcopy(entries),
            "buffer_token_count": self._held.tokens,
            "items_read": self._read,
            "dropped": self.dropped,
        }
        if hasattr(self.dataset, "state_dict"):
            state["dynamic_batch_upstream_dataset_state"] = copy.deepcopy(self.dataset.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start after the micro-batch that the state was taken at."""
        if state["save_by_idx"] != self.save_by_idx:
            raise InputError(
                f"the state was taken with save_by_idx={state['save_by_idx']}. Set it to the same."
            )
        entries = copy.deepcopy(state["buffer"])
        if self.save_by_idx:
            found = [self._measured(self._again(*place), tuple(place)) for place in entries]
        else:
            found = [self._measured(sample, (None, 0)) for sample in entries]
        self._held, self._read, self._resumed = TokenBuffer(found), state["items_read"], True
        self.dropped = state["dropped"]
        if self._held.tokens != state["buffer_token_count"]:
            raise InputError(
                f"the buffered samples have {self._held.tokens} tokens now and had "
                f"{state['buffer_token_count']} when the state was taken, so the data has changed. "
                f"Restore the data, or start without the state."
            )
        if "dynamic_batch_upstream_dataset_state" in state:
            self.dataset.load_state_dict(state["dynamic_batch_upstream_dataset_state"])

    def _again(self, index: Any, part: int) -> Any:
        item = self.dataset.get_item(index)
        return item[part] if isinstance(item, list) else item
