"""Words into values: YAML file, `key=value` overrides -> **`Recipe`**.

A recipe is its own configuration, so there is no schema beside it: keys are the fields of
`Recipe` and its parts, and what they refuse is refused here, all faults at once.
"""

from evenstep.config.decode import recipe_from
from evenstep.config.load import load_mapping, load_recipe
from evenstep.config.override import overridden

__all__ = ["load_mapping", "load_recipe", "overridden", "recipe_from"]
