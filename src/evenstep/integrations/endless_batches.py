"""EndlessBatches: the micro-batches of an endless pooled stream, for trainers that count steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from evenstep.data.pooled import PooledStream
from evenstep.integrations.dataloader import StreamLoader
from evenstep.integrations.run_state import gather_state
from evenstep.integrations.saved_position import read_position, write_position


class EndlessBatches:
    """The inputs of every micro-batch of this process, without an end and without a length.

    The stream has steps of one micro-batch, so the position is known after each, and trainers
    accumulate as many as they like. `options` are those of torch's `DataLoader`.
    """

    def __init__(self, stream: PooledStream, collate: Callable[..., Any], **options: Any) -> None:
        assert stream.infinite_loop
        assert stream.recipe.steps.micro_batches == 1
        self._loader = StreamLoader(stream, collate=collate, **options)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in self._loader:
            assert step.batches is not None
            yield from step.batches

    def save(self, checkpoint: Path, writes: bool) -> None:
        """Gather the positions of all processes after the last micro-batch; one `writes` them."""
        state = gather_state(self._loader)
        if writes:
            write_position(checkpoint, state)

    def load(self, checkpoint: Path, allow: Collection[str] = ()) -> None:
        """Start after the step of a checkpoint, on any number of processes. `allow` names settings
        that may have changed since."""
        self._loader.load_state_dict(read_position(checkpoint), allow)
