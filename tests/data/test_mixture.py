"""The mixture of data that a pooled stream trains on does not depend on ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import pytest

from evenstep import Packed, Padded, PooledStream, Recipe, Step, Topology, World
from evenstep.data import InMemory, Iterated, Pool

TOKENS = np.zeros(1000, np.int32)
CHAT, DOCUMENT = TOKENS[:40], TOKENS[:700]  # a kind is known by its length
SHAPES = [(ranks, workers) for ranks in (1, 2, 8) for workers in (1, 2, 4)]


def interleaved(start: int = 0) -> Iterator[Any]:
    """Chats and documents in turn, without an end."""
    while True:
        yield (CHAT, DOCUMENT)[start % 2]
        start += 1


def run(source: Any, ranks: int, workers: int, **given: Any) -> list[list[Step]]:
    """The steps of every rank; the workers of a rank take turns, as with a loader."""
    recipe = Recipe(
        layout=given.pop("layout", Packed(max_tokens=2000)), topology=Topology(dp=ranks)
    )
    steps, most = [], given.pop("most", None)
    for rank in range(ranks):
        stream = PooledStream(source, recipe, world=World(rank, ranks), **given)
        walks = [stream.walk(worker, workers) for worker in range(workers)]
        in_turn = (step for group in zip_longest(*walks) for step in group if step is not None)
        steps.append(list(islice(in_turn, most)))
    return steps


def lengths_of(steps: Any) -> list[int]:
    return [n for step in steps for micro in step.micro_batches for n in micro.segments.length]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 1), (2, 4), (8, 1)])
def test_every_rank_sees_chats_and_documents_equally_often(ranks: int, workers: int) -> None:
    source = Iterated(interleaved, fingerprint="endless")
    for mine in run(source, ranks, workers, most=200, pool=Pool(samples=8)):
        chats = np.mean(np.array(lengths_of(mine)) == len(CHAT))
        assert abs(chats / 0.5 - 1) < 0.1  # the pools keep some


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), SHAPES)
def test_proportions_hold_over_many_steps(ranks: int, workers: int) -> None:
    source = Iterated(interleaved, fingerprint="endless")
    steps = run(source, ranks, workers, most=10_000)
    chats = np.mean(np.array(lengths_of(chain.from_iterable(steps))) == len(CHAT))
    assert abs(chats / 0.5 - 1) < 0.01


KINDS = [60, 400, 130, 700, 60, 60]  # lengths, with a period of six
LAYOUTS = {"packed": Packed(max_tokens=2000), "padded": Padded(max_tokens=2000)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2), (8, 4)])
def test_the_shares_in_each_quarter_are_those_of_the_epoch(
    ranks: int, workers: int, shuffle: bool, layout: str
) -> None:
    lengths = KINDS * (5000 if shuffle else 2000)  # enough that chance matters little
    source = InMemory([TOKENS[:n] for n in lengths])
    given: dict[str, Any] = {"layout": LAYOUTS[layout], "pool": Pool(samples=8)}
    steps = run(source, ranks, workers, shuffle=shuffle, **given)
    assert sorted(lengths_of(chain.from_iterable(steps))) == sorted(lengths)
    last = max(map(len, steps))
    for quarter in range(4):
        begin, end = quarter * last // 4, (quarter + 1) * last // 4
        here = lengths_of(chain.from_iterable(mine[begin:end] for mine in steps))
        for kind in set(KINDS):
            share = here.count(kind) / len(here)
            assert abs(share / (KINDS.count(kind) / len(KINDS)) - 1) < 0.1, (quarter, kind)
    if not shuffle:
        empty = 1 - sum(map(len, steps)) / (last * ranks)
        assert empty < 0.05
