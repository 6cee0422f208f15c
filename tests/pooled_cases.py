"""Random pooled runs that stop anywhere and continue on other ranks, workers and settings."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from evenstep import (
    Cost,
    Cursor,
    Limits,
    Packed,
    Padded,
    PooledStream,
    Recipe,
    Step,
    Steps,
    Topology,
    World,
)
from evenstep.data import Pool, merge_cursors
from evenstep.errors import ConfigError, InputError, SampleError
from evenstep.integrations.dataloader import StreamLoader
from tests.internals import Layout, OverflowPolicy, item_and_part, sample_number
from tests.rank_threads import RankThreads
from tests.source_cases import MEASURED, Items, check_draws, source_of

Token: TypeAlias = tuple[int, int, int]
"""(sample id, position, epoch that the sample was drawn for, or -1 if it is not noted)"""
POOLED = ("list", "memory", "dataset", "mapped", "jsonl", "tokens", "sequential", "sequential")
KNOWN = ("memory", *(f"measured {kind}" for kind in MEASURED))
"""Sources that know their lengths, if each item is one sample."""
CHANGES = ("budget", "overflow", "pool", "steps")


@dataclass(frozen=True, slots=True)
class PooledStage:
    """Part of a run: `steps` on each of `ranks` ranks (None: all), with these settings."""

    ranks: int
    workers: int
    steps: int | None
    recipe: Recipe
    pool: Pool


@dataclass(frozen=True, slots=True)
class PooledCase:
    """An epoch of a pooled stream, in stages.

    items      the lengths of each item's samples, or None if it cannot be read
    endless    all stages but the last go on with further epochs
    in_loader  run by a `StreamLoader` on every rank
    """

    items: Items
    kind: str
    shuffle: bool
    seed: int
    epoch: int
    stages: tuple[PooledStage, ...]
    endless: bool = False
    in_loader: bool = False

    def check(self) -> bool:
        """Run all stages; every token of each epoch that was begun must run exactly once."""
        seen, epochs, state = Counter[Token](), 1, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of skipped and lost samples
                for number, stage in enumerate(self.stages):
                    done, after = self._run(stage, state)
                    if number == 1:  # the first that resumes
                        assert (done, after) == self._run(stage, state), "two different orders"
                    seen.update(done)
                    state = after
                    if stage.steps is not None:
                        epochs = 1 + _last_epoch(after) - self.epoch
        except (ConfigError, SampleError):
            if self._refused():
                return False
            raise
        except InputError:  # every sample was skipped
            assert not self._expected()
            return False
        noted = any(epoch >= 0 for _, _, epoch in seen)
        numbers = range(self.epoch, self.epoch + epochs)
        expected = Counter(
            (*token, epoch if noted else -1) for token in self._expected() for epoch in numbers
        )
        lost, repeated = expected - seen, seen - expected
        assert not lost, f"lost {sorted(lost)[:5]}"
        assert not repeated, f"repeated {sorted(repeated)[:5]}"
        return True

    def _refused(self) -> bool:
        """Whether an uninterrupted run with the settings of one of the stages is an error, too."""
        for stage in self.stages:
            try:
                self._run(replace(stage, steps=None), None)
            except (ConfigError, SampleError):
                return True
        return False

    def _expected(self) -> Counter[tuple[int, int]]:
        """(sample id, position) of every token of an epoch."""
        recipe = self.stages[0].recipe  # all cut in the same way, or all keep every token
        policy = OverflowPolicy(recipe.longest_segment, recipe.overflow)
        return Counter(
            (sample_number(item, part), token)
            for item, lengths in enumerate(self.items)
            for part, length in enumerate(lengths or ())
            for start, size, _ in policy.segments(length) or ()
            for token in range(start, start + size)
        )

    def _run(self, stage: PooledStage, state: Any) -> tuple[list[Token], Any]:
        """(the tokens that ran, the merged state of all ranks)."""
        runs: Iterable[tuple[list[Token], list[Cursor]]]
        if self.in_loader and stage.ranks > 1 and not self._ends_alone(stage):
            threads = RankThreads(stage.ranks)
            source_of(self.kind, self.items)  # made once, not by every thread
            runs = threads.run(lambda rank: self._loaded(stage, rank, state, threads))
        else:
            one = self._loaded if self.in_loader else self._walked
            runs = [one(stage, rank, state) for rank in range(stage.ranks)]
        cursors = [cursor for _, taken in runs for cursor in taken]
        last = max(cursor.step for cursor in cursors)
        merged = merge_cursors([replace(cursor, step=last) for cursor in cursors])
        return [token for tokens, _ in runs for token in tokens], merged.to_dict()

    def _ends_alone(self, stage: PooledStage) -> bool:
        """Whether ranks need not agree on the end of a stage."""
        return self.endless and stage.steps is not None

    def _walked(
        self, stage: PooledStage, rank: int, state: Any
    ) -> tuple[list[Token], list[Cursor]]:
        """(the tokens of a rank, its cursors), without a loader."""
        stream = self._stream(stage, rank, state)
        steps = list(islice(in_turn(stream, stage.workers), stage.steps))
        cursors = [stream.start(stage.workers), *(step.cursor for step in steps)]
        return self._tokens(steps), cursors

    def _loaded(
        self, stage: PooledStage, rank: int, state: Any, threads: RankThreads | None = None
    ) -> tuple[list[Token], list[Cursor]]:
        """(the tokens of a rank, its last cursor), by a `StreamLoader`."""
        talk: dict[str, Any] = {}
        if threads is not None:
            talk["anyone"] = lambda mine: any(threads.gather(rank, mine))
            talk["gather"] = lambda value: threads.gather(rank, value)
        loader = StreamLoader(self._stream(stage, rank, state), **talk)
        steps = list(islice(loader, stage.steps))
        return self._tokens(steps), [Cursor.from_dict(loader.state_dict())]

    def _stream(self, stage: PooledStage, rank: int, state: Any) -> PooledStream:
        topology = replace(stage.recipe.topology, dp=stage.ranks)
        limited = stage.recipe.limits.columns
        stream = PooledStream(
            source_of(self.kind, self.items),
            replace(stage.recipe, topology=topology),
            world=World(rank, stage.ranks),
            pool=stage.pool,
            seed=self.seed,
            shuffle=self.shuffle if self.kind != "sequential" else None,
            infinite_loop=self._ends_alone(stage),
            on_error="skip" if None in self.items else "raise",
            columns={"images": _images} if limited else None,
        )
        if state is None:
            stream.set_epoch(self.epoch)
        else:
            stream.load_state_dict(json.loads(json.dumps(state)), allow=CHANGES)
        return stream

    def _tokens(self, steps: list[Step]) -> list[Token]:
        tokens = [token for step in steps for token in tokens_of(step)]
        if self.endless:  # a sample of another epoch has another id if both are in one step
            return [(item_and_part(i)[0], position, epoch) for i, position, epoch in tokens]
        for step in steps:
            check_draws(step, self.epoch, self.seed)
        return tokens


def _last_epoch(state: Any) -> int:
    """The last epoch that a reader of a merged state has begun."""
    return max(int(data["epochs"][-1][0]) for data in state["place"]["readers"].values())


def _images(sample: Any) -> int:
    return int(np.ravel(sample["images"])[0])  # a token file has one number per token


def in_turn(stream: PooledStream, workers: int) -> Iterator[Step]:
    """The steps of a rank's workers, which take turns."""
    walks = [stream.walk(worker, workers) for worker in range(workers)]
    return (step for group in zip_longest(*walks) for step in group if step is not None)


