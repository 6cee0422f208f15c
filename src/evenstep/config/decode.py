"""Decode plain data into a `Recipe`; one error reports all faults."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, cast

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticKnownError, SchemaValidator, core_schema

from evenstep.config.faults import FaultsError, not_a_mapping, unknown_key, unknown_word
from evenstep.config.model import BESIDE, model_cost
from evenstep.config.settings import StreamSettings, TrainerSettings
from evenstep.config.training import LoraSettings, ModelSettings, OptimizerSettings
from evenstep.config.yaml import is_number
from evenstep.core.cost import Cost
from evenstep.core.layout import LAYOUTS, PACKER_NAMES, Layout, Packed
from evenstep.core.recipe import Limits, Recipe, SecondWork, Sharing, Steps, Topology
from evenstep.core.text import MOST, short_repr, shorten
from evenstep.data.corpus import Corpus
from evenstep.data.pool import Pool
from evenstep.errors import ConfigError

DEFAULT_KIND = "packed"

_LONGEST_HINT = 40

_PARTS: dict[str, type] = {
    "topology": Topology,
    "steps": Steps,
    "cost": Cost,
    "limits": Limits,
    "second_work": SecondWork,
    "second_work.cost": Cost,
    "sharing": Sharing,
    "stream": StreamSettings,
    "stream.pool": Pool,
    "model": ModelSettings,
    "model.lora": LoraSettings,
    "data": Corpus,
    "optimizer": OptimizerSettings,
    "trainer": TrainerSettings,
}


def recipe_from(data: Mapping[str, Any], source: str = "") -> Recipe:
    """Decode plain data into a recipe; the layout is packed unless `layout.kind` says otherwise.

    >>> recipe_from({"layout": {"max_tokens": 8192}, "topology": {"dp": 8}}).topology.dp
    8
    >>> recipe_from({"layout": {"max_tokens": 0}, "topology": {"pd": 8}})
    Traceback (most recent call last):
    evenstep.config.faults.FaultsError: the recipe has 2 faults:
      (1) ...
    """
    recipe, faults = decode_recipe(data)
    if faults:
        raise FaultsError(faults, source)
    return recipe


def decode_recipe(data: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe and no faults, or the faults."""
    rest = dict(data)
    layout, faults = _layout(rest.pop("layout", {}))
    # An invalid layout is replaced by a valid one, so that the faults of other keys are found.
    rest["layout"] = layout or Packed(max_tokens=MOST)
    if isinstance(rest.get("cost"), Mapping) and "model" in rest["cost"]:
        rest["cost"], unpriced = _model(rest["cost"])
        faults += unpriced
    recipe, others = decode(Recipe, rest, ())
    return cast(Recipe, recipe), faults + others


def _layout(data: object) -> tuple[Layout | None, list[str]]:
    """The layout, or None and its faults."""
    if not isinstance(data, Mapping):
        return None, [not_a_mapping("layout", data)]
    kind = data.get("kind", DEFAULT_KIND)
    if not isinstance(kind, str) or kind not in LAYOUTS:
        return None, [unknown_word("layout.kind", kind, LAYOUTS)]
    layout, faults = decode(LAYOUTS[kind], data, ("layout",))
    packer = data.get("packer")
    if isinstance(packer, str) and ":" in packer:  # a function, which only Python can pass
        faults.append(unknown_word("layout.packer", packer, PACKER_NAMES))
    return (None if faults else layout), faults


def _model(data: Mapping[str, Any]) -> tuple[Cost, list[str]]:
    """The cost of `cost.model`, or another one and the faults."""
    rest = {key: value for key, value in data.items() if key != "model"}
    priced = [str(key) for key in rest if key in _fields(Cost) and key != BESIDE]
    faults = [
        f"cost.{key} cannot stand beside cost.model, which sets it. Remove one of them."
        for key in priced
    ]
    beside = {key: value for key, value in rest.items() if key not in priced}
    added, others = decode(Cost, beside, ("cost",))
    faults += others
    try:
        cost = model_cost(data["model"])
    except ConfigError as error:
        return Cost(), [*faults, str(error)]
    if faults:
        return cost, faults
    return dataclasses.replace(cost, per_micro_batch=added.per_micro_batch), []


