"""Rollouts on Ray actors: plan once, dispatch shares, replace an actor that is killed.

    python examples/ray_rollouts.py        20 seconds on two cores (pip install ray)

The controller of an RL job holds padded rollouts. It plans log-probs for all workers at once, and
`RayDispatcher` sends each its share and returns results in the order, width and padding of the
rollouts. Halfway, the process of one actor is killed with SIGKILL while it works: the dispatcher
asks for a new actor, runs the lost share on it, and the results are the same.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import ray
import torch

from evenstep import Packed, Recipe, Topology, World
from evenstep.demo import Decoder, DecoderShape
from evenstep.integrations.ray import RayDispatcher
from evenstep.train import RolloutBatch, RolloutPlan, compute_log_probs

WORKERS, VOCAB = 2, 64


def policy() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderShape(vocab=VOCAB))


class Worker:
    """One rank: a plain class, so that it can be tested without Ray."""

    def __init__(self, weights: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.model = policy()
        self.model.load_state_dict(weights)

    def pid(self) -> int:
        return os.getpid()

    def log_probs(
        self, plan: RolloutPlan, batch: RolloutBatch, world: World, seconds: float
    ) -> Any:
        """The log-prob of each token of this rank's rows, end to end, which is fastest to send."""
        time.sleep(seconds)  # as if the model were large
        (step,) = plan.steps(batch, world)
        return torch.cat(compute_log_probs(self.model, step)).numpy()


def kill_soon(pid: int) -> None:
    """SIGKILL, as the kernel does when memory runs out."""
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


def main() -> None:
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    weights = ray.put(policy().state_dict())
    actor = ray.remote(Worker)
    replaced = []

    def new_worker(rank: int) -> Any:
        """An actor in the state that the lost one had between two calls: the current weights."""
        replaced.append(rank)
        return actor.remote(weights)

    workers = [actor.remote(weights) for _ in range(WORKERS)]
    dispatcher = RayDispatcher(workers, replace=new_worker)

    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (64, 128), generator=random)
    lengths = torch.randint(4, 129, (64,), generator=random).tolist()
    rollouts = RolloutBatch({"input_ids": ids}, lengths=lengths, padding_side="left")
    recipe = Recipe(layout=Packed(max_tokens=2048), topology=Topology(dp=dispatcher.size))
    plan = rollouts.plan(recipe)
    shares = [sum(lengths[row] for row in plan.rows_of(rank)) for rank in range(WORKERS)]
    removed = plan.metrics()["removed_padding_ratio"]
    print(f"tokens of each worker: {shares}; padding removed: {removed:.1%}")

    undisturbed = dispatcher.dispatch("log_probs", plan, rollouts, seconds=0.0).tokens()
    pids = dispatcher.broadcast("pid")
    kill_soon(pids[1])
    disturbed = dispatcher.dispatch("log_probs", plan, rollouts, seconds=3.0).tokens()
    changed = [old != new for old, new in zip(pids, dispatcher.broadcast("pid"), strict=True)]
    alone = compute_log_probs(policy(), rollouts, Recipe(layout=Packed(max_tokens=2048)))
    apart = (undisturbed - rollouts.restore_tokens(alone)).abs().max()
    print(f"log-probs {tuple(disturbed.shape)}, padded on the left")
    print(f"two actors compared with one process: differ by {apart:.1e}")
    print(f"killed rank 1, replaced {replaced}, other actors kept: {changed == [False, True]}")
    apart = (disturbed - undisturbed).abs().max()
    print(f"with the kill compared with without: differ by {apart:.1e}")
    ray.shutdown()


if __name__ == "__main__":
    main()
