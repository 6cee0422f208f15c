"""Check your own trainer: the same gradient in every layout, no leaks, exact resume.

    python examples/check_your_trainer.py        5 seconds on two cores

Three faults that train without an error message and that most trainers have had: the mean over
micro-batches of means over tokens, attention that ignores where a packed sample ends, and a shuffle
buffer that a checkpoint forgets. Each check of `evenstep.testing` runs on a right and a wrong
version. The trainer is plain PyTorch; the checks only call it. Copy them into your tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from evenstep import Packed, Recipe, make_plan
from evenstep.tensors import Batch, Collator, sdpa_mask
from evenstep.testing import assert_exact_resume, assert_no_leaks, assert_same_gradient

VOCAB = 32
LENGTHS = [5, 17, 3, 9, 26, 4, 11, 2]
SAMPLES = [{"input_ids": torch.randint(1, VOCAB, (length,))} for length in LENGTHS]


class Model(nn.Module):  # type: ignore[misc]
    """One layer of attention; `apart` says whether it keeps packed samples apart."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.embed, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(64, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch.tokens) + self.places(batch.position_ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)  # (rows, 1 head, width, 16)
        mask = sdpa_mask(batch) if self.apart else None
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.head(x + seen[:, 0])


def batches_of(recipe: Recipe) -> list[Batch]:
    """The same samples in any layout; your own collator can take a plan as well."""
    plan = make_plan(LENGTHS, recipe)
    return [Collator()(micro, SAMPLES) for micro in plan[0, 0]]


def backward(model: Model, recipe: Recipe, exact: bool) -> None:
    """The forwards and backwards of one step, as many loops accumulate gradients."""
    batches = batches_of(recipe)
    counts = [int((batch.labels != -100).sum()) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        logits, labels = model(batch).flatten(0, 1), batch.labels.flatten()  # labels are shifted
        total = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        (total / sum(counts) if exact else total / max(count, 1) / len(batches)).backward()


class Shuffled:
    """Sample numbers in random order, through a buffer; `whole` states include the buffer."""

    def __init__(self, whole: bool) -> None:
        self.whole, self.read, self.buffer = whole, 0, list[int]()
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        while self.buffer or self.read < len(SAMPLES):
            while len(self.buffer) < 4 and self.read < len(SAMPLES):
                self.buffer.append(self.read)
                self.read += 1
            yield self.buffer.pop(self.random.randrange(len(self.buffer)))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"read": self.read}
        if self.whole:
            state |= {"buffer": list(self.buffer), "random": self.random.getstate()}
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.read = state["read"]
        if self.whole:
            self.buffer = list(state["buffer"])
            self.random.setstate(state["random"])


def report(what: str, right: bool, check: Callable[[], None]) -> None:
    version = "right" if right else "wrong"
    try:
        check()
        print(f"{what}, {version}: passed")
    except AssertionError as error:
        print(f"{what}, {version}: CAUGHT\n    {error}")


def check(right: bool) -> None:
    torch.manual_seed(0)
    model, other = Model(apart=True), Model(apart=right)
    packed = batches_of(Recipe(layout=Packed(samples=3)))[0]
    run = partial(backward, model, exact=right)
    report("gradient", right, lambda: assert_same_gradient(run, model))
    report("leaks", right, lambda: assert_no_leaks(other, packed))
    report("resume", right, lambda: assert_exact_resume(lambda: Shuffled(whole=right)))


def main() -> None:
    check(right=True)
    check(right=False)


if __name__ == "__main__":
    main()
