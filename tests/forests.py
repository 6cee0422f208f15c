"""Random samples that begin alike, and micro-batches that share their prefixes, made naively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenstep import MicroBatch
from tests.internals import Segments

VOCABULARY = 11


@dataclass
class Rows:
    """Segments in preorder, while they are made."""

    ids: list[list[int]]
    segments: list[tuple[int, int, int, int]]  # sample, start, length, parent

    def add(self, samples: list[int], start: int, parent: int) -> None:
        """The segments of sorted samples, which share their tokens up to `start`."""
        if len(samples) == 1:
            self.segments.append((samples[0], start, len(self.ids[samples[0]]) - start, parent))
            return
        shared = common([self.ids[sample] for sample in samples])
        if shared - 1 > start:  # the last shared token predicts different ones
            self.segments.append((samples[0], start, shared - 1 - start, parent))
            start, parent = shared - 1, len(self.segments) - 1
        parts: dict[Any, list[int]] = {}
        for sample in samples:
            tokens = self.ids[sample]
            after = tokens[shared] if len(tokens) > shared else f"the end of {sample}"
            parts.setdefault(after, []).append(sample)
        for part in parts.values():
            self.add(part, start, parent)


def common(rows: list[list[int]]) -> int:
    """The number of tokens at which all rows begin alike."""
    columns = zip(*rows, strict=False)
    return next((at for at, each in enumerate(columns) if len(set(each)) > 1), min(map(len, rows)))


def micro_of(
    ids: list[list[int]], samples: Sequence[int], width: int | None = None, alignment: int = 1
) -> MicroBatch:
    """One row of these samples, in which they share their prefixes."""
    rows = Rows(ids, [])
    rows.add(sorted(samples, key=lambda sample: ids[sample]), 0, -1)
    sample, start, length, parent = np.array(rows.segments, np.int64).T
    slots = int((-(-length // alignment) * alignment).sum())
    return MicroBatch(
        Segments(sample, start, length, parent),
        np.array([0, len(sample)]),
        slots if width is None else max(width, slots),
        np.array([len(ids[each]) for each in sample]),
        alignment,
    )


def forest(rng: np.random.Generator, count: int = 8, longest: int = 7) -> list[list[int]]:
    """Token ids: some continue a beginning of others, some are the same, some are new."""
    ids: list[list[int]] = []
    for _ in range(count):
        before: list[int] = []
        if ids and rng.random() < 0.8:
            before = ids[int(rng.integers(len(ids)))]
            before = before[: int(rng.integers(1, len(before) + 1))]
        least = 0 if before else 1
        added = rng.integers(0, VOCABULARY, int(rng.integers(least, longest)) or least).tolist()
        ids.append(before + added)
    return ids


def divided(rng: np.random.Generator, ids: list[list[int]], parts: int = 2) -> list[MicroBatch]:
    """The samples in a few micro-batches, each with its own copy of a prefix."""
    part = rng.integers(0, parts, len(ids))
    chosen = [np.flatnonzero(part == each).tolist() for each in range(parts)]
    return [micro_of(ids, samples) for samples in chosen if samples]


def depth(micro: MicroBatch) -> int:
    """The longest path of segments."""
    parent = micro.segments.parent
    if parent is None:
        return 1
    depths: list[int] = []
    for above in parent.tolist():
        depths.append(1 if above < 0 else depths[above] + 1)
    return max(depths)
