"""The model classes of the installed transformers that a survey measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model class and the types that transformers maps to it."""

    name: str
    types: tuple[str, ...]
    task: str
    """causal or vision."""

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.name)


def kinds() -> list[Kind]:
    """Every causal language model and vision-language model, each class once, sorted by type.

    A class of both mappings is a vision-language model.
    """
    types: dict[str, list[str]] = {}
    vision = dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    for kind, name in [*vision.items(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()]:
        types.setdefault(name, []).append(kind)
    tasks = {name: "vision" if name in vision.values() else "causal" for name in types}
    found = (Kind(name, tuple(dict.fromkeys(types[name])), tasks[name]) for name in types)
    return sorted(found, key=lambda kind: kind.types)


def kind_of(model_type: str) -> Kind:
    """The class of this type."""
    return next(kind for kind in kinds() if model_type in kind.types)
