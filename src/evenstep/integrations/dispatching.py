"""refuse_dispatching: accelerate must not divide planned batches between processes."""

from __future__ import annotations

import sys
from typing import Any

from evenstep.errors import ConfigError


def refuse_dispatching(*, batch_sampler: Any = None, dataset: Any = None) -> None:
    """Raise if a `DataLoaderDispatcher` of accelerate iterates this sampler or dataset: process 0
    would read for all processes, concatenate batches and cut them by rows."""
    accelerate = sys.modules.get("accelerate")
    if accelerate is None:
        return
    active: Any = accelerate.state.GradientState().active_dataloader
    if type(active).__name__ != "DataLoaderDispatcher":
        return
    loader = active.base_dataloader
    if (batch_sampler is not None and loader.batch_sampler is batch_sampler) or (
        dataset is not None and loader.dataset is dataset
    ):
        raise ConfigError(
            "dispatch_batches=True reads all batches on process 0 and divides them by rows, but "
            "each process has its own planned micro-batches. Use accelerate_loader of "
            "evenstep.integrations.accelerate, and do not prepare this loader."
        )
