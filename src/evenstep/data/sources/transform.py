"""Transforms: functions from an item to samples, and what seeded ones are told."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from evenstep.data.sources.source import Draw, Sample
from evenstep.errors import InputError

Transform: TypeAlias = Callable[..., Sample | list[Sample]]
"""From an item to one sample, or to a list of several. A seeded transform also has parameters named
`sample_id`, `epoch` or `seed`."""


@dataclass(frozen=True, slots=True)
class ItemTransform:
    """Calls a transform (None: items are samples) with what its signature asks for.

    >>> def crop(tokens, *, sample_id, epoch):
    ...     return tokens[(sample_id + epoch) % 2 :]
    >>> ItemTransform.of(crop)([5, 6, 7], Draw(sample_id=3, epoch=0, seed=0))
    [6, 7]
    """

    function: Transform | None
    takes: tuple[str, ...] = ()
    """The fields of a `Draw` that the function takes."""

    @classmethod
    def of(cls, function: Transform | None) -> ItemTransform:
        """With what is found in the signature of `function`. Its first parameter is the item, and
        arguments that a `functools.partial` has fixed stay as they are."""
        if function is None:
            return cls(None)
        fixed = set(function.keywords) if isinstance(function, partial) else set()
        named = parameters_of(function, skip=1)
        return cls(function, tuple(n for n in Draw._fields if n in named and n not in fixed))

    @property
    def seeded(self) -> bool:
        """Whether samples depend on more than their item."""
        return bool(self.takes)

    def __call__(self, item: Any, draw: Draw | None = None) -> Sample | list[Sample]:
        if self.function is None:
            return item
        if not self.takes:
            return self.function(item)
        if draw is None:
            raise InputError(
                f"the transform takes {', '.join(self.takes)}, which only a stream knows. Read the "
                f"source with a stream, or call drawn(item, Draw(...)) of the source."
            )
        return self.function(item, **{name: getattr(draw, name) for name in self.takes})


def parameters_of(function: Callable[..., Any], skip: int = 0) -> set[str]:
    """Names of the parameters that can be passed by name, without the first `skip`.

    >>> sorted(parameters_of(lambda row, epoch, *, seed: row, skip=1))
    ['epoch', 'seed']
    """
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return set()  # some builtins have no signature
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    first = [p for p in found if p.kind != inspect.Parameter.KEYWORD_ONLY][:skip]
    return {p.name for p in found if p.kind in named and p not in first}
