"""Configuration: YAML or TOML file, `key=value` overrides -> **`Recipe`**, **`Settings`**.

native    the keys are the fields of `Recipe` and its parts, `log_probs`, `stream` and `trainer`
dialects  files of other systems, one module each

All faults are reported at once.
"""

from evenstep.config.decode import recipe_from
from evenstep.config.dialects import DIALECTS
from evenstep.config.faults import FaultsError
from evenstep.config.load import Loaded, load, load_mapping, load_recipe, load_settings
from evenstep.config.native import native_data, settings_from
from evenstep.config.override import overridden
from evenstep.config.settings import Settings, StreamSettings, TrainerSettings
from evenstep.config.write import native_yaml

__all__ = [
    "DIALECTS",
    "FaultsError",
    "Loaded",
    "Settings",
    "StreamSettings",
    "TrainerSettings",
    "load",
    "load_mapping",
    "load_recipe",
    "load_settings",
    "native_data",
    "native_yaml",
    "overridden",
    "recipe_from",
    "settings_from",
]
