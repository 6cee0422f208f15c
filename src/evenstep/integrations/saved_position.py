"""The position of the data in a checkpoint of a trainer: one small file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.errors import CursorError

_NAME = "evenstep.json"


def has_position(checkpoint: Path) -> bool:
    """Whether a checkpoint was written by a trainer with planned or pooled steps."""
    return (checkpoint / _NAME).exists()


def write_position(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Add a position to a checkpoint."""
    (checkpoint / _NAME).write_text(json.dumps(dict(state)))


def read_position(checkpoint: Path) -> dict[str, Any]:
    """The position in a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / _NAME).read_text())
    except (OSError, ValueError) as error:
        raise CursorError(
            f"{checkpoint} has no position of the data that can be read ({error}). Resume from an "
            f"earlier checkpoint."
        ) from None
    return state
