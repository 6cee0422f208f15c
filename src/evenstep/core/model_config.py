"""The configuration of a model: a path, a mapping, an object, or a well-known name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from evenstep.core.text import short_repr, shorten, truth_value, whole_number
from evenstep.errors import ConfigError, FileError

# -------------------------------------------------------------------------------------------------
# ModelConfig: the fields of a model's configuration, in the names of Hugging Face.
# -------------------------------------------------------------------------------------------------

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
                f"{self._first(names)} in {self.where} must be a list, got {short_repr(value)}."
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
        raise ConfigError(f"{path} holds {short_repr(data)}, expected the fields of a model.")
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
        f"{where} must be a path, a mapping or a configuration object, got {short_repr(config)}."
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


# -------------------------------------------------------------------------------------------------
# Shapes of well-known models by name, in the fields of their configurations.
# -------------------------------------------------------------------------------------------------

_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
_TIED = {"tie_word_embeddings": True}
_QWEN2 = {"model_type": "qwen2", "use_sliding_window": False, "vocab_size": 152064}
_QWEN3 = {
    "model_type": "qwen3",
    "use_sliding_window": False,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
}


def _dense(base: dict[str, Any], hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        **base,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _dense(_LLAMA | _TIED, 2048, 16, 32, 8192),
    "llama-3.2-3b": _dense(_LLAMA | _TIED, 3072, 28, 24, 8192),
    "llama-3-8b": _dense(_LLAMA, 4096, 32, 32, 14336),
    "llama-3-70b": _dense(_LLAMA, 8192, 80, 64, 28672),
    "qwen2.5-1.5b": _dense(
        {**_QWEN2, **_TIED, "num_key_value_heads": 2, "vocab_size": 151936}, 1536, 28, 12, 8960
    ),
    "qwen2.5-7b": _dense({**_QWEN2, "num_key_value_heads": 4}, 3584, 28, 28, 18944),
    "qwen2.5-32b": _dense({**_QWEN2, "num_key_value_heads": 8}, 5120, 64, 40, 27648),
    "qwen2.5-72b": _dense({**_QWEN2, "num_key_value_heads": 8}, 8192, 80, 64, 29568),
    "qwen3-0.6b": _dense(_QWEN3 | _TIED, 1024, 28, 16, 3072),
    "qwen3-4b": _dense(_QWEN3 | _TIED, 2560, 36, 32, 9728),
    "qwen3-8b": _dense(_QWEN3, 4096, 36, 32, 12288),
    "qwen3-32b": _dense(_QWEN3, 5120, 64, 64, 25600),
    "qwen3-30b-a3b": {**_dense(_QWEN3_MOE, 2048, 48, 32, 6144), "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_dense(_QWEN3_MOE, 4096, 94, 64, 12288), "moe_intermediate_size": 1536},
    "gemma-3-4b": {
        **_dense(_GEMMA3, 2560, 34, 8, 10240),
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "gemma-3-27b": {
        **_dense(_GEMMA3, 5376, 62, 32, 21504),
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "mixtral-8x7b": {
        **_dense({"model_type": "mixtral"}, 4096, 32, 32, 14336),
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "deepseek-v3": {
        **_dense({"model_type": "deepseek_v3"}, 7168, 61, 128, 18432),
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
    },
}


# -------------------------------------------------------------------------------------------------
# A model's configuration by its name or path.
# -------------------------------------------------------------------------------------------------


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
        place = "the working directory" if parent == "." else shorten(parent, 300)
        raise ConfigError(
            f"{key} {short_repr(path.name)} is not a known name, and {place} has no such file. "
            f"Give the path of a config.json or of its folder, or one of: {', '.join(PRESETS)}."
        )
    return path
