"""GRPO on arithmetic in text: a small policy learns to add by counting, on a CPU.

    python examples/grpo/grpo.py                          three layouts and a table: 4 minutes
    python examples/grpo/grpo.py --layout packed          one layout: a minute
    python examples/grpo/grpo.py --layout packed --feed   trains while rollouts are generated
    python examples/grpo/grpo.py --layout packed --ray 2  two Ray actors (pip install ray)
    python examples/grpo/grpo.py --share-prompts          answers share what they begin with

A prompt is "37+4=". The policy counts up and down, one pair per unit of the addend, and stops:
"38:3,39:2,40:1,41:0." The reward is 1 if the last number is the sum, else 0. Answers have 4 to 144
tokens. A short supervised phase (15 seconds) shows solutions until the policy knows the form; more
than half of its sums are wrong then. The rest is learnt from the reward alone.

What it shows: rollouts stay padded tensors (`RolloutBatch`); log-probs and training have plans of
their own, with budgets of their own; losses are the same in every layout, up to rounding; and the
same controller runs in one process or on Ray. With --share-prompts, the answers to a prompt stay
together in a mini-batch, and what they have in common is computed once: the prompt, and as much of
the counting as they agree on. Rewards are the same; the table has both.
"""

from __future__ import annotations

import argparse
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, Topology, World
from evenstep.data import Feed, InMemory
from evenstep.demo import Decoder, DecoderShape, sample_tokens
from evenstep.integrations.local import Dispatcher, LocalDispatcher
from evenstep.tensors import Collator, Extra, cross_entropy, policy_gradient
from evenstep.train import (
    Alone,
    Distributed,
    RolloutBatch,
    RolloutPlan,
    Runner,
    compute_log_probs,
)

LETTERS = "_0123456789+=:,."  # _ is padding
STOP = LETTERS.index(".")
MOST_TOKENS, WIDTH = 144, 152  # of an answer; of a row, which is a prompt and an answer
ANSWERS, MINI_BATCHES = 8, 4  # answers to a prompt; optimizer steps per iteration
TRAINING, SCORING = 2048, 8192  # slots per micro-batch; scoring keeps no activations
LAYOUTS: dict[str, Callable[[int], Padded | Packed]] = {
    "padded": lambda budget: Padded(max_tokens=budget, pad_to=WIDTH),
    "dynamic": lambda budget: Padded(max_tokens=budget),
    "packed": lambda budget: Packed(max_tokens=budget),
}
COLLATE = Collator(
    extras={
        "old_log_probs": Extra(aligned="token", dtype=torch.float64),
        "advantages": Extra(aligned="sequence", dtype=torch.float64),
    }
)
Problem = tuple[int, int]  # a and b of a + b


# The task ---------------------------------------------------------------------------------------


def problems(count: int, rng: np.random.Generator) -> list[Problem]:
    """Sums below 100; b is mostly small, sometimes up to 24."""
    addends = np.minimum(1 + rng.exponential(6.0, count).astype(int), 24)
    return [(int(rng.integers(1, 100 - b)), int(b)) for b in addends]


def prompt_of(problem: Problem) -> list[int]:
    return encoded("{}+{}=".format(*problem))


def solution_of(problem: Problem) -> str:
    a, b = problem
    return ",".join(f"{a + k}:{b - k}" for k in range(1, b + 1)) + "."


def reward_of(problem: Problem, answer: str) -> float:
    last = re.search(r"(\d+):0\.$", answer)
    return float(last is not None and int(last[1]) == sum(problem))


