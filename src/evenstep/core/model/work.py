"""Work: what a model computes per token and per pair of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Multiply-adds of one forward pass.

    weights   per token, in matrices: the number of weights that a token passes through
    pairs     per squared length, where tokens attend to all others or to all before them
    nearby    per token, where they attend within a window, or update a state

    >>> Work(weights=3) + Work(weights=4, pairs=1)
    Work(weights=7, pairs=1, nearby=0)
    """

    weights: float = 0
    pairs: float = 0
    nearby: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            weights=self.weights + other.weights,
            pairs=self.pairs + other.pairs,
            nearby=self.nearby + other.nearby,
        )
