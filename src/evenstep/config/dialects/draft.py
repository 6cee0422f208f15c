"""Draft: values of the native schema, each with the place that it comes from."""

from __future__ import annotations

from typing import Any

from evenstep.config.nested import difference, leaves, unflattened
from evenstep.core.layout import LAYOUTS
from evenstep.core.recipe import Recipe


class Draft:
    """The values of one recipe by their dotted paths.

    >>> draft = Draft()
    >>> draft.set("layout.max_tokens", 8192, "train.max_tokens, a.yaml:3")
    >>> draft.values, draft.origins
    ({'layout.max_tokens': 8192}, {'layout.max_tokens': 'train.max_tokens, a.yaml:3'})
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def set(self, path: str, value: Any, origin: str) -> None:
        """Set a value; None leaves the default."""
        if value is not None:
            self.values[path], self.origins[path] = value, origin

    def drop(self, path: str) -> Any:
        """Leave the default; the value that was set, or None."""
        self.origins.pop(path, None)
        return self.values.pop(path, None)

    def copy(self) -> Draft:
        """A draft with the same values."""
        made = Draft()
        made.values, made.origins = dict(self.values), dict(self.origins)
        return made

    def data(self) -> dict[str, Any]:
        """Nested data."""
        return unflattened(self.values)


def log_probs_section(train: Draft, log_probs: Draft) -> dict[str, Any]:
    """What `log_probs` must change in the recipe for training."""
    return difference(_complete(train), _complete(log_probs))


def _complete(draft: Draft) -> dict[str, Any]:
    """The values with the defaults of all keys that both kinds of layout or a recipe have."""
    kind = LAYOUTS[draft.values["layout.kind"]]
    defaults = leaves(Recipe(layout=kind(max_tokens=1)).to_dict())
    defaults |= {"layout.max_tokens": None, "limits.columns": {}}
    return unflattened({**defaults, **draft.values})
