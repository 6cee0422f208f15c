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
        fields = {"model_type": whole.fields.get("model_type"), **inner.fields}
        # A saved file leaves out what equals the default of a nested configuration's class.
        defaults = DEFAULTS.get(str(fields["model_type"]), {})
        return ModelConfig({**defaults, **fields}, inner.where)

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


# Shapes -------------------------------------------------------------------------------------------


def _table(text: str, **kinds: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields by name: the first line names the columns, and a point means that a field is missing.

    A row ends with the names of what it adds: those of `kinds`.

    >>> _table("name hidden_size head_dim\\nsmall 8 . tied", tied={"tie_word_embeddings": True})
    {'small': {'hidden_size': 8, 'tie_word_embeddings': True}}
    """
    head, *rows = (line.split() for line in text.strip().splitlines())
    table = {}
    for name, *cells in rows:
        fields = zip(head[1:], cells, strict=False)
        table[name] = {key: int(cell) for key, cell in fields if cell != "."}
        for kind in cells[len(head) - 1 :]:
            table[name] |= kinds[kind]
    return table


# The defaults of the classes of transformers that are nested in other configurations.
DEFAULTS: dict[str, dict[str, Any]] = _table(
    """
    name        hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size
    llama               4096            11008                32                  32      32000
    mistral             4096            14336                32                  32      32000 long
    gemma               3072            24576                28                  16     256000 g1
    gemma2              2304             9216                26                   8     256000 g2
    gemma3_text         2304             9216                26                   8     262208 g2
    clip_vision_model    768             3072                12                  12          . p32
    siglip_vision_model  768             3072                12                  12          . p16
    pixtral             1024             4096                24                  16          . p16
    """,
    long={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    g1={"num_key_value_heads": 16, "head_dim": 256},
    g2={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    p16={"patch_size": 16},
    p32={"patch_size": 32},
)

# Shapes of well-known models by name, in the fields of their configurations.
PRESETS: dict[str, dict[str, Any]] = _table(
    """
    name            hidden_size num_hidden_layers num_attention_heads intermediate_size \
                    num_key_value_heads head_dim vocab_size
    llama-3.2-1b    2048 16  32  8192  8   . 128256 llama tied
    llama-3.2-3b    3072 28  24  8192  8   . 128256 llama tied
    llama-3-8b      4096 32  32 14336  8   . 128256 llama
    llama-3-70b     8192 80  64 28672  8   . 128256 llama
    qwen2.5-1.5b    1536 28  12  8960  2   . 151936 qwen2 tied
    qwen2.5-7b      3584 28  28 18944  4   . 152064 qwen2
    qwen2.5-32b     5120 64  40 27648  8   . 152064 qwen2
    qwen2.5-72b     8192 80  64 29568  8   . 152064 qwen2
    qwen3-0.6b      1024 28  16  3072  8 128 151936 qwen3 tied
    qwen3-4b        2560 36  32  9728  8 128 151936 qwen3 tied
    qwen3-8b        4096 36  32 12288  8 128 151936 qwen3
    qwen3-32b       5120 64  64 25600  8 128 151936 qwen3
    qwen3-30b-a3b   2048 48  32  6144  4 128 151936 qwen3_moe w768
    qwen3-235b-a22b 4096 94  64 12288  4 128 151936 qwen3_moe w1536
    gemma-3-4b      2560 34   8 10240  4 256 262208 gemma3
    gemma-3-27b     5376 62  32 21504 16 128 262208 gemma3
    gpt-oss-20b     2880 24  64  2880  8  64 201088 gpt_oss e32
    gpt-oss-120b    2880 36  64  2880  8  64 201088 gpt_oss e128
    mixtral-8x7b    4096 32  32 14336  8   .  32000 mixtral
    deepseek-v3     7168 61 128 18432  .   . 129280 deepseek_v3
    """,
    llama={"model_type": "llama"},
    qwen2={"model_type": "qwen2", "use_sliding_window": False},
    qwen3={"model_type": "qwen3", "use_sliding_window": False},
    qwen3_moe={
        "model_type": "qwen3_moe",
        "use_sliding_window": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    gemma3={
        "model_type": "gemma3_text",
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    gpt_oss={"model_type": "gpt_oss", "sliding_window": 128, "num_experts_per_tok": 4},
    mixtral={"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    deepseek_v3={
        "model_type": "deepseek_v3",
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
    },
    tied={"tie_word_embeddings": True},
    w768={"moe_intermediate_size": 768},
    w1536={"moe_intermediate_size": 1536},
    e32={"num_local_experts": 32},
    e128={"num_local_experts": 128},
)


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
        exists = bool(model) and path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        exists = False
    if not exists:
        parent = str(path.parent)
        place = "the working directory" if parent == "." else shorten(parent, 300)
        raise ConfigError(
            f"{key} {short_repr(path.name)} is not a known name, and {place} has no such file. "
            f"Give the path of a config.json or of its folder, or one of: {', '.join(PRESETS)}."
        )
    return path