def decode(kind: type, data: Mapping[str, Any], prefix: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The object that `data` describes, or None, and all its faults.

    A class raises at its first fault. The faulty key is then removed and the rest is tried again:
    {dp: 0, cp: 0} reports dp, then {cp: 0} reports cp.
    """
    rest = copy.deepcopy(dict(data))
    faults: list[str] = []
    removed: list[tuple[str, ...]] = []
    while True:
        try:
            return _validator(kind).validate_python(rest), faults
        except ValidationError as error:
            details = error.errors(include_url=False)
        before = len(removed)
        seen: set[tuple[str, ...]] = set()
        for detail in details:
            sentence = _sentence(detail, kind, prefix)
            if detail["type"] != "value_error" and _keys(detail, prefix) in seen:
                continue  # a further member of a union
            seen.add(_keys(detail, prefix))
            # A fault that names a field removed earlier may be a consequence of the removal.
            ours = detail["type"] in ("value_error", "missing")
            consequence = ours and _mentions(sentence, removed[:before])
            if not consequence and sentence not in faults:
                faults.append(sentence)
            path = _path(detail, sentence, prefix)
            if _remove(rest, path[len(prefix) :]):
                removed.append(path)
        if len(removed) == before:
            return None, faults


def _path(detail: ErrorDetails, sentence: str, prefix: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the faulty key. Our own messages begin with it: "seed must be in ..."."""
    if detail["type"] == "value_error":
        named = re.match(r"(?:unknown )?([\w.]+)[ =]", sentence)
        return tuple(named[1].split(".")) if named else prefix
    return _keys(detail, prefix)


def _keys(detail: ErrorDetails, prefix: tuple[str, ...]) -> tuple[str, ...]:
    """The keys that lead to a value, without pydantic's marks for keys, members of unions and
    places in a list."""
    loc: list[Any] = list(detail["loc"])
    if loc and isinstance(loc[-1], int) and "key" not in detail["type"]:
        loc.pop()
    loc = [str(part) for part in loc]
    while loc and (loc[-1] in ("str", "callable") or "[" in loc[-1]):
        loc.pop()
    return (*prefix, *loc)


def _remove(data: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Remove the key at `path`; False if there is none."""
    if not path:
        return False
    inner: Any = data
    for parent in path[:-1]:
        inner = inner.get(parent) if isinstance(inner, dict) else None
    keys = [key for key in inner if str(key) == path[-1]] if isinstance(inner, dict) else []
    for key in keys:
        del inner[key]
    return bool(keys)


def _mentions(sentence: str, paths: Iterable[tuple[str, ...]]) -> bool:
    dotted = (re.escape(".".join(path)) for path in paths)
    return any(re.search(rf"(?<![\w.]){path}(?![\w])", sentence) for path in dotted)


@cache
def _validator(kind: type) -> SchemaValidator:
    # pydantic accepts a config for a union but not for a bare dataclass; data is never None.
    either = cast(Any, kind | None)
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    return SchemaValidator(_literal(TypeAdapter(either, config=config).core_schema))


def _literal(schema: Any) -> Any:
    """A schema that does not convert between text, numbers and booleans.

    pydantic's strict mode would also refuse 1e4 as an integer and a mapping as a dataclass.
    """
    if isinstance(schema, list):
        return [_literal(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _literal(value) for key, value in schema.items()}
    match schema.get("type"):
        case "int":
            return core_schema.no_info_before_validator_function(_integer, schema)
        case "float":
            return core_schema.no_info_before_validator_function(_number, schema)
        case "bool":
            return core_schema.no_info_before_validator_function(_boolean, schema)
    return schema


def _integer(value: object) -> object:
    if isinstance(value, str | bytes | bool | np.bool_):
        raise PydanticKnownError("int_type")
    return value


def _number(value: object) -> object:
    if isinstance(value, str | bytes | bool | np.bool_):
        raise PydanticKnownError("float_type")
    return value


def _boolean(value: object) -> object:
    if not isinstance(value, bool | np.bool_):
        raise PydanticKnownError("bool_type")
    return value


def _sentence(detail: ErrorDetails, kind: type, prefix: tuple[str, ...]) -> str:
    """One fault: its dotted path, the expected and the given value, and how to write it."""
    keys = _keys(detail, prefix)
    path, value = shorten(".".join(keys)), detail["input"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "value_error":
            return _named(str(context["error"]), prefix)
        case "unexpected_keyword_argument":
            return _unknown_key(keys, kind)
        case "missing" if isinstance(detail["loc"][-1], int):
            return f"{path} has too few values, got {short_repr(value)}. Add the others."
        case "missing":
            return f"{path} is missing. Set it with --set {path}=VALUE."
        case "literal_error":
            return unknown_word(path, value, re.findall(r"'(\w+)'", context["expected"]))
        case "string_type" if keys[-1] == "packer":
            return unknown_word(path, value, PACKER_NAMES)
        case "string_type" if str(detail["loc"][-1]) == "[key]":
            return f"{path} is not a known key. Write keys as words."
        case "invalid_key":
            return f"{path} is not a known key. Write keys as words."
        case "dataclass_type" | "dict_type":
            return not_a_mapping(path, value)
        case "int_type" | "int_from_float":
            expected, hint = "an integer", _as_number(value)
        case "float_type":
            expected, hint = "a number", _as_number(value)
        case "bool_type":
            expected, hint = "true or false", _as_boolean(value)
        case _:
            expected, hint = detail["msg"].removeprefix("Input should be "), ""
    return f"{path} must be {expected}, got {short_repr(value)}.{hint}"


def _named(sentence: str, prefix: tuple[str, ...]) -> str:
    """The sentence of a class, which names its field; a pool does not know that it is a stream's.

    >>> _named("pool.samples must be an integer.", ("stream",))
    'stream.pool.samples must be an integer.'
    """
    if prefix != ("stream",):
        return sentence
    return re.sub(r"^(unknown )?(pool\.|seed )", r"\1stream.\2", sentence)


def _as_number(value: object) -> str:
    """How to write text that YAML does not read as a number: " Write 10000 or 0o10000."."""
    if not isinstance(value, str) or len(value) > _LONGEST_HINT:
        return ""
    if is_number(value):
        return f" Write {value} without quotes."
    if re.fullmatch("0[0-9]+", value):
        digits = value.lstrip("0") or "0"
        octal = set(digits) <= set("01234567") and digits != "0"
        return f" Write {digits} or 0o{digits}." if octal else f" Write {digits}."
    if re.fullmatch("0b[01]+", value):
        return f" Write {int(value, 2)}."
    return ""


def _as_boolean(value: object) -> str:
    match str(value)[:_LONGEST_HINT].lower():
        case "true" | "yes" | "on" | "y" | "1":
            return " Write true."
        case "false" | "no" | "off" | "n" | "0":
            return " Write false."
    return ""


def _unknown_key(path: tuple[str, ...], kind: type) -> str:
    parents = list(path[:-1])
    if parents == ["layout"]:
        word = next(word for word, layout in LAYOUTS.items() if layout is kind)
        owner, known = f"a {word} layout", _fields(kind)
    elif parents:
        owner, known = ".".join(parents), _fields(_PARTS[".".join(parents)])
        known += ["model"] if parents == ["cost"] else []
    else:
        owner, known = "a recipe", _fields(Recipe)
    return unknown_key(shorten(".".join(path)), owner[0].upper() + owner[1:], known)


def _fields(owner: type) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)]
