"""A cost by the name of a model or the path of its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenstep.core.cost import Cost
from evenstep.core.models import PRESETS, path_of_model
from evenstep.core.text import short_repr, shorten
from evenstep.errors import ConfigError, FileError

_PATHS = (
    ("cost", "model"),
    ("data", "paths"),
    ("data", "validation"),
    ("data", "tokenizer"),
    ("data", "template"),
    ("model", "path"),
    ("trainer", "out"),
    ("trainer", "save"),
)
"""The keys of a file that hold paths."""
BESIDE = "per_micro_batch"  # the only key that may stand beside a model


def model_cost(model: object) -> Cost:
    """The cost of a known model, or of a `config.json` or its folder.

    >>> model_cost("llama-3-8b") == Cost.named("llama-3-8b")
    True
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(f"cost.model must be a name or a path, got {short_repr(model)}.")
    path = path_of_model(model, "cost.model")
    if path is None:
        return Cost.named(model)
    try:
        return Cost.of_config(path)
    except (ConfigError, FileError) as error:
        raise ConfigError(f"cost.model: {error}") from None


def beside(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The data of a file, with its paths taken relative to the file's folder.

    >>> beside({"cost": {"model": "config.json"}}, Path("recipes"))
    {'cost': {'model': 'recipes/config.json'}}
    """
    found = dict(data)
    for section, key in _PATHS:
        inside = found.get(section)
        if isinstance(inside, Mapping) and key in inside:
            found[section] = {**inside, key: _moved(inside[key], folder)}
    return found


def _moved(value: Any, folder: Path) -> Any:
    """A path, or each of several, in a folder; anything else as it is."""
    if isinstance(value, list):
        return [_moved(each, folder) for each in value]
    if not isinstance(value, str) or not value or value in PRESETS:
        return value
    return str(folder / value) + ("/" if value.endswith("/") else "")


def with_model(
    data: Mapping[str, Any], model: str, file: Path | None, overrides: Iterable[str]
) -> dict[str, Any]:
    """The data with the model of `--model`, which the user gives at most once.

    It replaces the cost of a saved plan, and is refused beside another cost of the user.
    """
    cost = data.get("cost") if file is not None else None
    if cost is not None and (not isinstance(cost, Mapping) or set(cost) - {BESIDE}):
        raise ConfigError(f"--model and cost in {file} both set the cost. Remove one of them.")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key.partition(".")[0] == "cost" and key != f"cost.{BESIDE}":
            raise ConfigError(
                f"--model and --set {shorten(key)} both set the cost. Remove one of them."
            )
    return {**data, "cost": {**(cost or {}), "model": model}}