def encoded(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decoded(ids: Sequence[int]) -> str:
    return "".join(LETTERS[number] for number in ids)


# The policy -------------------------------------------------------------------------------------


def policy() -> Decoder:
    return Decoder(DecoderShape(vocab=len(LETTERS), hidden=64, layers=2, heads=4, ffn=128))


def warm_start(seed: int, enough: float) -> dict[str, Any]:
    """The weights of a policy that was shown solutions until its loss per token was `enough`."""
    torch.manual_seed(seed)
    model, mean = policy(), 1.0
    samples = []
    for problem in problems(32 * 300, np.random.default_rng(seed)):
        prompt, answer = prompt_of(problem), encoded(solution_of(problem))
        mask = [0] * len(prompt) + [1] * len(answer)
        samples.append({"input_ids": prompt + answer, "loss_mask": mask})
    recipe = Recipe(layout=Packed(max_tokens=TRAINING), steps=Steps(samples=32))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    runner = Runner(model=model, loss=cross_entropy())
    for step in PlannedStream(InMemory(samples), recipe, seed=seed):
        mean += 0.1 * (runner.run(step).loss - mean)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mean < enough:
            break
    return dict(model.state_dict())


# A worker: one data-parallel rank, as a plain object or a Ray actor -----------------------------


class Worker:
    """Holds the policy and its optimizer; generates, scores and trains its share."""

    def __init__(self, rank: int = 0, size: int = 1, port: int = 0) -> None:
        start_torch()
        self.rank, self.size = rank, size
        self.collective = Alone() if size == 1 else Distributed()
        if size > 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
            )

    def load(self, weights: dict[str, Any]) -> None:
        self.model = policy()
        self.model.load_state_dict(weights)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-4)

    def generate(self, asked: list[Problem], seeds: list[int]) -> list[list[int]]:
        """Answers to every size-th prompt."""
        mine = slice(self.rank, None, self.size)
        return self.answers(asked[mine], seeds[mine])

    def log_probs(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> Any:
        """The log-prob of each token of this rank's rows, end to end."""
        (step,) = plan.steps(batch, world)
        return torch.cat(compute_log_probs(self.model, step)).numpy()

    def train(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> list[float]:
        """The loss of each mini-batch."""
        runner = self.runner()
        return [self.update(runner.run(step)) for step in plan.steps(batch, world)]

    def train_fed(self, asked: list[Problem], seeds: list[int], layout: str) -> dict[str, Any]:
        """Train on rollouts while later ones are generated, two prompts at a time: one step."""
        scoring, training = (Recipe(layout=LAYOUTS[layout](n)) for n in (SCORING, TRAINING))
        feed, rewards = Feed(training), list[NDArray[Any]]()

        def produce() -> None:
            with feed:
                some = 2 * ANSWERS
                for at in range(self.rank * some, len(asked), self.size * some):
                    part = slice(at, at + some)
                    batch, found = as_batch(asked[part], self.answers(asked[part], seeds[part]))
                    # The policy changes at the end of the step only, so these are old log-probs.
                    old = batch.restore_tokens(compute_log_probs(self.model, batch, scoring))
                    batch = trainable(batch, old, found)
                    for row in range(len(batch)):
                        feed.put(batch[row])
                    rewards.append(found)

        producer = threading.Thread(target=produce)
        feed.watch(producer)
        producer.start()
        result = self.runner().run_fed(feed)
        losses, counts = [self.update(result)], (result.slots, result.tokens)
        return {"rewards": rewards, "losses": losses, "counts": counts}

    def answers(self, asked: list[Problem], seeds: list[int]) -> list[list[int]]:
        prompts = [prompt_of(problem) for problem in asked]
        return sample_tokens(self.model, prompts, seeds, max_tokens=MOST_TOKENS, stop=STOP)

    def runner(self) -> Runner:
        return Runner(
            model=self.model,
            loss=policy_gradient(clip_high=0.28),
            collective=self.collective,
            collate=COLLATE,
        )

    def update(self, result: Any) -> float:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(result.loss)


def start_torch() -> None:
    # float64: rounding does not change which tokens are sampled, so that runs can be compared.
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)


# Rollouts ---------------------------------------------------------------------------------------


def as_batch(
    asked: list[Problem], answers: list[list[int]], grouped: bool = False
) -> tuple[RolloutBatch, NDArray[np.float64]]:
    """Rollouts as padded tensors, and the reward of each. With `grouped`, the answers to a prompt
    are a group, which is never divided between mini-batches."""
    ids = torch.zeros((len(asked), WIDTH), dtype=torch.int64)
    mask = torch.zeros((len(asked), WIDTH), dtype=torch.bool)
    lengths = []
    for row, (problem, answer) in enumerate(zip(asked, answers, strict=True)):
        prompt = prompt_of(problem)
        lengths.append(len(prompt) + len(answer))
        ids[row, : lengths[-1]] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : lengths[-1]] = True
    rewards = [reward_of(p, decoded(answer)) for p, answer in zip(asked, answers, strict=True)]
    tensors = {"input_ids": ids, "loss_mask": mask}
    groups = np.arange(len(asked)) // ANSWERS if grouped else None
    batch = RolloutBatch(tensors, lengths=lengths, padding_side="right", groups=groups)
    return batch, np.array(rewards)


