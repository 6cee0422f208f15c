"""slime's schedule: rollouts in steps, equal counts, hard budget, indices as there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.compat.slime import build_dp_schedule
from evenstep.errors import ConfigError
from tests.compat.attempts import attempt, flat
from tests.examples import examples


def arguments(**given: Any) -> SimpleNamespace:
    default = {
        "micro_batch_size": 1,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 20,
        "balance_data": True,
        "balance_by_flops": False,
    }
    return SimpleNamespace(**{**default, **given})


def parallel(dp: int = 1, cp: int = 1, vpp: int = 1, group: int = 1) -> dict[str, int]:
    return {
        "dp_size": dp,
        "cp_size": cp,
        "vpp_size": vpp,
        "microbatch_group_size_per_vp_stage": group,
    }


def check_indices(found: Any, dp: int) -> list[list[list[int]]]:
    """The global samples of each micro-batch, by rank."""
    partitions, batches, counts, _ = found
    assert len(partitions) == len(batches) == dp
    for own, micros in zip(partitions, batches, strict=True):
        assert len(micros) == sum(counts)
        assert all(micros)
        assert flat(micros) == list(range(len(own)))
    return [
        [[own[i] for i in micro] for micro in micros]
        for own, micros in zip(partitions, batches, strict=True)
    ]


@examples(300)
@given(
    lengths=st.lists(st.integers(1, 26), min_size=4, max_size=40),
    per_rollout=st.integers(1, 3),
    size=st.integers(2, 6),
    dp=st.integers(1, 3),
    cp=st.integers(1, 2),
    group=st.integers(1, 2),
    balance=st.booleans(),
)
def test_dynamic_steps_keep_budget_counts_and_rollouts(
    lengths: list[int], per_rollout: int, size: int, dp: int, cp: int, group: int, balance: bool
) -> None:
    rollouts = [i // per_rollout for i in range(len(lengths))]
    full = len(set(rollouts)) // size
    found, fault = attempt(
        lambda: build_dp_schedule(
            arguments(balance_data=balance),
            parallel(dp, cp, 2, group),
            lengths,
            global_batch_size=size,
            rollout_indices=rollouts,
        ),
        AssertionError,
    )
    if found is None:
        uneven = (size * per_rollout) % (dp * group) or len(lengths) % per_rollout
        assert full == 0 if "num_rollouts" in fault else uneven
        return
    packs = check_indices(found, dp)
    _, _, counts, sizes = found
    assert sizes == [size] * full
    assert all(count % group == 0 for count in counts)
    first = 0
    for step, count in enumerate(counts):
        held = sorted(i for rank in packs for micro in rank[first : first + count] for i in micro)
        wanted = [i for i, r in enumerate(rollouts) if step * size <= r < (step + 1) * size]
        assert held == wanted
        first += count
    for rank in packs:
        for micro in rank:
            assert len(micro) == 1 or sum(lengths[i] for i in micro) <= 20 * cp


@examples(150)
@given(
    lengths=st.lists(st.integers(1, 99), min_size=24, max_size=24),
    size=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 4]),
    balance=st.booleans(),
)
def test_static_micro_batches_have_exactly_their_size(
    lengths: list[int], size: int, dp: int, balance: bool
) -> None:
    found = build_dp_schedule(
        arguments(use_dynamic_batch_size=False, micro_batch_size=size, balance_data=balance),
        parallel(dp),
        lengths,
        global_batch_size=24,
        rollout_indices=list(range(24)),
    )
    packs = check_indices(found, dp)
    assert {len(micro) for rank in packs for micro in rank} == {size}
    assert found[2] == [24 // (size * dp)]
    if not balance:
        in_order = [micro for wave in zip(*packs, strict=True) for micro in wave]
        assert flat(in_order) == list(range(24))


def test_what_cannot_be_scheduled_is_an_assertion_error() -> None:
    def schedule(args: Any, config: dict[str, int], size: int = 4) -> None:
        build_dp_schedule(
            args, config, [5] * 4, global_batch_size=size, rollout_indices=list(range(4))
        )

    with pytest.raises(AssertionError, match="num_rollouts"):
        schedule(arguments(), parallel(), size=5)
    with pytest.raises(AssertionError, match="expected a multiple of 6"):
        schedule(arguments(use_dynamic_batch_size=False, micro_batch_size=3), parallel(2))
    with pytest.raises(AssertionError, match="max_tokens_per_gpu"):
        schedule(arguments(max_tokens_per_gpu=None), parallel())
    with pytest.raises(AssertionError, match="4 samples for 5 ranks"):
        schedule(arguments(), parallel(5))
    with pytest.raises(ConfigError, match="global_batch_tokens is not supported"):
        schedule(arguments(global_batch_tokens=20), parallel())
