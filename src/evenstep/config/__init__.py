"""Configuration: YAML file, `key=value` overrides -> **`Recipe`**.

Keys are the fields of `Recipe` and its parts; there is no separate schema. All errors are reported
at once.
"""

from evenstep.config.decode import recipe_from
from evenstep.config.load import load_mapping, load_recipe
from evenstep.config.override import overridden

__all__ = ["load_mapping", "load_recipe", "overridden", "recipe_from"]
