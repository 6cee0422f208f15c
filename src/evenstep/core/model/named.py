"""A model's configuration by its name or path."""

from __future__ import annotations

from pathlib import Path

from evenstep.core.glimpse import glimpse
from evenstep.core.model.config import ModelConfig, read_model_config
from evenstep.core.model.presets import PRESETS
from evenstep.errors import ConfigError


def named_config(model: str) -> ModelConfig:
    """The language model's configuration: a known name, a `config.json` or its folder.

    >>> named_config("llama-3-8b").whole("hidden_size")
    4096
    """
    if model in PRESETS:
        return ModelConfig(PRESETS[model], model)
    path = Path(model)
    try:
        found = bool(model) and path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        found = False
    if not found:
        raise ConfigError(
            f"--model {glimpse(model)} is neither a file nor a known name. Give the path of a "
            f"config.json or of its folder, or one of: {', '.join(PRESETS)}."
        )
    return read_model_config(path).section("text")
