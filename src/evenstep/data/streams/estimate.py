"""Estimate: how many steps a stream has, and whether that is exact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number of steps. Not `exact` where lengths that nobody has read yet decide it; `len` of
    a stream is then near the truth and no more.

    >>> str(Estimate(120, exact=False))
    'about 120'
    """

    steps: int
    exact: bool

    def __str__(self) -> str:
        return str(self.steps) if self.exact else f"about {self.steps}"
