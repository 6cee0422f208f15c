"""The vocabulary: lengths -> **segments, rows, micro-batches, cells: a `Plan`**.

Values only, numpy only. `recipe` says what a plan has to be, `plan` holds the result, `checks`
verifies it, `measures` measures it, and `bounds` says what no plan can beat.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

# Where the classes of values live that pickles written before the modules were merged may hold.
_MOVED = {
    "cursor": "step",
    "fixed_mapping": "recipe",
    "gpu": "cost",
    "layout.packed": "layout",
    "layout.padded": "layout",
    "micro_batch": "plan",
    "model_config": "models",
    "second_work": "recipe",
    "segments": "ragged",
    "topology": "recipe",
    "world": "recipe",
}


class _Moved(ModuleType):
    """Stands in `sys.modules` for a module that was merged into another, for `pickle` alone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        old = self.__name__.removeprefix(f"{__name__}.")
        return getattr(import_module(f"{__name__}.{_MOVED[old]}"), name)


for _old in _MOVED:
    sys.modules.setdefault(f"{__name__}.{_old}", _Moved(f"{__name__}.{_old}"))
