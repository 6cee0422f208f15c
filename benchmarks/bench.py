"""What every section gets: the corpora, how long it may take, and where to tell progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from evenstep.core.ragged import IntArray

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One run of the benchmarks."""

    corpora: dict[str, IntArray]
    quick: bool
    say: Callable[[str], None]
    """Shows a line of progress; called between measurements only."""

    def pick(self, full: T, quick: T) -> T:
        """A size for the full run and one for the quick run."""
        return quick if self.quick else full
