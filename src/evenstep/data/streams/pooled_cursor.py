"""Cursors of pooled streams: one per reader, merged into that of a whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.core.step import Cursor
from evenstep.data.streams.reader_state import ReaderState
from evenstep.errors import CursorError


def merge_cursors(cursors: Sequence[Cursor | Mapping[str, Any]]) -> Cursor:
    """Merge cursors of several readers of a `PooledStream`, taken after the same step on all ranks.

    The merged cursor of all ranks and workers can be resumed on any number of either. Of several
    cursors of one reader, the last counts. A rank that has ended may be at an earlier step.

        merge_cursors([state_of_rank_0, state_of_rank_1]).to_dict()
    """
    found = [c if isinstance(c, Cursor) else Cursor.from_dict(c) for c in cursors]
    if not found:
        raise CursorError("no cursors to merge; expected those of all ranks and workers.")
    first = found[0]
    kind = first.belongs.get("stream", "foreign")
    if kind != "pooled":
        raise CursorError(
            f"expected cursors of a PooledStream, got one of a {kind} stream. The cursor of a "
            f"PlannedStream needs no merging: load that of any rank."
        )
    shape = (first.place.get("ranks"), first.place.get("workers"))
    turns: dict[str, int] = {}
    readers: dict[str, Any] = {}
    for cursor in sorted(found, key=lambda cursor: cursor.step):
        cursor.check(first.belongs)
        states_of(cursor.place)
        if (cursor.place["ranks"], cursor.place["workers"]) != shape:
            raise CursorError(
                f"cursors come from different runs: {shape[0]} ranks x {shape[1]} workers and "
                f"{cursor.place['ranks']} x {cursor.place['workers']}. Merge those of one run."
            )
        turns |= cursor.place["turns"]
        readers |= cursor.place["readers"]
    _check_steps(found, readers)
    position = {"ranks": shape[0], "workers": shape[1], "turns": turns, "readers": readers}
    return Cursor(belongs=first.belongs, step=max(c.step for c in found), place=position)


def _check_steps(cursors: Sequence[Cursor], readers: Mapping[str, Any]) -> None:
    """Refuse cursors of ranks at different steps. Ignores ranks with a reader that may have ended:
    they have no more steps, or their other workers count ahead."""
    position, steps = cursors[0].place, dict[int, int]()
    for cursor in cursors:
        for number in cursor.place["readers"]:
            rank = int(number) // position["workers"]
            steps[rank] = max(cursor.step, steps.get(rank, 0))
    if len(set(steps.values())) <= 1:
        return
    for number, state in states_of({**position, "readers": readers}).items():
        if not state.goes_on:
            steps.pop(number // position["workers"], None)
    if len(set(steps.values())) > 1:
        (behind, fewest), *_, (ahead, most) = sorted(steps.items(), key=lambda pair: pair[1])
        raise CursorError(
            f"the cursor of rank {behind} was taken after {fewest} steps, that of rank {ahead} "
            f"after {most}. Merge cursors that all ranks took after the same step."
        )


def states_of(position: Mapping[str, Any]) -> dict[int, ReaderState]:
    """The readers' states in a cursor, by reader."""
    try:
        readers = int(position["ranks"]) * int(position["workers"])
        given = {int(name): data for name, data in position["readers"].items()}
        if not (readers > 0 and isinstance(position["turns"], Mapping)):
            raise ValueError(f"{readers} readers")
        if not all(0 <= number < readers for number in given):
            raise ValueError(f"readers {sorted(given)} of {readers}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CursorError(
            f"the position in the cursor is malformed ({error!r}). Use an earlier checkpoint."
        ) from None
    return {number: ReaderState.from_dict(data, number, readers) for number, data in given.items()}


def all_states_of(position: Mapping[str, Any], ranks: int, workers: int) -> list[ReaderState]:
    """The states of all readers, to resume on another number of ranks and workers."""
    held = states_of(position)
    then = position["ranks"] * position["workers"]
    missing = sorted(set(range(then)) - held.keys())
    if missing:
        raise CursorError(
            f"the cursor holds {len(held)} of {then} readers ({position['ranks']} ranks x "
            f"{position['workers']} workers; reader {missing[0]} is missing), but resuming on "
            f"{ranks} ranks x {workers} workers needs all of them. Merge the cursors of all "
            f"ranks and workers with merge_cursors."
        )
    return list(held.values())
