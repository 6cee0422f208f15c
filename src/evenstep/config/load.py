"""Load recipes from files and overrides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenstep.config.decode import recipe_from
from evenstep.config.model import beside, with_model
from evenstep.config.override import overridden
from evenstep.config.yaml import parse_yaml
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, FileError


def load_recipe(
    path: Path | None = None,
    overrides: Iterable[str] = (),
    base: Mapping[str, Any] | None = None,
    model: str | None = None,
) -> Recipe:
    """The recipe of a YAML file, or of `base` without a file, with overrides applied.

    `model` is the name of a known model or the path of its configuration, which gives the cost.
    A path is relative to the working directory; one in the file, to the file's folder.

    >>> load_recipe(overrides=["layout.max_tokens=8192", "overflow=split"]).overflow
    'split'
    """
    data = beside(load_mapping(path), path.parent) if path else dict(base or {})
    overrides = list(overrides)
    if model is not None:
        data = with_model(data, model, path, overrides)
    return recipe_from(overridden(data, overrides), str(path) if path else "")


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file gives an empty one."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}). Check the path given to --config."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text. Give --config a YAML file.") from None
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(
            f"{path} holds {type(data).__name__} data, expected keys that are words. "
            f"Write for example `layout: {{max_tokens: 8192}}`."
        )
    return data
