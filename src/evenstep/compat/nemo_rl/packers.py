"""NeMo-RL's packers: classes over `evenstep.pack`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar

from evenstep.compat.nemo_rl.packing_metrics import PackingMetrics
from evenstep.core.text import seed_number, short_repr, truth_value, whole_number
from evenstep.errors import ConfigError
from evenstep.planning.packers import pack


class PackingAlgorithm(Enum):
    """The names of the packers.

    >>> PackingAlgorithm("concatenative")
    <PackingAlgorithm.CONCATENATIVE: 'concatenative'>
    """

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


class SequencePacker:
    """Packs sequences into bins of `bin_capacity` tokens.

    With `min_bin_count` and `bin_count_multiple`, sequences are spread evenly over the bins that
    this requires; NeMo-RL moves single sequences into bins of their own.

        ConcatenativePacker(bin_capacity=5).pack([4, 1, 3])  # [[0, 1], [2]]
    """

    algorithm: ClassVar[PackingAlgorithm]

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.bin_capacity = whole_number("bin_capacity", bin_capacity)
        self.collect_metrics = truth_value("collect_metrics", collect_metrics)
        if min_bin_count is not None:
            whole_number("min_bin_count", min_bin_count, least=0)
        if bin_count_multiple is not None:
            whole_number("bin_count_multiple", bin_count_multiple)
        self.min_bin_count, self.bin_count_multiple = min_bin_count, bin_count_multiple
        self.seed = seed_number(seed)
        self.metrics = PackingMetrics() if collect_metrics else None

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """The sequences of each bin."""
        bins = pack(
            sequence_lengths,
            self.bin_capacity,
            self.algorithm.value,
            seed=self.seed,
            min_bin_count=self.min_bin_count or 0,
            bin_count_multiple=self.bin_count_multiple or 1,
        ).tolist()
        if self.metrics is not None:
            self.metrics.update(sequence_lengths, bins, self.bin_capacity)
        return bins

    def compute_metrics(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """The metrics of these bins. They are not added to the aggregated ones."""
        return PackingMetrics().calculate_stats_only(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> dict[str, float]:
        """The metrics of all calls of `pack`; empty without `collect_metrics`."""
        return {} if self.metrics is None else self.metrics.get_aggregated_stats()

    def reset_metrics(self) -> None:
        """Start the aggregated metrics afresh."""
        if self.metrics is not None:
            self.metrics.reset()

    def print_metrics(self) -> None:
        """Print the aggregated metrics."""
        if self.metrics is None:
            print("No metrics: create the packer with collect_metrics=True.")
        else:
            self.metrics.print_aggregated_stats()


class ConcatenativePacker(SequencePacker):
    """A new bin whenever the next sequence does not fit.

    >>> ConcatenativePacker(8).pack([4, 1, 3, 2, 1, 3, 4, 5])
    [[0, 1, 2], [3, 4, 5], [6], [7]]
    """

    algorithm = PackingAlgorithm.CONCATENATIVE


class FirstFitDecreasingPacker(SequencePacker):
    """Longest first, each into the first bin with room.

    >>> FirstFitDecreasingPacker(100).pack([30, 30, 30, 30, 30])
    [[4, 3, 2], [1, 0]]
    """

    algorithm = PackingAlgorithm.FIRST_FIT_DECREASING


class FirstFitShufflePacker(SequencePacker):
    """In an order that depends on `seed` alone, each into the first bin with room.

    >>> len(FirstFitShufflePacker(100, seed=1).pack([50, 50, 50, 50]))
    2
    """

    algorithm = PackingAlgorithm.FIRST_FIT_SHUFFLE


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Johnson and Garey's five phases: large sequences first, then what fits beside them.

    >>> ModifiedFirstFitDecreasingPacker(100).pack([55, 45, 60, 40])
    [[2, 3], [0, 1]]
    """

    algorithm = PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING


_PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    packer.algorithm: packer
    for packer in (
        ConcatenativePacker,
        FirstFitDecreasingPacker,
        FirstFitShufflePacker,
        ModifiedFirstFitDecreasingPacker,
    )
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    seed: int = 0,
) -> SequencePacker:
    """The packer of this name, in any case.

    >>> get_packer("First_Fit_Decreasing", 100).pack([46, 24, 55, 88, 11, 14, 73, 17])
    [[3, 4], [6, 1], [2, 7, 5], [0]]
    """
    return _PACKERS[algorithm_of(algorithm)](
        bin_capacity, collect_metrics, min_bin_count, bin_count_multiple, seed=seed
    )


def algorithm_of(name: object) -> PackingAlgorithm:
    """The algorithm of this name, or raise."""
    if isinstance(name, PackingAlgorithm):
        return name
    known = {algorithm.value: algorithm for algorithm in PackingAlgorithm}
    found = known.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"unknown packing algorithm {short_repr(name)}; expected one of: {', '.join(known)}."
        )
    return found
