"""A cluster with a server for clients, and a client that dispatches to its actors.

python -m tests.slow.ray_client serve PORT    prints a line when it is ready, ends with its input
python -m tests.slow.ray_client call PORT     prints whether each result is right
"""

from __future__ import annotations

import sys

import ray
import torch
from ray.util.client.server.server import serve

from evenstep.integrations.ray import RayDispatcher
from tests.integrations.rollout_workers import RolloutWorker, expected_sums, expected_tokens
from tests.train.rollouts import make_rollouts, recipe_of


def run_server(port: int) -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    server = serve("127.0.0.1", port)
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(grace=0)
    ray.shutdown()


def call(port: int) -> None:
    ray.init(f"ray://127.0.0.1:{port}")
    worker = ray.remote(RolloutWorker).options(num_cpus=0)
    dispatcher = RayDispatcher([worker.remote() for _ in range(2)])
    batch = make_rollouts([5, 0, 7, 3, 6], "mixed", seed=0).batch
    plan = batch.plan(recipe_of("packed", dp=2))
    tokens = dispatcher.dispatch("per_row", plan, batch).tokens(pad=-1)
    print(torch.equal(tokens.float(), expected_tokens(batch, pad=-1)))
    sums = dispatcher.dispatch("sums", plan, batch).sequences()
    print(torch.equal(sums.float(), expected_sums(batch)))
    dispatcher = RayDispatcher(dispatcher.workers, replace=lambda rank: worker.remote())
    ray.kill(dispatcher.workers[1])
    sums = dispatcher.dispatch("sums", plan, batch).sequences()
    print(torch.equal(sums.float(), expected_sums(batch)))


if __name__ == "__main__":
    {"serve": run_server, "call": call}[sys.argv[1]](int(sys.argv[2]))
