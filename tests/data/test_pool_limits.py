"""Pools take every limit that plans take: columns of the samples, and cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Limits, Packed, Padded, PooledStream, Recipe, Topology, make_plan
from evenstep.data import InMemory, Pool
from evenstep.errors import ConfigError, SampleError
from evenstep.tensors import Collator
from tests.examples import examples
from tests.internals import loss_tokens_of, rounded_up

samples = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30
)
layouts = st.sampled_from(
    [
        Packed(max_tokens=24),
        Packed(pad_to=24, rows=2),
        Packed(samples=4),
        Packed(max_tokens=24, samples=3),
        Padded(max_tokens=24),
        Padded(samples=3),
        Padded(max_tokens=30, round_to=4),
    ]
)


@given(
    samples=samples,
    layout=layouts,
    most=st.tuples(st.none() | st.integers(12, 20), st.none() | st.integers(12, 20)),
    cost=st.none() | st.integers(400, 900),
    alignment=st.sampled_from([1, 2]),
    pool=st.integers(1, 12),
)
def test_every_micro_batch_holds_all_limits(
    samples: list[tuple[int, int, int]],
    layout: Any,
    most: tuple[int | None, int | None],
    cost: int | None,
    alignment: int,
    pool: int,
) -> None:
    limited = {name: n for name, n in zip("ab", most, strict=True) if n is not None}
    recipe = Recipe(
        layout=layout,
        limits=Limits(columns=limited, cost=cost),
        cost=Cost(per_token=1.0, per_pair=1.0, per_segment=2.0, per_micro_batch=3.0),
        topology=Topology(cp=alignment),
    )
    data = [{"input_ids": [0] * n, "a": a, "b": b} for n, a, b in samples]
    functions: dict[str, Any] = {
        "a": lambda sample: sample["a"],
        "b": lambda sample: np.int64(sample["b"]),
    }
    given_functions = {name: functions[name] for name in limited}
    stream = PooledStream(
        InMemory(data), recipe, pool=Pool(samples=pool, tokens=0), columns=given_functions
    )
    seen: Counter[int] = Counter()
    for step in stream:
        for micro in step.micro_batches:
            ids = micro.segments.sample.tolist()
            seen.update(ids)
            for name, n in limited.items():
                assert sum(data[i][name] for i in ids) <= n
            if cost is not None:
                aligned = rounded_up(micro.segments.length, recipe.topology.alignment)
                widths = np.full(len(ids), micro.width)
                costs = layout.segment_costs(recipe, aligned, widths=widths)
                assert costs.sum() + recipe.cost.per_micro_batch <= cost * (1 + 1e-9)
    assert seen == Counter(range(len(data)))


def test_a_sample_over_a_limit_is_refused_or_runs_alone() -> None:
    data = [{"input_ids": [0] * 3, "images": n} for n in (1, 9, 2, 1)]
    layout, limits = Packed(max_tokens=30), Limits(columns={"images": 4})
    images: dict[str, Any] = {"images": lambda sample: sample["images"]}
    strict = PooledStream(InMemory(data), Recipe(layout=layout, limits=limits), columns=images)
    with pytest.raises(SampleError, match=r"sample 1 takes 9 of limits.columns.images, more than"):
        list(strict)
    alone = Recipe(layout=layout, limits=limits, overflow="alone")
    steps = list(PooledStream(InMemory(data), alone, columns=images))
    held = [sorted(m.segments.sample.tolist()) for step in steps for m in step.micro_batches]
    assert sorted(held) == [[0, 2, 3], [1]]


def test_columns_without_a_limit_or_a_function_are_refused() -> None:
    source = InMemory([{"input_ids": [0] * 3}])
    with pytest.raises(ConfigError, match="columns has 'images', which has no limit"):
        PooledStream(source, Recipe(layout=Packed(max_tokens=9)), columns={"images": len})
    recipe = Recipe(layout=Packed(max_tokens=9), limits=Limits(columns={"images": 3}))
    with pytest.raises(ConfigError, match=r"limits.columns.images needs the values"):
        PooledStream(source, recipe)


def test_a_column_that_is_not_a_number_names_the_sample() -> None:
    recipe = Recipe(layout=Packed(max_tokens=9), limits=Limits(columns={"images": 3}))
    source = InMemory([{"input_ids": [0] * 3}])
    for function in (lambda sample: -1, lambda sample: sample["missing"]):
        with pytest.raises(SampleError, match="sample 0 cannot be read"):
            list(PooledStream(source, recipe, columns={"images": function}))


@given(st.data())
@examples(60)
def test_loss_tokens_are_counted_as_the_collator_counts_them(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 20))
    sample: dict[str, Any] = {"input_ids": list(range(length))}
    bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    for name in ("loss_mask", "assistant_masks"):
        if data.draw(st.booleans()):
            sample[name] = data.draw(bits)
    if data.draw(st.booleans()):
        hidden = data.draw(bits)
        sample["labels"] = [n if keep else -100 for n, keep in enumerate(hidden)]
    recipe = Recipe(layout=Packed(max_tokens=6), overflow="split")
    for micro in (m for step in make_plan([length], recipe) for m in step[0]):
        batch = Collator()(micro, [sample])
        segments = zip(micro.segments.start.tolist(), micro.segments.length.tolist(), strict=True)
        counts = [loss_tokens_of(sample, start, start + n, length) for start, n in segments]
        assert batch.loss_weights.sum() == sum(counts)
