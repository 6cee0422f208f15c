"""Decode plain data into a `Recipe`, and say everything that is wrong with it at once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from evenstep.core.cost import Cost
from evenstep.core.layout import LAYOUTS, Layout, Packed
from evenstep.core.recipe import Limits, Recipe, Steps
from evenstep.core.topology import Topology
from evenstep.core.validate import MOST
from evenstep.errors import ConfigError

DEFAULT_KIND = "packed"

_PARTS: dict[str, type] = {"topology": Topology, "steps": Steps, "cost": Cost, "limits": Limits}


def recipe_from(data: Mapping[str, Any], source: str = "") -> Recipe:
    """The recipe that plain data describes; without `layout.kind` the layout is packed.

    >>> recipe_from({"layout": {"max_tokens": 8192}, "topology": {"dp": 8}}).topology.dp
    8
    >>> recipe_from({"layout": {"max_tokens": 0}, "topology": {"pd": 8}})
    Traceback (most recent call last):
    evenstep.errors.ConfigError: the recipe has 2 faults, so nothing was planned: (1) ...
    """
    rest = dict(data)
    layout, faults = _layout(rest.pop("layout", {}))
    # A layout that fails leaves this one in its place, so that the other faults still show.
    rest["layout"] = layout or Packed(max_tokens=MOST)
    try:
        recipe = cast(Recipe, _adapter(Recipe).validate_python(rest))
    except ValidationError as error:
        faults += [_sentence(detail, data) for detail in error.errors(include_url=False)]
    if not faults:
        return recipe
    if len(faults) == 1:
        raise ConfigError(f"{source}: {faults[0]}" if source else faults[0])
    numbered = " ".join(f"({number}) {fault}" for number, fault in enumerate(faults, 1))
    raise ConfigError(
        f"{source or 'the recipe'} has {len(faults)} faults, so nothing was planned: {numbered}"
    )


def _layout(data: object) -> tuple[Layout | None, list[str]]:
    """The layout, or None and what is wrong with it."""
    if not isinstance(data, Mapping):
        return None, [_not_a_mapping("layout", data)]
    kind = data.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str) or kind not in LAYOUTS:
        return None, [_unknown_word("layout.kind", kind, " or ".join(map(repr, LAYOUTS)))]
    try:
        return _adapter(LAYOUTS[kind]).validate_python(dict(data)), []
    except ValidationError as error:
        details = error.errors(include_url=False)
        return None, [_sentence(detail, {"layout": data}, ("layout",)) for detail in details]


def _adapter(kind: type) -> TypeAdapter[Any]:
    # pydantic takes a config for a union but not for a bare dataclass; None itself never arrives.
    either = cast(Any, kind | None)
    return TypeAdapter(either, config=ConfigDict(extra="forbid", allow_inf_nan=False))


def _sentence(detail: ErrorDetails, data: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> str:
    """One fault with its dotted path, its consequence and its remedy."""
    place = (*prefix, *(str(part) for part in detail["loc"]))
    path, value = ".".join(place), detail["input"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "value_error":
            return str(context["error"])  # already names its field
        case "unexpected_keyword_argument":
            return _unknown_key(place, data)
        case "missing":
            return f"{path} is missing and has no default. Set it with --set {path}=VALUE."
        case "literal_error":
            return _unknown_word(path, value, context["expected"])
        case "dataclass_type" | "dict_type":
            return _not_a_mapping(path, value)
        case _:
            kind = detail["type"].split("_")[0]
            needed = {"int": "a whole number", "float": "a number", "bool": "true or false"}
            return (
                f"{path} is {value!r}, which it cannot be. It should be "
                f"{needed.get(kind, detail['msg'].removeprefix('Input should be '))}."
            )


def _unknown_key(place: tuple[str, ...], data: Mapping[str, Any]) -> str:
    *parents, key = place
    if parents == ["layout"]:
        kind = data["layout"].get("kind", DEFAULT_KIND)
        owner, known = f"a {kind} layout", _fields(LAYOUTS[kind])
    elif parents:
        owner, known = ".".join(parents), _fields(_PARTS[parents[0]])
    else:
        owner, known = "a recipe", _fields(Recipe)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return (
        f"{'.'.join(place)} is unknown, so it would have no effect. {hint}"
        f"{owner[0].upper()}{owner[1:]} knows {', '.join(known)}."
    )


def _unknown_word(path: str, value: object, expected: str) -> str:
    return f"{path} is {value!r}, which does not exist. Use {expected}."


def _not_a_mapping(path: str, value: object) -> str:
    return f"{path} is {value!r} but holds keys of its own. Write it as {path}.KEY=VALUE."


def _fields(owner: type) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)]
