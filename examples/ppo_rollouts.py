"""PPO on padded rollouts: score, train and restore without padding.

    python examples/ppo_rollouts.py        10 seconds on two cores

Most policies return rollouts as (rows, width) tensors, padded on the left or on both sides, and
half of that is padding. `RolloutBatch` takes them as they are. Log-probs run with a budget of 4,096
slots per micro-batch, training with 1,024, because it keeps activations; both are packed. Results
return in the order, width and padding of the rollouts. The reward is the share of even tokens, so a
policy learns within a few iterations; it has the same losses if rows stay padded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from evenstep import Packed, Padded, Recipe, Steps
from evenstep.demo import Decoder, DecoderShape, sample_tokens
from evenstep.tensors import policy_gradient
from evenstep.train import RolloutBatch, Runner, compute_log_probs

VOCAB, STOP, ROWS, WIDTH = 32, 1, 48, 120
EPOCHS, MINI_BATCH = 2, Steps(samples=16)  # passes over the rollouts; rows of an optimizer step
RECIPES = {
    "padded to the full width": (
        Recipe(layout=Padded(max_tokens=4096, pad_to=WIDTH)),
        Recipe(layout=Padded(max_tokens=1024, pad_to=WIDTH), steps=MINI_BATCH),
    ),
    "packed": (
        Recipe(layout=Packed(max_tokens=4096)),
        Recipe(layout=Packed(max_tokens=1024), steps=MINI_BATCH),
    ),
}


def generate(model: Decoder, seed: int) -> tuple[RolloutBatch, torch.Tensor]:
    """Rollouts padded on the left, and their rewards; your own generation goes here."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB, rng.integers(2, 20)).tolist() for _ in range(ROWS)]
    seeds = rng.integers(0, 2**62, ROWS).tolist()
    answers = sample_tokens(model, prompts, seeds, max_tokens=100, stop=STOP)
    ids, attended, trained = (torch.zeros((ROWS, WIDTH), dtype=torch.int64) for _ in range(3))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, WIDTH - len(prompt) - len(answer) :] = torch.tensor(prompt + answer)
        attended[row, WIDTH - len(prompt) - len(answer) :] = 1
        trained[row, WIDTH - len(answer) :] = 1  # the loss counts the answer's tokens
    tensors = {"input_ids": ids, "attention_mask": attended, "loss_mask": trained}
    return RolloutBatch(tensors), (trained * (ids % 2 == 0)).sum(1) / trained.sum(1)


@dataclass
class Run:
    """What one way of laying out rollouts took."""

    log_probs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    slots: float = 0.0
    tokens: float = 0.0


def train(scoring: Recipe, training: Recipe, iterations: int) -> Run:
    torch.manual_seed(0)
    model, run = Decoder(DecoderShape(vocab=VOCAB)), Run()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for number in range(iterations):
        rollouts, rewards = generate(model, seed=number)
        run.rewards.append(float(rewards.mean()))
        started = time.perf_counter()

        # Log-probs of the policy that sampled: one tensor per row, then (rows, width) again.
        old = rollouts.restore_tokens(compute_log_probs(model, rollouts, scoring))
        run.log_probs = old
        advantages = (rewards - rewards.mean()) / rewards.std()
        rollouts = rollouts.with_tensors({"old_log_probs": old, "advantages": advantages})

        # 3 mini-batches in each of 2 epochs, each of them one optimizer step.
        plan = rollouts.plan(training, epochs=EPOCHS, seed=number)
        runner = Runner(model=model, loss=policy_gradient(), collate=rollouts.collator())
        for step in plan.steps(rollouts):
            run.losses.append(runner.run(step).loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.seconds += time.perf_counter() - started
        found = plan.metrics()
        run.slots, run.tokens = run.slots + found["slots"], run.tokens + found["tokens"]
    return run


def main() -> None:
    torch.set_default_dtype(torch.float64)  # rounding must not change which tokens are sampled
    runs = {name: train(*recipes, iterations=4) for name, recipes in RECIPES.items()}
    base = next(iter(runs.values()))
    print(f"{'':24}  padding  seconds  mean reward       loss differs by")
    for name, run in runs.items():
        apart = np.abs(np.subtract(run.losses, base.losses)).max()
        print(
            f"{name:24}  {1 - run.tokens / run.slots:7.1%}  {run.seconds:7.1f}  "
            f"{run.rewards[0]:.3f} -> {run.rewards[-1]:.3f}  {apart:13.1e}"
        )
    shape, apart = tuple(run.log_probs.shape), (run.log_probs - base.log_probs).abs().max()
    print(f"log-probs of the last rollouts: {shape}, padded on the left, differ by {apart:.1e}")


if __name__ == "__main__":
    main()
