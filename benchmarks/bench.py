"""The input of every section: corpora, full or quick mode, progress output."""

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
    """Show a line of progress; called only between measurements."""

    def pick(self, full: T, quick: T) -> T:
        """The value for a full run, or the one for a quick run."""
        return quick if self.quick else full
