"""Random rollouts, and what one giant padded batch gives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from evenstep import Packed, Padded, Recipe, Steps, Topology, make_plan
from evenstep.tensors import Collator
from evenstep.train import RolloutBatch
from tests.internals import Layout
from tests.train.steps import VOCABULARY

LONGEST, WIDTH = 7, 9
# Plain padding in order, dynamic batching, packing.
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"layout": Padded(samples=4), "balance": "none"},
    "dynamic": {"layout": Padded(max_tokens=4 * LONGEST)},
    "greedy": {"layout": Padded(max_tokens=4 * LONGEST, round_to=2, cut="greedy")},
    "packed": {"layout": Packed(max_tokens=4 * LONGEST)},
}


# (rows, width) of the tokens that are trained -> the tensors in which a system says so. Random
# numbers divide them between two masks.
MASKS: dict[str, Callable[[Tensor, Any], dict[str, Tensor]]] = {
    "ours": lambda kept, rng: {"loss_mask": kept},
    "tokenizers": lambda kept, rng: {"assistant_masks": kept.long()},
    "verl": lambda kept, rng: {"response_mask": kept[:, 3:].long()},  # three columns of prompt
    "ROLL": lambda kept, rng: {"response_mask": kept.long()},
    "ROLL, some samples filtered": lambda kept, rng: {
        "response_mask": torch.ones_like(kept),
        "final_response_mask": kept[:, 1:].long(),
    },
    "TRL": lambda kept, rng: {"completion_mask": kept[:, 3:].int()},
    "TRL, tools": lambda kept, rng: two_masks(kept[:, 3:], "completion_mask", "tool_mask", rng),
    "NeMo-RL": lambda kept, rng: {
        "token_mask": torch.where(kept.any(1)[:, None], kept, True).float(),
        "sample_mask": kept.any(1).float(),
    },
    "OpenRLHF": lambda kept, rng: {"action_mask": kept[:, 1:]},
}
PROMPT = {"verl": 3, "TRL": 3, "TRL, tools": 3}
"""Columns that a system's mask does not cover, which are not trained."""


def two_masks(kept: Tensor, first: str, second: str, rng: Any) -> dict[str, Tensor]:
    """Two masks that together keep these tokens; each of the others is hidden by one of them."""
    hides = torch.from_numpy(rng.random(tuple(kept.shape)) < 0.5)
    return {first: (kept | hides).long(), second: (kept | ~hides).long()}


def recipe_of(way: str, *, dp: int = 1, samples: int | None = None, **options: Any) -> Recipe:
    steps = Steps() if samples is None else Steps(samples=samples)
    return Recipe(topology=Topology(dp=dp), steps=steps, **{**WAYS[way], **options})


@dataclass(frozen=True)
class Rollouts:
    """Tensors as a policy returns them; row i has its tokens at `starts[i]` up to `ends[i]`."""

    tensors: dict[str, Tensor]
    starts: list[int]
    ends: list[int]
    groups: list[int] | None
    trained: Tensor
    """(rows, width): whether the masks among the tensors keep a token."""

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]

    @property
    def batch(self) -> RolloutBatch:
        return RolloutBatch(self.tensors, groups=self.groups, aligned={"old_log_probs": "last"})

    def logits(self, model: Any, rows: Sequence[int]) -> Tensor:
        """Of some rows in one giant padded batch, right-padded, (rows, width, vocabulary)."""
        samples = [{"input_ids": self.tensors["input_ids"][r][self.span(r)]} for r in rows]
        layout: Layout = Padded(samples=len(rows), pad_to=WIDTH)
        plan = make_plan([self.lengths[row] for row in rows], Recipe(layout=layout, balance="none"))
        (micro,) = plan[0, 0]
        return model(Collator()(micro, samples))

    def span(self, row: int) -> slice:
        return slice(self.starts[row], self.ends[row])

    def log_probs(self, model: Any) -> Tensor:
        """(rows, width): of each token at its own column, 0 for first tokens and padding."""
        found = torch.zeros((len(self.starts), WIDTH), dtype=torch.float64)
        real = [row for row, length in enumerate(self.lengths) if length]
        if not real:
            return found
        scores = self.logits(model, real).log_softmax(-1)
        for at, row in enumerate(real):
            ids = self.tensors["input_ids"][row][self.span(row)]
            own = scores[at, : len(ids) - 1].gather(-1, ids[1:, None])[:, 0]
            found[row, self.starts[row] + 1 : self.ends[row]] = own
        return found

    def kept(self, rows: Sequence[int]) -> Tensor:
        """(rows, width): the loss tokens of these rows."""
        kept = torch.zeros((len(self.starts), WIDTH), dtype=torch.bool)
        for row in rows:
            kept[row, self.starts[row] + 1 : self.ends[row]] = True
        return kept & self.trained

    def is_without_loss(self, rows: Sequence[int]) -> bool:
        """Whether there are tokens to predict, and all of them are masked."""
        longest = max(self.lengths[row] for row in rows)
        return longest > 1 and not bool(self.kept(rows).any())

    def loss(self, model: Any, rows: Sequence[int]) -> Tensor:
        """The clipped policy-gradient loss of these rows, a mean over their loss tokens."""
        chosen = torch.as_tensor(list(rows))
        kept = self.kept(rows)
        old = torch.nn.functional.pad(self.tensors["old_log_probs"], (1, 0))
        ratio = (self.log_probs(model) - old).exp()
        advantage = self.tensors["advantages"][:, None]
        value = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return value[chosen][kept[chosen]].sum() / kept[chosen].sum().clamp(min=1)


def rollouts(least: int = 1, groups: bool | None = None) -> SearchStrategy[Rollouts]:
    """Up to ten rows, some empty, padded on either side or both, with or without groups, with the
    loss mask of any system."""

    @st.composite
    def drawn(draw: DrawFn) -> Rollouts:
        lengths = draw(st.lists(st.integers(0, LONGEST), min_size=least, max_size=10))
        sides = st.sampled_from(["left", "right", "mixed"])
        side, seed = draw(sides), draw(st.integers(0, 999))
        grouped = draw(st.booleans()) if groups is None else groups
        return make_rollouts(lengths, side, seed, grouped, draw(st.sampled_from(sorted(MASKS))))

    return drawn()


def make_rollouts(
    lengths: list[int], side: str, seed: int = 0, grouped: bool = False, system: str = "ours"
) -> Rollouts:
    rng = np.random.default_rng(seed)
    count = len(lengths)
    free = [WIDTH - length for length in lengths]
    starts = {
        "left": free,
        "right": [0] * count,
        "mixed": [int(rng.integers(0, most + 1)) for most in free],
    }[side]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    mask = torch.zeros((count, WIDTH), dtype=torch.int64)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        mask[row, start:end] = 1
    ids = torch.from_numpy(rng.integers(0, VOCABULARY, (count, WIDTH)))
    trained = torch.from_numpy(rng.random((count, WIDTH)) > 0.3)
    trained[:, : PROMPT.get(system, 0)] = False
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        **MASKS[system](trained, rng),
        "advantages": torch.from_numpy(rng.normal(size=count)),
        "old_log_probs": torch.from_numpy(-2.4 + 0.3 * rng.normal(size=(count, WIDTH - 1))),
    }
    # At most three rows of a group, so that one fits a micro-batch.
    groups = [int(group) for group in rng.permutation(np.arange(count) // 3)] if grouped else None
    return Rollouts(tensors, starts, ends, groups, trained)
