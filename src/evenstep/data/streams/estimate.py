"""Estimate: the number of steps of a stream, and whether it is exact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number of steps. Not `exact` if it depends on lengths that have not been read.

    >>> str(Estimate(120, exact=False))
    'about 120'
    """

    steps: int
    exact: bool

    def __str__(self) -> str:
        return str(self.steps) if self.exact else f"about {self.steps}"
