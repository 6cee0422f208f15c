"""find_budget: what it answers, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError, InputError, MicroBatchError
from evenstep.tensors import Collator, Extra, cross_entropy, policy_gradient
from evenstep.testing import run_ranks
from evenstep.train import Alone, Collective, Runner, find_budget
from tests.examples import examples
from tests.internals import CudaMemory, Framework

SHAPE = DecoderShape(vocab=8, hidden=8, layers=1, heads=2, kv_heads=1, ffn=8)


@dataclass
class Device:
    """A device whose memory grows with the slots of a micro-batch, as a meter and a forward."""

    total_bytes: float
    fixed: float = 1e6
    per_slot: float = 100.0
    flat_from: int = 2**62
    """Slots from which each takes half of `per_slot`, as where logits are divided into chunks."""
    bend: float = 0.0
    """Bytes per slot squared."""
    lost: float = 0.0
    """The share that fragments take."""
    most: int = 0
    runs: int = 0
    ran_out: int = 0
    fails_at: int | None = None

    def total(self) -> float:
        return self.total_bytes

    def restart(self) -> None:
        self.most = 0

    def bytes_of(self, slots: int) -> float:
        slope = slots - max(slots - self.flat_from, 0) / 2
        return self.fixed + self.per_slot * slope + self.bend * slots**2

    def peak(self) -> float:
        return self.bytes_of(self.most)

    def forward(self, model: Any, batch: Any) -> Tensor:
        slots = batch.rows * batch.width
        self.runs, self.most = self.runs + 1, max(self.most, slots)
        if self.runs == self.fails_at:
            raise ZeroDivisionError
        if self.bytes_of(slots) > self.total_bytes * (1 - self.lost):
            self.ran_out += 1
            raise torch.OutOfMemoryError("there is no more")
        scores: Tensor = model.head(model.embed(batch.tokens))
        return scores * torch.rand(())  # takes a random number, as dropout would

    def limit(self) -> int:
        """By bisection: the most slots that fit."""
        low, high = 1, 2**40
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.bytes_of(middle) <= self.total_bytes * (1 - self.lost)
            low, high = (middle, high) if fits else (low, middle)
        return low


def parts(device: Device, collective: Collective | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    options = {"loss": cross_entropy(), **options}
    runner = Runner(
        model=model, forward=device.forward, collective=collective or Alone(), **options
    )
    return runner, optimizer


def found(device: Device, lengths: list[int], collective: Any = None, **options: Any) -> int:
    runner, optimizer = parts(device, collective)
    return find_budget(runner, optimizer, lengths, meter=device, **options).max_tokens


@examples(20)
@given(
    limit=st.integers(6_000, 60_000),
    fixed=st.floats(0, 1e6),
    lost=st.floats(0, 0.03),
    bend=st.floats(0, 1e-4),
)
def test_the_budget_is_never_above_the_limit_and_not_far_below(
    limit: int, fixed: float, lost: float, bend: float
) -> None:
    device = Device(0.0, fixed=fixed, bend=bend, lost=lost)
    device.total_bytes = device.bytes_of(limit)
    budget = found(device, [5, 900, 40])
    assert 0.9 * device.limit() <= budget <= device.limit()
    assert device.runs <= 6 * (4 + 6)


def test_a_line_is_met_to_the_margin() -> None:
    device = Device(5e6)
    assert found(device, [100]) == int(0.96 * device.limit())
    assert device.runs == 24  # two micro-batches in three steps of four sizes
    assert found(device, [100], margin=0.2) == int(0.8 * device.limit())


def test_a_line_that_bends_is_drawn_again_nearer_to_the_limit() -> None:
    device = Device(5e6, flat_from=5_000)
    one_line = (5e6 - device.fixed) / device.per_slot
    assert one_line * 1.5 <= 0.94 * device.limit() <= found(device, [100]) <= device.limit()
    assert device.runs == 30


@pytest.mark.parametrize("fresh", [True, False])
def test_each_size_begins_with_the_states_that_the_optimizer_had(fresh: bool) -> None:
    """As in training: new states come to lie between what the first step has used."""
    device = Device(5e6)
    runner, optimizer = parts(device)
    if not fresh:
        for parameter in runner.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    states, forward = [], runner.forward

    def counting(model: Any, batch: Any) -> Any:
        states.append(len(optimizer.state))
        return forward(model, batch)

    find_budget(replace(runner, forward=counting), optimizer, [100], meter=device)
    assert states == ([0, 0, 2, 2, 2, 2] if fresh else [12] * 6) * 4  # 2 of 12 get gradients


def test_what_is_free_is_asked_after_kernels_were_loaded() -> None:
    device = Device(5e6)
    device.total = lambda: 5e6 if device.runs else 9e6  # type: ignore[method-assign]
    assert found(device, [100]) == int(0.96 * device.limit())


def test_a_step_that_does_not_fit_is_tried_smaller() -> None:
    device = Device(5e6, lost=0.2)
    assert found(device, [100], margin=0.1) <= device.limit()


def test_the_smallest_answer_counts_on_all_ranks() -> None:
    devices = [Device(5e6), Device(3e6), Device(9e6, lost=0.01)]
    budgets = run_ranks(3, lambda ranks: found(devices[ranks.rank], [100], ranks))
    assert len(set(budgets)) == 1
    assert budgets[0] == int(0.96 * devices[1].limit())


@examples(6)
@given(limit=st.integers(6_000, 60_000), share=st.floats(0, 0.6), lost=st.floats(0, 0.03))
def test_no_rank_of_fully_shard_runs_out_of_memory(limit: int, share: float, lost: float) -> None:
    totals = [limit * 100 / (1 - share), limit * 120 / (1 - share)]
    devices = [Device(total, fixed=total * share, lost=lost) for total in totals]

    def rank(ranks: Collective) -> int:
        device = devices[ranks.rank]
        runner, optimizer = parts(device, ranks)
        return find_budget(runner, optimizer, [300, 200], meter=device).max_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Framework, "locks_step", True)
        (one, other) = run_ranks(2, rank)
    assert [each.ran_out for each in devices] == [0, 0]
    assert one == other <= devices[0].limit()
    assert one >= 0.88 * devices[0].limit()


def test_ranks_of_fully_shard_without_room_are_refused() -> None:
    def rank(ranks: Collective) -> int:
        device = Device(1e6 + 2100 * 100)
        runner, optimizer = parts(device, ranks)
        return find_budget(runner, optimizer, [300, 200], meter=device).max_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Framework, "locks_step", True)
        with pytest.raises(MicroBatchError, match="take nearly all memory of a rank"):
            run_ranks(2, rank)


def state_of(runner: Runner, optimizer: Any) -> Any:
    gradients = [None if p.grad is None else p.grad.clone() for p in runner.model.parameters()]
    weights = copy.deepcopy(runner.model.state_dict())
    return weights, copy.deepcopy(optimizer.state_dict()), gradients, torch.get_rng_state()


@pytest.mark.parametrize("fails_at", [None, 1, 4, 7])
@pytest.mark.parametrize("fresh", [True, False])
def test_everything_is_as_before_also_after_an_error(fails_at: int | None, fresh: bool) -> None:
    device = Device(5e6)
    runner, optimizer = parts(device)
    if not fresh:
        for parameter in runner.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    gradients = [parameter.grad for parameter in runner.model.parameters()]
    before = state_of(runner, optimizer)
    device.fails_at = fails_at
    if fails_at is None:
        find_budget(runner, optimizer, [100, 3], meter=device)
    else:
        with pytest.raises(ZeroDivisionError):
            find_budget(runner, optimizer, [100, 3], meter=device)
    torch.testing.assert_close(state_of(runner, optimizer), before, rtol=0, atol=0)
    for parameter, gradient in zip(runner.model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient


def test_samples_of_a_collator_with_extras() -> None:
    device = Device(5e6)
    names = ("old_log_probs", "advantages")
    collate = Collator(extras={name: Extra(aligned="token") for name in names})
    runner, optimizer = parts(device, loss=policy_gradient(), collate=collate)

    def make_sample(length: int) -> dict[str, Any]:
        return {"input_ids": [1] * length, **{name: [0.5] * length for name in names}}

    budget = find_budget(runner, optimizer, [9, 30], meter=device, make_sample=make_sample)
    assert budget.max_tokens == int(0.96 * device.limit())
    assert repr(budget).startswith("MeasuredBudget(")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r, o, d: find_budget(r, o, [9]), ConfigError, "the memory of a GPU, but the model"),
        (lambda r, o, d: find_budget(r, o, [], meter=d), InputError, "one or more positive"),
        (lambda r, o, d: find_budget(r, o, [9], 1.5, meter=d), ConfigError, "margin must be"),
        (
            lambda r, o, d: find_budget(r, o, [9], meter=Device(5e6, per_slot=0.0)),
            InputError,
            "does not grow",
        ),
        (
            lambda r, o, d: find_budget(r, o, [24_000], meter=d),
            MicroBatchError,
            "micro-batches of 30000 slots, with a sample of 24000 tokens, run out of memory",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    call: Callable[..., Any], error: type[Exception], message: str
) -> None:
    device = Device(3.5e6)
    with pytest.raises(error, match=message):
        call(*parts(device), device)


@pytest.mark.parametrize(
    ("pieces", "fragments"),
    [([], False), ([{}, {"is_expandable": False}], True), ([{}, {"is_expandable": True}], False)],
    ids=["none", "fixed", "expandable"],
)
def test_memory_fragments_in_pieces_that_cannot_grow(
    monkeypatch: pytest.MonkeyPatch, pieces: list[dict[str, bool]], fragments: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pieces)
    assert CudaMemory(torch.device("cuda")).fragments() is fragments


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_pieces_grow_unless_the_environment_says_how(name: str | None) -> None:
    """Settings of the allocator last as long as a process."""
    code = (
        "import torch; from tests.internals import expand_segments\n"
        "calls = []; torch._C._accelerator_setAllocatorSettings = calls.append\n"
        "expand_segments(); print(calls)"
    )
    clean = {key: text for key, text in os.environ.items() if "ALLOC_CONF" not in key}
    environment = clean | ({} if name is None else {name: "backend:native"})
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ("['expandable_segments:True']" if name is None else "[]")