def tokens_of(step: Step) -> list[Token]:
    """The tokens of a step, which must hold its budget and its column."""
    found: list[Token] = []
    for number, micro in enumerate(step.micro_batches):
        segments, samples = micro.segments, step.read(number)[1]
        columns = (segments.sample.tolist(), segments.start.tolist(), segments.length.tolist())
        rows = list(zip(*columns, strict=True))
        epochs = {i: s["draw"][1] if "draw" in s else -1 for i, s in samples.items()}
        found += [(i, t, epochs[i]) for i, start, size in rows for t in range(start, start + size)]
        if step.budget is not None and len(rows) > 1:
            assert micro.slots <= step.budget, "over the budget"
    return found


LAYOUTS: list[Layout] = [
    Packed(max_tokens=8),
    Packed(max_tokens=20),
    Packed(max_tokens=16, samples=3),
    Packed(pad_to=12, rows=2),
    Packed(samples=4),
    Padded(max_tokens=12),
    Padded(max_tokens=24, round_to=4),
    Padded(samples=3),
]


@st.composite
def recipes(draw: DrawFn, overflow: str) -> Recipe:
    """Recipes for pools; some cannot be used."""
    fitting = [layout for layout in LAYOUTS if overflow != "alone" or layout.pad_to is None]
    return Recipe(
        layout=draw(st.sampled_from(fitting)),
        overflow=overflow,  # type: ignore[arg-type]
        steps=draw(st.sampled_from([Steps(), Steps(micro_batches=2)])),
        topology=draw(st.sampled_from([Topology(), Topology(), Topology(cp=2)])),
        limits=draw(
            st.sampled_from([Limits(), Limits(), Limits(columns={"images": 6}), Limits(cost=80)])
        ),
        cost=Cost(per_pair=0.1),
    )


