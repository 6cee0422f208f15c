"""Bundle: everything that ranks sum at the end of a step, in one tensor.

| header of each rank: digest, sums, metrics | sums | metrics | zeros up to a power of two |

A sum takes one entry and a mean two. A min or max takes one entry per rank: each rank writes its
own, so the sum gathers them. The headers show whether all ranks packed the same names; if not,
`reduce` raises.
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
from evenstep.tensors.losses import Metric, merge
from evenstep.train.collectives import Collective

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
