"""Producers of a feed that fail, end or stop without closing it."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from evenstep.data import Feed
from evenstep.errors import ConfigError, InputError, SampleError
from tests.internals import feed_module, producers_module
from tests.train.on_ranks import feeding
from tests.train.running import samples_of
from tests.train.steps import LIMIT
from tests.train.test_fed import recipe, runner
from tests.train.test_lazy import prefetching


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_WAKE_UP", 0.01)
    monkeypatch.setattr(producers_module, "_GRACE", 0.05)


class RolloutError(Exception):
    """An error of a producer."""


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_in_a_with_block_reaches_the_runner_and_stops_other_producers(
    prefetch: int,
) -> None:
    feed, sample = Feed(recipe()), samples_of([LIMIT]).samples[0]
    error = RolloutError("no more rollouts")

    def fill() -> None:
        with contextlib.suppress(RolloutError), feed:
            feed.put(sample)
            raise error

    with feeding(fill), pytest.raises(RolloutError, match="no more rollouts") as caught:
        runner(prefetch=prefetch).run_fed(feed, number=3)
    assert caught.value is error
    assert any("of step 3 on rank 0" in note for note in error.__notes__)
    fresh = Feed(recipe())
    fresh.fail(error)
    with pytest.raises(InputError, match=r"has failed \(RolloutError\('no more rollouts'\)\)"):
        fresh.put(sample)
    assert not prefetching()


def test_a_with_block_closes_the_feed() -> None:
    with Feed(recipe()) as feed:
        feed.put(samples_of([LIMIT]).samples[0])
    assert runner().run_fed(feed).tokens == LIMIT


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.usefixtures("impatient")
def test_threads_that_end_without_closing_the_feed_are_an_error(prefetch: int) -> None:
    feed, sample = Feed(recipe()), samples_of([LIMIT]).samples[0]
    threads = [threading.Thread(target=feed.put, args=(sample,)) for _ in range(2)]
    feed.watch(*threads)  # before they start
    for thread in threads:
        thread.start()
    with pytest.raises(SampleError, match="all 2 producers of the feed have ended, but it was not"):
        runner(prefetch=prefetch).run_fed(feed)
    with pytest.raises(InputError, match="takes no more"):
        feed.put(sample)


@pytest.mark.usefixtures("impatient")
def test_one_thread_may_end_while_another_produces() -> None:
    feed, samples = Feed(recipe()), samples_of([LIMIT] * 3).samples
    first = threading.Thread(target=feed.put, args=(samples[0],))
    first.start()
    first.join()

    def rest() -> None:
        time.sleep(0.2)
        with feed:
            feed.put(samples[1])

    second = threading.Thread(target=rest)
    feed.watch(first, second)
    second.start()
    assert runner().run_fed(feed).tokens == 2 * LIMIT
    second.join()


@pytest.mark.usefixtures("impatient")
def test_a_process_that_is_killed_is_an_error_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=(600,), name="rollouts")
    process.start()
    feed = Feed(recipe())
    feed.watch(process, threading.Thread())  # the thread was never started
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    with pytest.raises(SampleError, match="the process 'rollouts' ended with exit code -9 before"):
        runner().run_fed(feed)
    process.join()
    killer.join()


@pytest.mark.usefixtures("impatient")
def test_the_error_of_a_future_is_the_cause() -> None:
    with ThreadPoolExecutor(1) as pool:
        feed = Feed(recipe())
        future = pool.submit(feed.put, {"input_ids": [1] * 99})
        feed.watch(future)
        with pytest.raises(SampleError, match="a future that fills the feed failed") as caught:
            runner().run_fed(feed)
    assert isinstance(caught.value.__cause__, SampleError)
    assert "sample 0 has 99 tokens" in str(caught.value.__cause__)
    cancelled: Future[None] = Future()
    assert cancelled.cancel()
    feed = Feed(recipe())
    feed.watch(cancelled)
    with pytest.raises(SampleError, match="was cancelled before the feed was closed"):
        next(iter(feed))


@pytest.mark.usefixtures("impatient")
def test_a_feed_without_new_samples_times_out() -> None:
    feed, samples = Feed(recipe(), timeout=0.2), samples_of([LIMIT] * 3).samples

    def slowly() -> None:
        with contextlib.suppress(InputError):
            for sample in samples:
                feed.put(sample)
                time.sleep(0.04)

    with feeding(slowly), pytest.raises(SampleError, match=r"no sample for 0.2 seconds"):
        runner().run_fed(feed)
    with pytest.raises(ConfigError, match="timeout must be above 0 seconds, got 0"):
        Feed(recipe(), timeout=0)
    with pytest.raises(ConfigError, match="expected a thread, a process or a future"):
        feed.watch(slowly)
