"""What `tune` chooses by memory."""

from dataclasses import replace

import numpy as np
import pytest

from evenstep import Topology
from evenstep.errors import PlanError
from tests.internals import GPUS, USABLE, ModelSize, Sweep, memory_of, named_config


def test_gradients_are_scattered_in_every_micro_batch_where_only_that_fits() -> None:
    size, lengths = ModelSize.of(named_config("llama-3-8b")), np.full(64, 4096)

    def chosen(memory: float, ranks: int = 8, samples: int = 32) -> list[tuple[bool, bool]]:
        fixed = [
            "layout.kind=packed", "layout.max_tokens=4096", f"steps.samples={samples}",
            "topology.cp=1",
        ]  # fmt: skip
        gpu = replace(GPUS["h200"], memory=memory / USABLE)
        sweep = Sweep.of(lengths, size, gpu, ranks, 1, fixed)
        return [(each.checkpointing, each.scattered) for each in sweep.settings(lambda *_: None)]

    def peak(checkpointing: bool, scattered: bool, waves: int = 4) -> float:
        return memory_of(
            size, Topology(dp=8), slots=4096, micro_batches=waves,
            checkpointing=checkpointing, scattered=scattered,
        ).peak  # fmt: skip

    small = [peak(*each) for each in ((False, False), (False, True), (True, False), (True, True))]
    assert small[1] < small[0]
    assert small[3] < small[2]
    near = 2**20
    assert chosen(small[0] + near) == [(False, False)]  # nothing has to be saved
    assert chosen(small[0] - near) == [(False, True)]  # cheaper than recomputing
    assert chosen(min(small[1:3]) - near) == [(True, True)]
    with pytest.raises(PlanError):
        chosen(small[3] - near)
    # A step of one micro-batch holds no sum of gradients, which scattering would save.
    assert chosen(peak(False, False, 1) + near, samples=8) == [(False, False)]
    assert chosen(peak(False, False, 1) - near, samples=8) == [(True, False)]
