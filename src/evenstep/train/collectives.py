"""What ranks exchange: collectives, numbers in one reduction, shards of a context."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.nn import functional

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import BatchShard
from evenstep.tensors.losses import Metric, merge
from evenstep.tensors.parallel import join_context, join_sequence


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


@dataclass(frozen=True, slots=True)
class Alone:
    """A single rank.

    >>> Alone().all_reduce_sum(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True, slots=True)
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
        return int(self._torch().get_rank(self.group))

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return int(self._torch().get_world_size(self.group))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over the group; with NCCL the result is on the GPU."""
        distributed = self._torch()
        if tensor.device.type == "cpu" and distributed.get_backend(self.group) == "nccl":
            tensor = tensor.cuda()
        distributed.all_reduce(tensor, group=self.group)
        return tensor

    @staticmethod
    def _torch() -> Any:
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised. Call init_process_group first, or use "
                "Alone() for one process."
            )
        return distributed


_HEADER = 3  # entries per rank
# At least so many entries: bundles of different names then mostly have equal lengths, which the
# all-reduce needs for the headers to be compared.
_LEAST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Named sums and metrics of a micro-batch, of a rank's step, or of all ranks.

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
    def merge(cls, bundles: Iterable[Bundle]) -> Bundle:
        """Merge the bundles of several micro-batches. Names may be missing in some."""
        bundles = list(bundles)
        found: dict[str, list[Tensor]] = {}
        for bundle in bundles:
            for name, value in bundle.sums.items():
                found.setdefault(name, []).append(value.detach().double())
        sums = {name: torch.stack(values).sum(0) for name, values in found.items()}
        return cls(sums, merge(bundle.metrics for bundle in bundles))

    def reduce(self, collective: Collective) -> Bundle:
        """The bundle over all ranks, on the host, by one all-reduce."""
        packed = self.pack(collective.rank, collective.size)
        return self.unpack(collective.all_reduce_sum(packed), collective.rank, collective.size)

    def pack(self, rank: int, size: int) -> Tensor:
        """The float64 tensor that rank `rank` of `size` contributes to the sum."""
        values: list[Tensor] = []
        indices: list[int] = []
        at = _HEADER * size
        for name in sorted(self.sums):
            values.append(_scalar(name, self.sums[name]))
            indices.append(at)
            at += 1
        for name in sorted(self.metrics):
            metric = self.metrics[name]
            values.append(_scalar(name, metric.total))
            indices.append(at + rank if metric.reduction in ("min", "max") else at)
            if metric.count is not None:
                values.append(_scalar(name, metric.count))
                indices.append(at + 1)
            at += _entries(metric, size)
        packed = torch.zeros(_padded(at), dtype=torch.float64)
        packed[_HEADER * rank : _HEADER * (rank + 1)] = torch.tensor(self._header()).double()
        if not values:
            return packed
        device = next((v.device for v in values if v.device.type != "cpu"), packed.device)
        stacked = torch.stack([value.to(device) for value in values])
        return packed.to(device).index_copy_(0, torch.tensor(indices, device=device), stacked)

    def unpack(self, reduced: Tensor, rank: int, size: int) -> Bundle:
        """The bundle in the sum of all ranks' packed tensors."""
        values = reduced.detach().cpu()
        self._check(values, rank, size)
        at = _HEADER * size
        sums = {name: values[at + number] for number, name in enumerate(sorted(self.sums))}
        at += len(sums)
        metrics = {}
        for name in sorted(self.metrics):
            metric = self.metrics[name]
            found = values[at : at + _entries(metric, size)]
            if metric.reduction in ("min", "max"):
                metrics[name] = Metric(metric.reduction, getattr(found, f"a{metric.reduction}")())
            else:
                count = None if metric.count is None else found[1]
                metrics[name] = Metric(metric.reduction, found[0], count)
            at += len(found)
        return Bundle(sums, metrics)

    def _header(self) -> list[int]:
        """A 48-bit digest of all names, exact in float64, and the numbers of sums and metrics."""
        ways = [(name, self.metrics[name].reduction) for name in sorted(self.metrics)]
        names = json.dumps([sorted(self.sums), ways]).encode()
        digest = int.from_bytes(hashlib.sha256(names).digest()[:6], "big")
        return [digest, len(self.sums), len(self.metrics)]

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


def _entries(metric: Metric, size: int) -> int:
    return size if metric.reduction in ("min", "max") else 1 + (metric.count is not None)


def _padded(length: int) -> int:
    """The next power of two: 64, 128, ..."""
    return max(_LEAST, 1 << (length - 1).bit_length())


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise InputError(
            f"{name!r} has shape {tuple(value.shape)}; expected a scalar. Sum it, or use one name "
            f"per entry."
        )
    return value.detach().double().reshape(())


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, shard: BatchShard, group: Any, window: int | None = None
) -> Tensor:
    """Compute attention within each segment of the whole batch for the slots of `shard`.

    q, k and v are (rows, heads, width / size, dim), the slots of this rank. Keys and values are
    gathered, so their memory does not shrink with more ranks; queries, scores and other
    activations do.

        shard = shard_context(batch, rank, size)
        out = context_attention(q, k, v, shard, group)
    """
    # (rows, heads, width / size, dim) -> (rows, width / size, 2, heads, dim), and the whole width
    own = torch.stack((k, v)).permute(1, 3, 0, 2, 4)
    parts = gather(own, group)
    context = shard.sharding == "context"
    every = join_context(parts, shard.cu_seqlens) if context else join_sequence(parts)
    k, v = every.permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible(shard, window), enable_gqa=q.shape[1] != k.shape[1]
    )


def visible(shard: BatchShard, window: int | None = None) -> Tensor:
    """(rows, 1, width / size, width) bool: which slots of its row each slot attends to."""
    width = shard.width * shard.size
    row = torch.arange(shard.rows, device=shard.device)[:, None] * width
    last = shard.slot_ids - row
    first = shard.cu_seqlens[shard.segment_ids] - row
    if window is not None:
        first = torch.maximum(first, last - (window - 1))
    slot = torch.arange(width, device=shard.device)
    return ((first[..., None] <= slot) & (slot <= last[..., None])).unsqueeze(1)


def gather(x: Tensor, group: Any) -> list[Tensor]:
    """Every rank's `x`, in group order. The backward sums each rank's gradient over ranks."""
    return list(_Gather.apply(x, group))


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group = group
        gathered = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(gathered, x.contiguous(), group=group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every backend supports all-reduce; reduce-scatter would move half as much data.
        every = torch.stack(gradients)
        distributed.all_reduce(every, group=ctx.group)
        return every[distributed.get_rank(ctx.group)], None
