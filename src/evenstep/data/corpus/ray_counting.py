"""Count the tokens of a source on Ray Data.

Items are numbers, which every actor looks up in its own copy of the source. So the files must have
the same paths on all nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.data.corpus.counting import count, task_size
from evenstep.data.sources.source import SampleSource
from evenstep.errors import ConfigError, EvenstepError, InputError


def counted_on_ray(
    source: SampleSource, workers: int | None
) -> Iterator[tuple[IntArray, IntArray]]:
    """Items and their numbers of tokens, in any order.

    `workers` is the largest number of actors; None: as many as the cluster has CPUs.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise ConfigError(
            "the engine ray needs ray, which is not installed. Install it with: "
            "pip install 'ray[data]'."
        ) from None
    with _connected(ray):
        most = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        size = task_size(len(source), most)
        items = ray.data.range(len(source), override_num_blocks=-(-len(source) // size))
        parts = items.map_batches(
            _Counter,
            fn_constructor_args=(source,),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
        )
        for part in parts.iter_batches(batch_size=None, batch_format="numpy"):
            faults = [fault for fault in part["fault"].tolist() if fault]
            if faults:
                raise InputError(faults[0])
            yield part["id"], part["tokens"]


class _Counter:
    """Counts the tokens of blocks of items, in an actor.

    The first fault of a block travels as text, because Ray wraps what an actor raises.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source

    def __call__(self, block: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        items, fault = block["id"], ""
        tokens = np.zeros(len(items), np.int64)
        try:
            for at, item in enumerate(items.tolist()):
                tokens[at] = count(self._source, item)
        except EvenstepError as error:
            fault = str(error)
        return {"id": items, "tokens": tokens, "fault": np.array([fault] * len(items))}


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine. Ray's own progress is not shown."""
    own, context = not ray.is_initialized(), ray.data.DataContext.get_current()
    logger, bars = logging.getLogger("ray.data"), context.enable_progress_bars
    level = logger.level
    if own:
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    logger.setLevel(logging.ERROR)
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)
        if own:
            ray.shutdown()
