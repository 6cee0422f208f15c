"""Steps that are filled while they run."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed

from evenstep import Packed, Padded, Recipe, Steps, Topology
from evenstep.data import Feed
from evenstep.errors import ConfigError, InputError, RankError, SampleError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Runner, Watch
from tests.examples import examples
from tests.internals import Layout, prefetch_module
from tests.train.on_ranks import feeding, run_fed
from tests.train.running import Plan, expected, samples_of, steps_of, worlds
from tests.train.steps import COLLATOR, LIMIT, Gradient, Work, distance, gradient_of, model_of
from tests.train.test_lazy import TIMEOUT, prefetching

GIANT = Plan("batches", Packed(max_tokens=999))


@examples(25)
@given(
    work=worlds(),
    size=st.integers(1, 3),
    dealt=st.lists(st.integers(0, 2), min_size=10, max_size=10),
    prefetch=st.integers(0, 2),
    lock_step=st.sampled_from([None, True, False]),
)
def test_ranks_that_are_fed_unequal_numbers_have_the_exact_gradient(
    work: Work, size: int, dealt: list[int], prefetch: int, lock_step: bool | None
) -> None:
    shares: list[list[int]] = [[] for _ in range(size)]
    for number in range(len(work.samples)):
        shares[dealt[number] % size].append(number)
    model = model_of()
    loss, gradient = expected("token mean", model, work, steps_of(GIANT, work))

    def rank(ranks: Collective) -> tuple[Any, Gradient]:
        own = copy.deepcopy(model)
        result = run_fed(
            own, ranks, work, shares[ranks.rank], prefetch=prefetch, lock_step=lock_step
        )
        return result, gradient_of(own)

    ran = run_ranks(size, rank)
    if lock_step:
        assert len({result.num_micro_batches for result, _ in ran}) == 1
    for share, (result, found) in zip(shares, ran, strict=True):
        assert distance(found, gradient) < 1e-12
        assert result.loss == pytest.approx(loss, rel=1e-12, abs=1e-15)
        assert len(result.ages) == len(share)


def recipe(layout: Layout | None = None) -> Recipe:
    return Recipe(layout=layout or Packed(max_tokens=LIMIT))


def runner(**options: Any) -> Runner:
    return Runner(model=model_of(), loss=cross_entropy(), collate=COLLATOR, **options)


def test_a_step_runs_what_is_there_while_more_is_made() -> None:
    work = samples_of([LIMIT] * 4, masked=0.0)
    feed, forwards = Feed(recipe()), threading.Semaphore(0)

    def forward(model: Any, batch: Any) -> Tensor:
        forwards.release()
        return model(batch)

    def fill() -> None:
        for sample in work.samples:
            feed.put(sample)
            # No more samples are made before this one has run.
            assert forwards.acquire(timeout=TIMEOUT)
        feed.close()

    with feeding(fill):
        result = runner(forward=forward).run_fed(feed, number=7)
    assert (result.num_micro_batches, result.tokens) == (4, 4 * LIMIT)


def test_a_rank_runs_everything_while_another_has_no_sample_yet() -> None:
    work = samples_of([LIMIT] * 5, masked=0.0)
    model, done = model_of(), threading.Event()
    _, gradient = expected("token mean", model, work, steps_of(GIANT, work))

    def rank(ranks: Collective) -> Gradient:
        own, feed, ran = copy.deepcopy(model), Feed(recipe()), list[int]()

        def forward(model: Any, batch: Any) -> Tensor:
            outputs = model(batch)
            ran.append(ranks.rank)
            if ran == [0] * 4:
                done.set()
            return outputs

        def fill() -> None:
            with feed:
                if ranks.rank == 1 and not done.wait(TIMEOUT):
                    raise TimeoutError("rank 0 waits for rank 1")
                for sample in work.samples[4:] if ranks.rank else work.samples[:4]:
                    feed.put(sample)

        with feeding(fill):
            Runner(
                model=own, loss=cross_entropy(), collate=COLLATOR, collective=ranks,
                forward=forward,
            ).run_fed(feed)  # fmt: skip
        return gradient_of(own)

    for found in run_ranks(2, rank):
        assert distance(found, gradient) < 1e-12


def test_ages_are_from_the_making_of_a_sample_to_its_forward() -> None:
    work = samples_of([5, 3, 4])
    feed = Feed(recipe())
    now = time.time()
    for sample, age in zip(work.samples, (50.0, 30.0, 10.0), strict=True):
        feed.put(sample, born=now - age)
    feed.close()
    result = runner().run_fed(feed)
    for found, age in zip(sorted(result.ages), (10.0, 30.0, 50.0), strict=True):
        assert age <= found < age + TIMEOUT
    assert 30.0 <= result.to_dict()["age"] < 30.0 + TIMEOUT


def test_a_feed_that_is_closed_empty_is_an_empty_step() -> None:
    feed = Feed(recipe())
    feed.close()
    result = runner().run_fed(feed)
    assert result.empty
    assert (result.loss, result.tokens, result.ages) == (0.0, 0, ())


def test_a_sample_that_cannot_be_made_stops_the_step() -> None:
    feed = Feed(recipe())
    feed.put(samples_of([LIMIT]).samples[0])
    feed.fail(RuntimeError("no more rollouts"))
    with pytest.raises(RuntimeError, match="no more rollouts"):
        runner().run_fed(feed)
    assert not prefetching()


def test_a_step_that_fails_does_not_wait_for_its_feed() -> None:
    feed = Feed(recipe())
    sample = samples_of([LIMIT]).samples[0]
    feed.put(sample)

    def forward(model: Any, batch: Any) -> Tensor:
        raise ValueError("what is this")

    with pytest.raises(ValueError, match="what is this"):
        runner(forward=forward).run_fed(feed)  # never closed
    assert not prefetching()
    with pytest.raises(InputError, match="the step of this feed has failed"):
        feed.put(sample)


def test_feeds_refuse_what_they_cannot_keep() -> None:
    feed = Feed(recipe())
    with pytest.raises(SampleError, match="sample 0 has 9 tokens but a micro-batch holds 8"):
        feed.put({"input_ids": [1] * 9})
    with pytest.raises(SampleError, match="sample 0 has length 0"):
        feed.put({"input_ids": []})
    feed.close()
    with pytest.raises(InputError, match="the feed is closed"):
        feed.put({"input_ids": [1]})
    with pytest.raises(ConfigError, match="unknown while a step is being fed"):
        runner(mode="per_micro_batch").run_fed(feed)
    with pytest.raises(ConfigError, match="a feed yields each sample once"):
        runner(on_memory="split").run_fed(feed)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Packed(max_tokens=LIMIT), [0, 0, 1, 1]),
        (Padded(max_tokens=LIMIT), [0, 0, 1, 1]),
        (Packed(rows=2, pad_to=LIMIT), [0, 0, 0, 0]),
        (Packed(samples=2), [0, 1, 1, 2]),
        (Packed(samples=2, max_tokens=LIMIT), [0, 1, 1, 2]),
    ],
    ids=repr,
)
def test_a_micro_batch_comes_out_when_it_can_be_full(layout: Layout, counts: list[int]) -> None:
    """After each sample of 3 tokens, the number of micro-batches available without waiting."""
    feed = Feed(Recipe(layout=layout, steps=Steps()))
    fed, taken = iter(feed), 0
    for count in counts:
        feed.put({"input_ids": [1, 2, 3]})
        while feed._ready():
            next(fed)
            taken += 1
        assert taken == count


def test_split_samples_of_a_feed_count_once() -> None:
    work = samples_of([2 * LIMIT + 3, 5], masked=0.0)
    feed = Feed(Recipe(layout=Packed(max_tokens=LIMIT), overflow="split"))
    for sample in work.samples:
        feed.put(sample)
    feed.close()
    held = list(feed)
    assert sum(len(fed.micro.segments) for fed in held) == 4
    from evenstep.train import SequenceMean

    result = runner(normalization=SequenceMean()).run_fed(held)
    assert result.numbers is not None
    assert result.numbers.denominators == {"sequences": 2.0}


def test_empty_micro_batches_can_be_sharded_by_context_parallel_ranks() -> None:
    feed = Feed(Recipe(layout=Packed(max_tokens=16), topology=Topology(cp=2)))
    assert feed.empty_micro_batch.is_empty
    assert feed.empty_micro_batch.slots == 4


@pytest.mark.parametrize("prefetch", [0, 1])
def test_waiting_for_samples_can_be_interrupted(
    prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_module, "_JOIN_TIMEOUT", 600.0)  # hangs if it is reached
    store = distributed.HashStore()
    with pytest.raises(KeyError), Watch(rank=1, size=2, store=store, timeout=30):
        raise KeyError("odd \ud800")
    feed = Feed(recipe())
    with (
        pytest.raises(RankError, match=r"rank 1 failed \(KeyError: 'odd .*ud800'\)"),
        Watch(rank=0, size=2, store=store, timeout=30, grace=600.0),
    ):
        runner(prefetch=prefetch).run_fed(feed)
    assert not prefetching()
    with pytest.raises(InputError, match="the step of this feed has failed"):
        feed.put({"input_ids": [1]})


# Ranks that share a batch ---------------------------------------------------------------------


@examples(50)
@given(
    lengths=st.lists(st.integers(1, 2 * LIMIT), min_size=1, max_size=15),
    topology=st.sampled_from(
        [Topology(cp=2), Topology(tp=2), Topology(tp=2, sequence_parallel=True)]
    ),
    pads=st.booleans(),
    reads=st.lists(st.integers(0, 3), min_size=15, max_size=15),
)
def test_ranks_that_share_a_batch_form_the_same_micro_batches_whenever_they_take_them(
    lengths: list[int], topology: Topology, pads: bool, reads: list[int]
) -> None:
    layout: Layout = Padded(max_tokens=4 * LIMIT) if pads else Packed(max_tokens=2 * LIMIT)
    found = []
    for counts in (reads, [0] * 15):
        feed = Feed(Recipe(layout=layout, topology=topology, overflow="split"))
        fed, taken = iter(feed), list[list[int]]()
        for length, count in zip(lengths, counts, strict=False):
            feed.put({"input_ids": [1] * length})
            while count and feed._ready():
                taken.append(next(fed).micro.segments.sample.tolist())
                count -= 1
        feed.close()
        taken += [each.micro.segments.sample.tolist() for each in fed]
        found.append(taken)
    assert found[0] == found[1]
    assert sorted({number for each in found[0] for number in each}) == [*range(len(lengths))]