def trainable(batch: RolloutBatch, old: torch.Tensor, rewards: NDArray[np.float64]) -> RolloutBatch:
    """With log-probs, and each reward compared with those of the other answers to its prompt."""
    groups = rewards.reshape(-1, ANSWERS)
    scaled = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    advantages = torch.from_numpy(scaled.reshape(-1))
    return batch.with_tensors({"old_log_probs": old, "advantages": advantages})


# The controller ---------------------------------------------------------------------------------


class Controller:
    """Asks, plans and dispatches; the same for workers in this process and on Ray."""

    def __init__(
        self, dispatcher: Dispatcher, layout: str, samples: int, grouped: bool, shared: bool
    ) -> None:
        ranks = Topology(dp=dispatcher.size)
        self.dispatcher, self.layout = dispatcher, layout
        self.grouped, self.shared = grouped, shared
        self.scoring = Recipe(layout=LAYOUTS[layout](SCORING), topology=ranks, groups="step")
        self.training = Recipe(
            layout=LAYOUTS[layout](TRAINING),
            steps=Steps(samples=samples),
            topology=ranks,
            groups="step",
        )
        self.seconds = dict.fromkeys(("generate", "score", "train"), 0.0)
        self.counts = np.zeros(2)  # slots and tokens that were trained
        self.losses: list[float] = []
        self.rewards: list[float] = []

    def rollouts(self, asked: list[Problem], seeds: list[int]) -> tuple[RolloutBatch, Any]:
        answers: list[list[int]] = [[] for _ in asked]
        for rank, found in enumerate(self.dispatcher.broadcast("generate", asked, seeds)):
            answers[rank :: self.dispatcher.size] = found
        return as_batch(asked, answers, self.grouped)

    def iterate(self, asked: list[Problem], seeds: list[int], number: int) -> None:
        """Rollouts, log-probs of the policy that made them, mini-batches."""
        with self.timed("generate"):
            batch, rewards = self.rollouts(asked, seeds)
        with self.timed("score"):
            plan = batch.plan(self.scoring, share_prefixes=self.shared)
            old = self.dispatcher.dispatch("log_probs", plan, batch).tokens()
        with self.timed("train"):
            batch = trainable(batch, old, rewards)
            plan = batch.plan(self.training, seed=number, share_prefixes=self.shared)
            self.losses += self.dispatcher.dispatch("train", plan, batch).by_rank[0]
        found = plan.metrics()
        self.counts += (found["slots"], found["tokens"])
        self.rewards.append(float(rewards.mean()))

    def iterate_fed(self, asked: list[Problem], seeds: list[int], number: int) -> None:
        """All at once, on each worker."""
        with self.timed("train"):
            found = self.dispatcher.broadcast("train_fed", asked, seeds, self.layout)
        self.losses += found[0]["losses"]
        self.counts += np.sum([each["counts"] for each in found], 0)
        self.rewards.append(float(np.mean([r for each in found for r in each["rewards"]])))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def held_out(self) -> float:
        """The mean reward on 256 problems that are always the same."""
        asked = problems(256, np.random.default_rng(99))
        return float(self.rollouts(asked, list(range(len(asked))))[1].mean())


