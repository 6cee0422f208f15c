"""compare_settings: which settings of a run have changed, and whether its losses depend on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evenstep.config.settings import Settings

_MATTERS = (
    "steps", "overflow", "optimizer", "stream.seed", "stream.shuffle", "model", "data.format",
    "data.field", "data.validation", "trainer.job", "trainer.beta", "trainer.precision",
    "trainer.per_micro_batch_normalization",
)  # fmt: skip
"""Settings that the losses of a run depend on, by the beginnings of their names."""
_FREE = ("model.path", "model.attention")
"""Others below them: checkpoints and streams compare what is in the files themselves."""
_CUTS = ("layout", "limits")  # matter too where they decide what is cut off or left out


def compare_settings(
    stored: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """(before and now of every setting that differs, the names of those that losses depend on).

    `stored` is what `Settings.to_dict` gave, from JSON.

    >>> from dataclasses import replace
    >>> from evenstep import Packed, Recipe
    >>> from evenstep.config import TrainerSettings
    >>> before = Settings(recipe=Recipe(layout=Packed(max_tokens=8192)))
    >>> now = replace(before, trainer=TrainerSettings(keep=3, precision="bfloat16"))
    >>> compare_settings(before.to_dict(), now)[1]
    ['trainer.precision']
    """
    then, now = (_leaves(json.loads(json.dumps(each))) for each in (stored, settings.to_dict()))
    changed = {
        name: (then.get(name), now.get(name))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    }
    return changed, [name for name in changed if _matters(name, now)]


def _matters(name: str, now: Mapping[str, Any]) -> bool:
    cuts = now.get("overflow") not in ("error", "alone")
    names = (*_MATTERS, *_CUTS) if cuts else _MATTERS
    if name.startswith(_FREE) or (name == "trainer.beta" and now["trainer.job"] != "dpo"):
        return False
    if name == "data.validation":  # held-out files do not change what is trained on
        return isinstance(now.get(name), float)
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested data by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping)
        flat |= _leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat
