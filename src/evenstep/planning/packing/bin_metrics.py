"""How well bins are filled, by NeMo-RL's names."""

from __future__ import annotations

from evenstep.core.ragged import IntArray, Ragged, divided_up


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
