"""What ranks exchange: collectives, numbers in one reduction, shards of a context."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, distributed
from torch.utils.weak import WeakIdKeyDictionary

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import BatchExchange, BatchShard, Boundaries
from evenstep.tensors.losses import Metric, merge
from evenstep.tensors.parallel import shard_boundaries
from evenstep.tensors.segment_attention import Call, attend


class Collective(Protocol):
    """The ranks that share a step. Every rank makes the same calls in the same order.

    Results are bitwise equal on all ranks.
    """

    @property
    def rank(self) -> int:
        """This rank, starting at 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. `tensor` may be overwritten."""
        ...

    # Ranks that share samples also need `all_to_all`; see `evenstep.tensors.transport.Ranks`.


@dataclass(frozen=True, slots=True)
class Alone:
    """A single rank: `rank` is 0 and `size` is 1.

    >>> Alone().all_reduce_sum(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """

    rank: ClassVar[int] = 0
    size: ClassVar[int] = 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Distributed:
    """The ranks of a `torch.distributed` process group, by default the default group.

    The process group must be initialised:

        torch.distributed.init_process_group("nccl")
        runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
    """

    group: Any = None

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return int(_initialised().get_rank(self.group))

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return int(_initialised().get_world_size(self.group))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over the group; with NCCL the result is on the GPU."""
        distributed = _initialised()
        if tensor.device.type == "cpu" and distributed.get_backend(self.group) == "nccl":
            tensor = tensor.cuda()
        distributed.all_reduce(tensor, group=self.group)
        return tensor

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows for each rank, `sent[r]` for rank r -> rows from each, `received[r]` from rank r."""
        rows = values.new_empty((sum(received), *values.shape[1:]))
        _initialised().all_to_all_single(
            rows, values.contiguous(), received, sent, group=self.group
        )
        return rows


def gather_values(collective: Collective, values: Sequence[float] | Tensor) -> list[Any]:
    """The values of every rank, equally many on each, as a list by rank: one all-reduce."""
    mine = torch.as_tensor(values)
    every = mine.new_zeros((collective.size, *mine.shape))
    every[collective.rank] = mine
    gathered: list[Any] = collective.all_reduce_sum(every).tolist()
    return gathered


def has_group() -> bool:
    """Whether the default process group of torch.distributed is there."""
    return bool(distributed.is_available() and distributed.is_initialized())


def _initialised() -> Any:
    """torch.distributed, once there is a process group."""
    if not has_group():
        raise ConfigError(
            "torch.distributed is not initialised. Call init_process_group first, or use Alone() "
            "for one process."
        )
    return distributed


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for what runs there."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _sum(values: Sequence[Tensor]) -> Tensor:
    """The float64 sum of scalars."""
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    return torch.stack([*values]).detach().double().sum(0)


_HEADER = 3  # entries per rank
# At least so many entries: bundles of different names then mostly have equal lengths, which the
# all-reduce needs for the headers to be compared.
_LEAST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Named sums and metrics of a micro-batch, of a rank's step, or of all ranks.

    All that ranks sum at the end of a step is in one tensor:

    | header of each rank: digest, sums, metrics | sums | metrics | zeros up to a power of two |

    A sum takes one entry and a mean two. A min or max takes one entry per rank: each rank writes
    its own, so the sum gathers them. The headers show whether all ranks packed the same names; if
    not, `reduce` raises.

    >>> from evenstep.train.collectives import Alone
    >>> first = Bundle({"loss": torch.tensor(6.0), "tokens": torch.tensor(3.0)})
    >>> second = Bundle({"loss": torch.tensor(4.0), "tokens": torch.tensor(1.0)})
    >>> reduced = Bundle.merge([first, second]).reduce(Alone())
    >>> float(reduced.sums["loss"] / reduced.sums["tokens"])
    2.5
    """

    sums: Mapping[str, Tensor]
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @classmethod
    def merge(cls, bundles: Sequence[Bundle]) -> Bundle:
        """Merge the bundles of several micro-batches. Names may be missing in some."""
        if len(bundles) == 1:
            return bundles[0]
        by_name: dict[str, list[Tensor]] = {}
        for bundle in bundles:
            for name, value in bundle.sums.items():
                by_name.setdefault(name, []).append(value)
        sums = {name: _sum(values) for name, values in by_name.items()}
        return cls(sums, merge(bundle.metrics for bundle in bundles))

    def _entries(self) -> Iterator[tuple[str, str, list[Tensor]]]:
        """(name, how it is reduced, its numbers), in the order in which every rank packs them."""
        for name, value in sorted(self.sums.items()):
            yield name, "sum", [value]
        for name, metric in sorted(self.metrics.items()):
            count = [] if metric.count is None else [metric.count]
            yield name, metric.reduction, [metric.total, *count]

    def reduce(self, collective: Collective) -> Bundle:
        """The bundle over all ranks, on the host, by one all-reduce."""
        rank, size = collective.rank, collective.size
        values = collective.all_reduce_sum(self.pack(rank, size)).detach().cpu()
        if size > 1:
            self._check(values, rank, size)
        entries, metrics = iter(values[_HEADER * size :].unbind()), {}
        sums = {name: next(entries) for name in sorted(self.sums)}
        for name, metric in sorted(self.metrics.items()):
            if metric.reduction in ("min", "max"):
                extreme = torch.amin if metric.reduction == "min" else torch.amax
                of_ranks = torch.stack([next(entries) for _ in range(size)])
                metrics[name] = Metric(metric.reduction, extreme(of_ranks))
            else:
                width = 1 if metric.count is None else 2
                numbers = [next(entries) for _ in range(width)]
                metrics[name] = Metric(metric.reduction, *numbers)
        return Bundle(sums, metrics)

    def pack(self, rank: int, size: int) -> Tensor:
        """The float64 tensor that rank `rank` of `size` contributes to the sum."""
        entries: dict[int, Tensor] = {}
        at = _HEADER * size
        for name, reduction, numbers in self._entries():
            by_rank = reduction in ("min", "max")
            first = at + rank if by_rank else at
            for number in numbers:
                if number.numel() != 1:
                    raise InputError(
                        f"{name!r} has shape {tuple(number.shape)}; expected a scalar. Sum it, or "
                        f"use one name per entry."
                    )
            entries |= zip(range(first, first + len(numbers)), numbers, strict=True)
            at += size if by_rank else len(numbers)
        values = [0.0] * max(_LEAST, 1 << (at - 1).bit_length())  # 64, 128, ...
        if size > 1:
            values[_HEADER * rank : _HEADER * (rank + 1)] = self._header()
        there: dict[torch.device, list[int]] = {}  # the entries of each device but the host
        for index, number in entries.items():
            if number.device.type == "cpu":
                values[index] = number.item()
            else:
                there.setdefault(number.device, []).append(index)
        packed = torch.tensor(values, dtype=torch.float64)
        for device, indices in there.items():  # copies that do not wait for the device
            numbers = [entries[index].detach().double().reshape(()) for index in indices]
            packed = to_device(packed, device)
            packed.index_copy_(0, to_device(torch.tensor(indices), device), torch.stack(numbers))
        return packed

    def _header(self) -> list[int]:
        """A 48-bit digest of all names, exact in float64, and the numbers of sums and metrics."""
        names = [(name, reduction) for name, reduction, _ in self._entries()]
        digest = hashlib.sha256(json.dumps(names).encode()).digest()
        return [int.from_bytes(digest[:6], "big"), len(self.sums), len(self.metrics)]

    def _check(self, values: Tensor, rank: int, size: int) -> None:
        headers = [tuple(row) for row in values[: _HEADER * size].view(size, _HEADER).tolist()]
        usual = Counter(headers).most_common(1)[0][0]
        odd = [number for number, header in enumerate(headers) if header != usual]
        if not odd and usual == tuple(self._header()):
            return
        described = "; ".join(
            f"rank {number} packed {headers[number][1]:.0f} sums and {headers[number][2]:.0f} "
            f"metrics"
            for number in (odd or [rank])[:4]
        )
        raise InputError(
            f"{described}, with other names than most ranks ({usual[1]:.0f} sums and "
            f"{usual[2]:.0f} metrics). Rank {rank} packed the sums {sorted(self.sums)} and the "
            f"metrics {sorted(self.metrics)}. Return the same metrics for every batch, empty ones "
            f"where there is nothing to measure."
        )


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, shard: BatchShard, group: Any, window: int | None = None
) -> Tensor:
    """Compute attention within each segment of the whole batch for the slots of `shard`.

    q, k and v are (rows, heads, width / size, dim), the slots of this rank. Keys and values come
    from the other ranks of `group`, a process group or a collective, as far as slots here see them.

        shard = shard_context(batch, rank, size)
        out = context_attention(q, k, v, shard, group)
    """
    if shard.slot_ids not in _SHARDS:
        _SHARDS[shard.slot_ids] = shard_boundaries(shard)
    bounds, exchange = _SHARDS[shard.slot_ids]
    ranks = group if hasattr(group, "all_to_all") else Distributed(group)
    if exchange.ranks != ranks:
        exchange = exchange.between(ranks)
        _SHARDS[shard.slot_ids] = bounds, exchange
    k, v = exchange.join(k, v)
    return attend(Call(q, k, v, bounds, window=window))


_SHARDS: MutableMapping[Tensor, tuple[Boundaries, BatchExchange]] = WeakIdKeyDictionary()
"""Of shards by their slots: where their keys are, which all layers of a model use."""
