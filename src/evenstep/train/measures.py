"""Measures: what a rank counts while it runs the micro-batches of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.core.cost import Cost
from evenstep.tensors.losses import Metric
from evenstep.train.result import BUSY, BUSY_MOST, FLOPS, LABELS, PREDICTED, SLOTS, TOKENS
from evenstep.train.work import Ready


class Measures:
    """Tokens, slots, labels and FLOPs of a rank's micro-batches."""

    def __init__(self, cost: Cost | None) -> None:
        self.tokens = self.slots = self.labels = self.predicted = 0
        self._cost, self._flops = cost, 0.0
        self._share = 1.0  # 1 / number of context-parallel ranks, which share a micro-batch

    def add(self, ready: Ready, sharers: int) -> None:
        """A micro-batch that ran, shared by `sharers` context-parallel ranks."""
        self._share = 1 / sharers
        self.tokens += int(ready.lengths.sum())
        self.slots += ready.batch.rows * ready.batch.width
        self.labels += ready.labels
        self.predicted += ready.predicted
        if self._cost is not None:
            self._flops += float(self._cost.of_lengths(ready.lengths).sum())

    def metrics(self, busy: float) -> dict[str, Metric]:
        """To be reduced over ranks with the losses; `busy` are this rank's busy seconds."""
        seconds = torch.tensor(busy, dtype=torch.float64)
        metrics = {
            BUSY: Metric.mean(seconds, 1),
            BUSY_MOST: Metric.max(seconds),
            TOKENS: Metric.sum(self._mine(self.tokens)),
            LABELS: Metric.sum(self._mine(self.labels)),
            PREDICTED: Metric.sum(self._mine(self.predicted)),
            SLOTS: Metric.sum(self._mine(self.slots)),
        }
        if self._cost is not None:
            # A mean over ranks: MFU compares with the peak of one rank.
            metrics[FLOPS] = Metric.mean(self._mine(self._flops), 1)
        return metrics

    def _mine(self, count: float) -> Tensor:
        return torch.tensor(count * self._share, dtype=torch.float64)
