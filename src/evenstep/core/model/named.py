"""A model's configuration by its name or path."""

from __future__ import annotations

from pathlib import Path

from evenstep.core.glimpse import cut, glimpse
from evenstep.core.model.config import ModelConfig, read_model_config
from evenstep.core.model.presets import PRESETS
from evenstep.errors import ConfigError


def named_config(model: str) -> ModelConfig:
    """The language model's configuration: a known name, a `config.json` or its folder.

    >>> named_config("llama-3-8b").whole("hidden_size")
    4096
    """
    path = path_of_model(model, "--model")
    if path is None:
        return ModelConfig(PRESETS[model], model)
    return read_model_config(path).section("text")


def path_of_model(model: str, key: str) -> Path | None:
    """The path of a model's configuration; None for a known name. `key` is the user's word for it.

    >>> path_of_model("llama-3-8b", "--model") is None
    True
    """
    if model in PRESETS:
        return None
    path = Path(model)
    try:
        found = bool(model) and path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        found = False
    if not found:
        parent = str(path.parent)
        place = "the working directory" if parent == "." else cut(parent, 300)
        raise ConfigError(
            f"{key} {glimpse(path.name)} is not a known name, and {place} has no such file. Give "
            f"the path of a config.json or of its folder, or one of: {', '.join(PRESETS)}."
        )
    return path
