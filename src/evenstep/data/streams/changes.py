"""Changes: what a pooled stream may change between two runs, and how a cursor describes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from evenstep.core.recipe import Recipe
from evenstep.core.step import Cursor
from evenstep.data.streams.pool import Pool
from evenstep.errors import ConfigError, CursorError

CHANGES = {
    "budget": ("layout.", "limits.", "cost.", "topology."),
    "overflow": ("overflow",),
    "pool": ("pool.",),
    "steps": ("steps.",),
}
"""The settings that each name allows to change, by how the names of the settings begin."""


def described(recipe: Recipe, pool: Pool, strategy: str) -> dict[str, str]:
    """The settings that determine the micro-batches of a pool, without defaults.

    >>> from evenstep import Packed
    >>> described(Recipe(layout=Packed(max_tokens=9)), Pool(), "greedy")
    {'layout.kind': 'packed', 'layout.max_tokens': '9', 'overflow': 'error', 'pool.strategy': 'greedy'}
    """  # noqa: E501
    found: dict[str, Any] = {"layout.kind": recipe.layout.kind}
    for name in ("layout", "limits", "steps", "topology"):
        found |= {f"{name}.{key}": value for key, value in _given(getattr(recipe, name)).items()}
    if recipe.limits.cost is not None:
        found |= {f"cost.{key}": value for key, value in _given(recipe.cost).items()}
    found.pop("topology.dp", None)
    found |= {"overflow": recipe.overflow}
    found |= {f"pool.{key}": value for key, value in _given(pool).items()}
    return {name: str(value) for name, value in {**found, "pool.strategy": strategy}.items()}


def _given(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    given = {}
    for each in fields(part):
        default = each.default
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        value = getattr(part, each.name)
        if value != default:
            given[each.name] = dict(value) if isinstance(value, Mapping) else value
    return given


def check_changes(cursor: Cursor, belongs: Mapping[str, str], allow: Collection[str]) -> None:
    """Raise if the cursor belongs to a stream that differs in more than `allow` permits."""
    allow = {allow} if isinstance(allow, str) else set(allow)
    for name in sorted(allow):
        if name not in CHANGES:
            raise ConfigError(f"unknown change {name!r}; expected some of: {', '.join(CHANGES)}.")
    if "layout" in cursor.belongs:  # a digest
        raise CursorError(
            "the cursor was written by version 0.1.0, whose readers shared the data in another "
            "way. Resume with that version, or start without the cursor, for example at the next "
            "epoch."
        )
    if not ("lengths" in cursor.belongs and "lengths" in belongs):  # known to one of them only
        belongs = {name: value for name, value in belongs.items() if name != "lengths"}
        kept = {name: value for name, value in cursor.belongs.items() if name != "lengths"}
        cursor = replace(cursor, belongs=kept)
    differing, needed = cursor.differences(belongs), list[str]()
    for name in list(differing):
        change = next((c for c, begins in CHANGES.items() if name.startswith(begins)), None)
        if change is not None and change in allow:
            del differing[name]
        elif change is not None and change not in needed:
            needed.append(change)
    fixed = any(not name.startswith(sum(CHANGES.values(), ())) for name in differing)
    if differing and (fixed or cursor.belongs.get("stream") != belongs["stream"]):
        cursor.check(belongs)
    if differing:
        names = ", ".join(map(repr, sorted(needed)))
        raise CursorError(
            f"the stream has changed since the cursor was taken: {'; '.join(differing.values())}. "
            f"Restore the settings, or pass allow={{{names}}} to load_state_dict or the trainer, "
            f"which resumes with the new ones."
        )
