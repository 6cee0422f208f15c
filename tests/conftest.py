"""Hypothesis profiles: `ci` by default, `pytest --hypothesis-profile=long` to draw more.

Test processes share the compilation of kernels, and each computes with one thread: there is one
process per core.
"""

import gc
import os
from collections.abc import Generator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

# No deadline: the first example of a test may compile kernels.
settings.register_profile(
    "long",
    deadline=None,
    derandomize=True,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("long"), max_examples=25)
settings.register_profile(
    "fuzz", settings.get_profile("long"), derandomize=False, max_examples=5000
)
settings.register_profile(
    "quick",  # no shrinking, so a failure is reported at once
    settings.get_profile("ci"),
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Compile kernels in another order in every second process, so that each finds what the other
    has compiled. With compiled kernels it takes half a second."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    from evenstep import Cost, Packed, Padded, PooledStream, Recipe, Steps, Topology, make_plan
    from evenstep.data import InMemory

    lengths = [1 + 7 * n % 59 for n in range(40)]
    packed, padded, two = Packed(max_tokens=64), Padded(max_tokens=64), Topology(dp=2)
    some = Steps(samples=16)
    recipes = [
        Recipe(layout=packed, topology=two, steps=some),
        Recipe(layout=padded, topology=two, steps=some),
        Recipe(
            layout=packed,
            topology=two,
            cost=Cost(per_token=1, per_pair=1),
            sync_every="micro_batch",
        ),
        Recipe(layout=packed, steps=Steps(micro_batches=2)),
        Recipe(layout=padded, steps=Steps(micro_batches=2)),
    ]
    samples = InMemory([{"input_ids": [0] * length} for length in lengths])
    for recipe in recipes if int(worker["workerid"].removeprefix("gw")) % 2 == 0 else recipes[::-1]:
        with suppress(Exception):  # tests show what is broken
            if recipe.steps.micro_batches is None:
                make_plan(lengths, recipe)
            else:
                next(iter(PooledStream(samples, recipe)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what imports have made out of garbage collections: Trainers and loaders run many, and
    those of forked processes would copy all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
