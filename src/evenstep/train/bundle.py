"""Bundle: everything that ranks have to sum at the end of a step, in one tensor.

| per rank: digest, sums, metrics | sums | metrics | zeros up to a power of two |

A sum takes one slot and a mean two. Of a least or greatest each rank writes its own into a slot of
its own, so that summing gathers them. The header of each rank tells whether all packed the same
names: ranks that disagree find out, instead of adding up one's loss and another's count.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenstep.errors import InputError
from evenstep.tensors.metrics import Metric, merge
from evenstep.train.collectives import Collective

_HEADER = 3  # slots per rank
_LEAST = 64  # slots in all; equal lengths on ranks whose names differ let them find out


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Named sums and metrics: of a micro-batch, of a rank's step, or of all ranks'.

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
        """Several micro-batches' as one; a name that only some have counts where it is."""
        bundles = list(bundles)
        found: dict[str, list[Tensor]] = {}
        for bundle in bundles:
            for name, value in bundle.sums.items():
                found.setdefault(name, []).append(value.detach().double())
        sums = {name: torch.stack(values).sum(0) for name, values in found.items()}
        return cls(sums, merge(bundle.metrics for bundle in bundles))

    def reduce(self, collective: Collective) -> Bundle:
        """The same over all ranks, on the host: one all-reduce and one wait for it."""
        packed = self.pack(collective.rank, collective.size)
        return self.unpack(collective.all_reduce_sum(packed), collective.rank, collective.size)

    def pack(self, rank: int, size: int) -> Tensor:
        """The float64 tensor that rank `rank` of `size` brings to the sum."""
        values: list[Tensor] = []
        places: list[int] = []
        at = _HEADER * size
        for name in sorted(self.sums):
            values.append(_scalar(name, self.sums[name]))
            places.append(at)
            at += 1
        for name in sorted(self.metrics):
            metric = self.metrics[name]
            values.append(_scalar(name, metric.total))
            places.append(at + rank if metric.reduction in ("min", "max") else at)
            if metric.count is not None:
                values.append(_scalar(name, metric.count))
                places.append(at + 1)
            at += _slots(metric, size)
        packed = torch.zeros(_padded(at), dtype=torch.float64)
        packed[_HEADER * rank : _HEADER * (rank + 1)] = torch.tensor(self._header()).double()
        if not values:
            return packed
        device = next((v.device for v in values if v.device.type != "cpu"), packed.device)
        stacked = torch.stack([value.to(device) for value in values])
        return packed.to(device).index_copy_(0, torch.tensor(places, device=device), stacked)

    def unpack(self, reduced: Tensor, rank: int, size: int) -> Bundle:
        """What the sum of all ranks' tensors says, by the names of this one."""
        values = reduced.detach().cpu()
        self._check(values, rank, size)
        at = _HEADER * size
        sums = {name: values[at + number] for number, name in enumerate(sorted(self.sums))}
        at += len(sums)
        metrics = {}
        for name in sorted(self.metrics):
            metric = self.metrics[name]
            found = values[at : at + _slots(metric, size)]
            if metric.reduction in ("min", "max"):
                metrics[name] = Metric(metric.reduction, getattr(found, f"a{metric.reduction}")())
            else:
                count = None if metric.count is None else found[1]
                metrics[name] = Metric(metric.reduction, found[0], count)
            at += len(found)
        return Bundle(sums, metrics)

    def _header(self) -> list[int]:
        """A digest of all names, of 48 bits that float64 holds exactly, and how many there are."""
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
            f"{described}, under other names than most ranks ({usual[1]:.0f} sums and "
            f"{usual[2]:.0f} metrics), so the reduced numbers mean nothing. This rank, {rank}, "
            f"packed the sums {sorted(self.sums)} and the metrics {sorted(self.metrics)}. Return "
            f"the same metrics for every batch, with empty ones where there is nothing to measure."
        )


def _slots(metric: Metric, size: int) -> int:
    return size if metric.reduction in ("min", "max") else 1 + (metric.count is not None)


def _padded(length: int) -> int:
    """The next power of two: 64, 128, ..."""
    return max(_LEAST, 1 << (length - 1).bit_length())


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise InputError(
            f"{name!r} has the shape {tuple(value.shape)} but one number is reduced. Sum it up, or "
            f"give its parts names of their own."
        )
    return value.detach().double().reshape(())
