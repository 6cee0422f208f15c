"""ModelConfig: the fields of a model's configuration, in the names of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from evenstep.core.glimpse import glimpse
from evenstep.core.validate import truth_value, whole_number
from evenstep.errors import ConfigError, FileError

_TEXT = ("text_config", "llm_config", "language_config")
_VISION = ("vision_config",)
_MOST_LAYERS = 100_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Plain fields and the place they come from, which messages name.

    A field that is absent or null counts as missing.

    >>> config = ModelConfig({"model_type": "gpt2", "n_embd": 768}, "config.json")
    >>> config.whole("hidden_size", "n_embd")
    768
    >>> config.whole("vocab_size")
    Traceback (most recent call last):
    evenstep.errors.ConfigError: config.json has no vocab_size. Add it, or pass the loaded ...
    """

    fields: Mapping[str, Any]
    where: str

    @property
    def model_type(self) -> str:
        """The name of the architecture, such as "llama"."""
        return str(self._value(("model_type",)))

    def has(self, *names: str) -> bool:
        """Whether any of these fields is given."""
        return any(self.fields.get(name) is not None for name in names)

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of these fields that is given, as an integer; else `default`."""
        if default is not None and not self.has(*names):
            return default
        name = self._first(names)
        return whole_number(f"{name} in {self.where}", self._value(names), least=least)

    def truth(self, name: str, default: bool) -> bool:
        """A field that is true or false; `default` if it is missing."""
        value = self.fields.get(name)
        return default if value is None else truth_value(f"{name} in {self.where}", value)

    def entries(self, *names: str) -> list[Any]:
        """The first of these fields that is given, as a list; empty if none is given."""
        if not self.has(*names):
            return []
        value = self._value(names)
        if not isinstance(value, list | tuple):
            raise ConfigError(
                f"{self._first(names)} in {self.where} must be a list, got {glimpse(value)}."
            )
        return list(value)

    def layers(self, *names: str) -> int:
        """The number of layers."""
        return whole_number(f"{names[0]} in {self.where}", self._value(names), most=_MOST_LAYERS)

    def section(self, part: str) -> ModelConfig:
        """The configuration of the language model ("text") or of the vision tower ("vision").

        A nested configuration without a model type has that of the whole.
        """
        names = _VISION if part == "vision" else _TEXT
        whole = self._nested("thinker_config") if self.has("thinker_config") else self
        name = next((name for name in names if whole.has(name)), None)
        if name is None:
            if part == "vision" and not whole.has("patch_size"):
                raise ConfigError(f"{self.where} has no vision_config. Use part='text'.")
            return whole
        inner = whole._nested(name)
        given = {"model_type": whole.fields.get("model_type"), **inner.fields}
        # A saved file leaves out what equals the default of a nested configuration's class.
        defaults = DEFAULTS.get(str(given["model_type"]), {})
        return ModelConfig({**defaults, **given}, inner.where)

    def _nested(self, name: str) -> ModelConfig:
        return ModelConfig(_mapping(self.fields[name], f"{name} in {self.where}"), self.where)

    def _first(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if self.fields.get(name) is not None), names[0])

    def _value(self, names: tuple[str, ...]) -> Any:
        value = self.fields.get(self._first(names))
        if value is None:
            raise ConfigError(
                f"{self.where} has no {names[0]}. Add it, or pass the loaded configuration object, "
                f"which has all defaults."
            )
        return value


def read_model_config(config: object) -> ModelConfig:
    """The fields of a `config.json`, of the folder that holds it, of a mapping or of an object.

    >>> read_model_config({"model_type": "llama"}).model_type
    'llama'
    """
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        return _read(path / "config.json" if path.is_dir() else path)
    return ModelConfig(_mapping(config, "the configuration"), "the configuration")


def _read(path: Path) -> ModelConfig:
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}). Give the path of a model's "
            f"config.json or of its folder."
        ) from None
    except (ValueError, RecursionError):
        raise FileError(f"{path} is not JSON. Give the path of a model's config.json.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {glimpse(data)}, expected the fields of a model.")
    return ModelConfig(data, str(path))


def _mapping(config: object, where: str) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, type):
        if callable(getattr(config, "to_dict", None)):
            return _mapping(config.to_dict(), where)  # type: ignore[attr-defined]
        if is_dataclass(config):
            return {field.name: getattr(config, field.name) for field in fields(config)}
        if hasattr(config, "__dict__"):
            return vars(config)
    raise ConfigError(
        f"{where} must be a path, a mapping or a configuration object, got {glimpse(config)}."
    )


# The defaults of the classes of transformers that are nested in other configurations.
DEFAULTS: dict[str, dict[str, int | None]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
    },
    "pixtral": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
    },
}
