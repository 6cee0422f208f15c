"""The state of a whole run: gathered from the streams of all ranks, and loaded by all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from evenstep.core.step import Cursor
from evenstep.data.order import ReaderStates
from evenstep.data.pooled import merge_cursors
from evenstep.errors import CursorError
from evenstep.train.collectives import has_group

__all__ = ["gather_state", "load_gathered_state"]

Gather: TypeAlias = Callable[[Any], Sequence[Any]]
"""An all-gather: every rank passes an object and gets those of all ranks."""


class HasState(Protocol):
    """A stream or a loader."""

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank."""

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start at a position."""


def gather_state(stream: HasState, gather: Gather | None = None) -> dict[str, Any]:
    """One state for all ranks, for a checkpoint that any rank may write.

    Call it on every rank after the same step. It resumes on any number of ranks and workers. A
    planned stream has the same state on all ranks, a pooled one has not.

    gather  default: `torch.distributed.all_gather_object`, or this process alone

        state = gather_state(loader)  # on every rank
        if rank == 0:
            torch.save({"data": state, ...}, path)
    """
    states = list((gather or all_gather)(stream.state_dict()))
    cursors = [Cursor.from_dict(state) for state in states]
    if cursors[0].identity.get("stream") != "pooled":
        _check_equal(states)
        return dict(states[0])
    merged = merge_cursors(cursors)
    readers = ReaderStates.from_dict(merged.position)
    if readers.missing:
        raise CursorError(
            f"{len(states)} ranks gave a state, but reader {readers.missing[0]} of {readers.ranks} "
            f"ranks x {readers.workers} workers is in none of them. Call gather_state on every "
            f"rank."
        )
    return merged.to_dict()


def load_gathered_state(
    stream: HasState,
    state: Mapping[str, Any] | None,
    gather: Gather | None = None,
    *,
    allow: Collection[str] = (),
) -> None:
    """Load the result of `gather_state` on every rank. Ranks that have not read it pass None.

    allow  settings of a pooled stream that may have changed; see `PooledStream.load_state_dict`

        state = torch.load(path)["data"] if rank == 0 else None
        load_gathered_state(loader, state)  # on every rank
    """
    states = [each for each in (gather or all_gather)(state) if each is not None]
    if not states:
        raise CursorError("no rank has a state to load. Pass the checkpoint's state on one rank.")
    _check_equal(states)
    stream.load_state_dict(states[0], allow)


def _check_equal(states: Sequence[Mapping[str, Any]]) -> None:
    digests = [state.get("digest") for state in states]
    if len(set(digests)) > 1:
        raise CursorError(
            f"ranks have different states (digests {', '.join(map(str, digests[:4]))}). Take them "
            f"after the same step, and load the same checkpoint on all ranks."
        )


def all_gather(value: Any) -> list[Any]:
    """An object of every process of the default group."""
    if not has_group():
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered
