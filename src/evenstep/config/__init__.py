"""Configuration: YAML or TOML file, `key=value` overrides -> **`Recipe`**, **`Settings`**.

native    the keys are the fields of `Recipe` and its parts, and the sections of `Settings`
dialects  files of other systems, one module each

All faults are reported at once.

>>> from evenstep.config import recipe_from
>>> recipe_from({"layout": {"max_tokens": 8192}}).layout.max_tokens
8192
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.config.decode import recipe_from
    from evenstep.config.faults import FaultsError
    from evenstep.config.load import Loaded, load_file, load_recipe, load_settings
    from evenstep.config.native import native_data, settings_from
    from evenstep.config.override import overridden
    from evenstep.config.settings import Settings, StreamSettings, TrainerSettings
    from evenstep.config.training import LoraSettings, ModelSettings, OptimizerSettings
    from evenstep.config.write import native_yaml

__all__ = [
    "FaultsError",
    "Loaded",
    "LoraSettings",
    "ModelSettings",
    "OptimizerSettings",
    "Settings",
    "StreamSettings",
    "TrainerSettings",
    "load_file",
    "load_recipe",
    "load_settings",
    "native_data",
    "native_yaml",
    "overridden",
    "recipe_from",
    "settings_from",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "decode": ["recipe_from"],
            "faults": ["FaultsError"],
            "load": ["Loaded", "load_file", "load_recipe", "load_settings"],
            "native": ["native_data", "settings_from"],
            "override": ["overridden"],
            "settings": ["Settings", "StreamSettings", "TrainerSettings"],
            "training": ["LoraSettings", "ModelSettings", "OptimizerSettings"],
            "write": ["native_yaml"],
        },
        extra="cli",
    )