def pooled_cases(
    max_samples: int = 40, known: bool = False, in_loader: bool = False
) -> SearchStrategy[PooledCase]:
    """Sources of every kind, or of those with `known` lengths, with one to six stops, finite or
    endless. Settings change if no token may be lost."""
    pools = st.builds(Pool, samples=st.integers(1, 8), tokens=st.sampled_from([None, 0, 0, 10]))
    lengths = st.one_of(st.integers(1, 30), st.integers(1, 8))
    one = st.tuples(lengths)
    several = st.lists(lengths, max_size=3).map(tuple)
    shapes = st.tuples(st.integers(1, 4), st.integers(1, 1 if in_loader else 3))

    @st.composite
    def case(draw: DrawFn) -> PooledCase:
        policies = ["split", "alone", "truncate", "drop", "error"]
        kind = draw(st.sampled_from(KNOWN if known else (*POOLED, *KNOWN)))
        endless = draw(st.booleans())
        items: SearchStrategy[Any] = one
        if not (known or endless or kind.startswith("measured")):
            items = draw(
                st.sampled_from([one, one, st.one_of(one, several), st.one_of(one, st.none())])
            )
        overflow = draw(st.sampled_from(policies[:3] if endless else policies))
        changing = overflow in policies[:2] and draw(st.booleans())
        recipe, pool = draw(recipes(overflow)), draw(pools)
        stages = []
        for _ in range(draw(st.integers(2 if known else 1, 6))):
            steps = draw(st.one_of(st.integers(0, 3), st.integers(0, 10)))
            stages.append(PooledStage(*draw(shapes), steps, recipe, pool))
            if changing:
                recipe, pool = draw(recipes(draw(st.sampled_from(policies[:2])))), draw(pools)
        last = draw(shapes)
        if endless:  # readers that are an epoch behind share it only if their number changes
            last = (1 if stages[-1].ranks > 1 else 2, 1)
        stages.append(PooledStage(*last, None, recipe, pool))
        fewest = 12 if endless else 0  # every reader of an endless stream needs an item
        most = max(fewest, max_samples)
        rows: list[Any]
        if known:  # enough that readers change several times before the end
            rng = np.random.default_rng(draw(st.integers(0, 2**16)))
            longest, count = draw(st.sampled_from([8, 30])), draw(st.integers(fewest, 3 * most))
            rows = [(n,) for n in rng.integers(1, longest + 1, count).tolist()]
        else:
            rows = draw(st.lists(items, min_size=fewest, max_size=most))
        return PooledCase(
            tuple(rows),
            kind,
            draw(st.booleans()),
            draw(st.integers(0, 3)),
            draw(st.integers(0, 2)),
            tuple(stages),
            endless,
            in_loader,
        )

    return case()
