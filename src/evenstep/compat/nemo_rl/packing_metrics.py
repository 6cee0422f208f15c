"""PackingMetrics: NeMo-RL's metrics of bins, for one packing and over many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from evenstep.core.ragged import IntArray, Ragged, divided_up


class PackingMetrics:
    """Metrics of all packings that `update` was called with.

    >>> metrics = PackingMetrics()
    >>> metrics.update([60, 50, 40], [[0, 2], [1]], 100)["average_utilization"]
    0.75
    >>> metrics.get_aggregated_stats()["average_bin_count"]
    2.0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all packings."""
        self._packings: list[dict[str, float]] = []

    def update(
        self,
        sequence_lengths: Sequence[int],
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
    ) -> dict[str, float]:
        """Add a packing; return its metrics."""
        stats = self.calculate_stats_only(sequence_lengths, bins, bin_capacity)
        self._packings.append(stats)
        return stats

    def calculate_stats_only(
        self,
        sequence_lengths: Sequence[int],
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
    ) -> dict[str, float]:
        """The metrics of a packing that is not added."""
        return bin_metrics(np.array(sequence_lengths, np.int64), Ragged.of(bins), bin_capacity)

    def get_aggregated_stats(self) -> dict[str, float]:
        """Metrics over all packings; empty if there are none. Averages are over bins."""
        if not self._packings:
            return {}
        total = {name: sum(stats[name] for stats in self._packings) for name in _SUMS}
        utilization = [stats["average_utilization"] for stats in self._packings]
        waste = [stats["waste_ratio"] for stats in self._packings]
        room, bins = total["total_bin_capacity"] or 1, total["num_bins"] or 1
        least = math.ceil(total["total_sequence_length"] * bins / room)
        return {
            "total_sequences": total["num_sequences"],
            "total_bins": total["num_bins"],
            "average_utilization": total["total_sequence_length"] / room,
            "min_utilization": min(utilization),
            "max_utilization": max(utilization),
            "average_waste_ratio": total["total_waste"] / room,
            "min_waste_ratio": min(waste),
            "max_waste_ratio": max(waste),
            "average_bin_count": total["num_bins"] / len(self._packings),
            "bin_efficiency": least / bins,
        }

    def print_aggregated_stats(self) -> None:
        """Print the aggregated metrics, one per line."""
        for name, value in self.get_aggregated_stats().items():
            print(f"{name}: {value:.4g}")


_SUMS = (
    "num_sequences",
    "num_bins",
    "total_sequence_length",
    "total_bin_capacity",
    "total_waste",
)


def bin_metrics(lengths: IntArray, bins: Ragged, capacity: int) -> dict[str, float]:
    """Counts, utilization, waste and balance of one packing; all 0 without bins.

    `bin_balance` is 1 minus the sample standard deviation of the utilization over its mean, 1 for
    one bin. `bin_efficiency` is the fewest bins that the total length needs over those used.

    >>> import numpy as np
    >>> bins = Ragged.of([[0, 2], [1]])
    >>> metrics = bin_metrics(np.array([5, 8, 3]), bins, 10)
    >>> metrics["average_utilization"], metrics["total_waste"], metrics["bin_efficiency"]
    (0.8, 4, 1.0)
    """
    count, total = len(bins), int(lengths.sum())
    room, least = count * capacity, divided_up(total, capacity)
    use = bins.sums(lengths) / capacity
    spread = float(use.std(ddof=1)) if count > 1 else 0.0
    used = total / room if room else 0.0
    return {
        "num_sequences": len(lengths) if count else 0,
        "num_bins": count,
        "total_sequence_length": total,
        "total_bin_capacity": room,
        "total_waste": room - total,
        "average_utilization": used,
        "waste_ratio": 1 - used if room else 0.0,
        "bin_balance": 1 - spread / used if used else 0.0,
        "theoretical_min_bins": least,
        "bin_efficiency": least / count if count else 0.0,
    }
