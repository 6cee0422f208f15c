"""Content: turns any item of a stream into plain tuples and bytes that can be compared."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from evenstep.core.step import Step
from evenstep.data.dataset import Lengths
from evenstep.data.stream import SampleLookup
from evenstep.errors import InputError


def content_of(value: Any) -> Any:
    """The contents of `value`, equal for values that are equal bit by bit.

    Supports steps (without their cursor), dataclasses, tensors, arrays, containers, plain values,
    and any object that defines `__eq__`.

    >>> content_of({"b": np.array([1, 2]), "a": float("nan")}) == content_of(
    ...     {"a": float("nan"), "b": np.array([1, 2])}
    ... )
    True
    >>> content_of(np.array([1, 2])) == content_of(np.array([1, 2], np.int32))
    False
    """
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return (type(value).__name__, value)
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, Step):
        return _of_step(value)
    if isinstance(value, np.generic):
        return content_of(np.asarray(value))
    if isinstance(value, np.ndarray):
        held = content_of(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return ("array", value.dtype.str, value.shape, held)
    if _is_tensor(value):
        return _of_tensor(value)
    if isinstance(value, Mapping):
        pairs = [(content_of(name), content_of(held)) for name, held in value.items()]
        return ("mapping", *sorted(pairs, key=repr))
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(map(content_of, value), key=repr))
    if isinstance(value, Sequence):
        return (type(value).__name__, *map(content_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        held = tuple(content_of(getattr(value, field.name)) for field in fields(value))
        return (type(value).__name__, held)
    if "__eq__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        return (type(value).__name__, value)
    raise InputError(
        f"items of type {type(value).__name__} cannot be compared. Pass `key`, a function from an "
        f"item to a value that can."
    )


def glimpse(value: Any) -> str:
    """A short description of an item.

    >>> glimpse(list(range(100)))
    '[0, 1, 2, 3, 4, 5, ...]'
    """
    if isinstance(value, Step):
        samples = [micro.segments.sample.tolist() for micro in value.micro_batches]
        return f"step {value.number} with samples {reprlib.repr(samples)}"
    return reprlib.repr(value)


def _of_step(step: Step) -> Any:
    lost = {reason: count for reason, count in step.lost.items() if count}
    about = (step.number, step.epoch, content_of(step.totals), content_of(lost))
    if step.batches is not None:
        return ("step", about, content_of(step.micro_batches), content_of(step.batches))
    if isinstance(step.samples, SampleLookup) and isinstance(step.samples.source, Lengths):
        return ("step", about, content_of(step.micro_batches))
    return ("step", about, content_of([step.read(k) for k in range(len(step))]))


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "detach")


def _of_tensor(value: Any) -> Any:
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    held = flat.view(torch.uint8) if flat.dtype != torch.bool else flat
    return ("tensor", str(value.dtype), tuple(value.shape), held.numpy().tobytes())