def learn(controller: Controller, options: argparse.Namespace, name: str) -> dict[str, Any]:
    before, rng = controller.held_out(), np.random.default_rng(options.seed)
    iterate = controller.iterate_fed if options.feed else controller.iterate
    for number in range(options.iterations):
        asked = [p for p in problems(options.prompts, rng) for _ in range(ANSWERS)]
        iterate(asked, rng.integers(0, 2**62, len(asked)).tolist(), number)
        if number % 5 == 4 or number == options.iterations - 1:
            reward, loss = np.mean(controller.rewards[-5:]), controller.losses[-1]
            print(f"{name:8} {number + 1:4}  reward {reward:.3f}  loss {loss: .6f}")
    slots, tokens = controller.counts
    return {
        "losses": np.array(controller.losses),
        "rewards": np.array(controller.rewards),
        "slots": slots,
        "seconds": controller.seconds,
        "padding": 1 - tokens / slots,
        "reward": (before, controller.held_out()),
    }


def show(records: dict[str, dict[str, Any]]) -> None:
    first = next(iter(records.values()))
    base = sum(first["seconds"][part] for part in ("score", "train"))
    print("\nlayout    held-out reward  padding  generate  score and train   loss differs by")
    for name, record in records.items():
        took, (before, after) = record["seconds"], record["reward"]
        busy = took["score"] + took["train"]
        apart = np.abs(record["losses"] - first["losses"]).max()
        print(
            f"{name:8}  {before:.3f} -> {after:.3f}  {record['padding']:7.1%}  "
            f"{took['generate']:6.1f} s  {busy:5.1f} s ({base / busy:4.2f}x)  {apart:11.1e}"
        )
    if "shared" in records:
        whole, shared = records["packed"], records["shared"]
        apart = np.abs(whole["rewards"] - shared["rewards"]).max()
        print(
            f"\ntrained   {whole['slots']:,.0f} tokens, {shared['slots']:,.0f} with shared ones "
            f"({whole['slots'] / shared['slots']:.2f}x fewer); rewards differ by {apart:.1e}"
        )


def start_workers(size: int) -> Dispatcher:
    """One worker in this process, or Ray actors."""
    if not size:
        return LocalDispatcher([Worker()])
    import ray

    from evenstep.integrations.ray import RayDispatcher

    ray.init(num_cpus=size, include_dashboard=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    actor = ray.remote(Worker)
    return RayDispatcher([actor.remote(rank, size, port) for rank in range(size)])


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on arithmetic in text.")
    add = parser.add_argument
    add("--layout", choices=[*LAYOUTS, "all"], default="all")
    add("--iterations", type=int, default=40)
    add("--prompts", type=int, default=32, help=f"per iteration, {ANSWERS} answers to each")
    add("--warm-up", type=float, default=0.12, help="loss per token that ends the supervised phase")
    add("--seed", type=int, default=0)
    add("--feed", action="store_true", help="train while rollouts are generated")
    add("--share-prompts", action="store_true", help="packed, and with shared prefixes")
    add("--ray", type=int, default=0, metavar="ACTORS", help="workers as Ray actors")
    options = parser.parse_args()
    start_torch()
    weights = warm_start(options.seed, options.warm_up)
    dispatcher = start_workers(options.ray)
    names = list(LAYOUTS) if options.layout == "all" else [options.layout]
    if options.share_prompts:
        names = ["packed", "shared"]
    records = {}
    for name in names:
        dispatcher.broadcast("load", weights)
        controller = Controller(
            dispatcher,
            "packed" if name == "shared" else name,
            options.prompts * ANSWERS // MINI_BATCHES,
            grouped=options.share_prompts,
            shared=name == "shared",
        )
        records[name] = learn(controller, options, name)
    show(records)


if __name__ == "__main__":
    main()
