"""Cursor: the position of a stream, as small plain data. Every step has one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.errors import CursorError

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The position of a stream after `step` steps, and a description of that stream.

    `belongs` describes the stream: data, order, steps. `place` is the position: what the stream
    needs to continue, as plain JSON. Neither depends on rank or worker unless the stream's order
    does.

    >>> cursor = Cursor(belongs={"seed": "0"}, step=3, place={"epoch": 0, "position": 24})
    >>> Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor
    True
    """

    belongs: Mapping[str, str]
    step: int
    place: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """A `state_dict` of plain data, for JSON and checkpoints."""
        body = {"step": self.step, "belongs": dict(self.belongs), "place": dict(self.place)}
        return {"evenstep_cursor": _VERSION, **body, "digest": _digest(body)}

    @classmethod
    def from_dict(cls, state: object) -> Cursor:
        """The cursor of a `state_dict`. Raises `CursorError` if it is damaged or not a cursor."""
        if not isinstance(state, Mapping) or "evenstep_cursor" not in state:
            raise CursorError(
                f"this state ({_glimpse(state)}) is not an Evenstep cursor. Pass the result of "
                f"state_dict() or step.cursor.to_dict()."
            )
        if state["evenstep_cursor"] != _VERSION:
            raise CursorError(
                f"the cursor has version {state['evenstep_cursor']}; this release reads version "
                f"{_VERSION}. Resume with the release that wrote it."
            )
        body = {name: state.get(name) for name in ("step", "belongs", "place")}
        try:
            intact = state.get("digest") == _digest(body)
        except (TypeError, ValueError):
            intact = False
        step, belongs, place = body["step"], body["belongs"], body["place"]
        shaped = isinstance(belongs, Mapping) and isinstance(place, Mapping)
        if not (intact and shaped and isinstance(step, int)):
            raise CursorError(
                "the cursor is damaged (its digest does not match). Use an earlier checkpoint."
            )
        assert isinstance(belongs, Mapping)
        assert isinstance(place, Mapping)
        assert isinstance(step, int)
        return cls(belongs=dict(belongs), step=step, place=dict(place))

    def differences(self, belongs: Mapping[str, str]) -> dict[str, str]:
        """What differs from the stream of this cursor, by name, in words."""
        return {
            name: f"{name} was {self.belongs.get(name, 'not given')!s} and is "
            f"{belongs.get(name, 'not given')!s}"
            for name in sorted({*self.belongs, *belongs})
            if self.belongs.get(name) != belongs.get(name)
        }

    def check(self, belongs: Mapping[str, str]) -> None:
        """Raise if the cursor belongs to another stream."""
        differing = self.differences(belongs)
        if differing:
            raise CursorError(
                f"the cursor belongs to another stream: {'; '.join(differing.values())}. Resuming "
                f"would repeat or lose samples. Restore the stream as it was, or start without the "
                f"cursor."
            )


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _glimpse(state: object) -> str:
    if isinstance(state, Mapping):
        return f"keys {', '.join(map(repr, list(state)[:4]))}" if state else "empty"
    return type(state).__name__
