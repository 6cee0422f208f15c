"""Checks of single fields. Messages say what a field must be and what it is."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np

from evenstep.core.glimpse import glimpse
from evenstep.errors import ConfigError

MOST = 2**40  # above any budget; sums still fit 64 bits
MOST_RANKS = 2**20
_SEEDS = 2**63  # numpy and torch accept smaller seeds


def whole_number(path: str, value: object, *, least: int = 1, most: int = MOST) -> int:
    """An integer in [least, most], also of numpy, as a plain int.

    >>> import numpy as np
    >>> whole_number("samples", np.int64(3))
    3
    """
    number = _plain(value)
    if number is None or not least <= number <= most:
        shown = glimpse(value if number is None else number)
        raise ConfigError(f"{path} must be an integer in [{least}, {most}], got {shown}.")
    return number


def whole_field(owner: object, path: str, *, least: int = 1, most: int = MOST) -> None:
    """Convert a field of a frozen dataclass to a plain int, or raise.

    The path "pool.samples" is the field `samples`, as messages call it.
    """
    name = path.rpartition(".")[2]
    value = whole_number(path, getattr(owner, name), least=least, most=most)
    object.__setattr__(owner, name, value)


def seed_number(value: object) -> int:
    """A valid seed as a plain int."""
    number = _plain(value)
    if number is None:
        raise ConfigError(f"seed must be an integer in [0, 2**63), got {glimpse(value)}.")
    if not 0 <= number < _SEEDS:
        raise ConfigError(f"seed must be in [0, 2**63), got {glimpse(number)}.")
    return number


def truth_value(path: str, value: object) -> bool:
    """A bool, also of numpy, as a plain bool. Text such as "no" is refused.

    >>> truth_value("shuffle", np.False_)
    False
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{path} must be true or false, got {glimpse(value)}.")
    return bool(value)


def truth_field(owner: object, path: str) -> None:
    """Convert a field of a frozen dataclass to a plain bool, or raise."""
    name = path.rpartition(".")[2]
    object.__setattr__(owner, name, truth_value(path, getattr(owner, name)))


def real_field(owner: object, path: str) -> float:
    """Convert a field of a frozen dataclass to a plain float, or raise; return it.

    The path "cost.per_token" is the field `per_token`. 3 becomes 3.0, so that equal numbers are
    equal data.
    """
    name = path.rpartition(".")[2]
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{path} must be a number, got {glimpse(value)}.")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    object.__setattr__(owner, name, number)
    return number


def one_of(path: str, value: object, words: Any) -> None:
    """Raise if `value` is not one of the words of a `Literal`."""
    if value not in get_args(words):
        raise ConfigError(
            f"unknown {path} {glimpse(value)}; expected one of: {', '.join(get_args(words))}."
        )


def _plain(value: object) -> int | None:
    """An integer as a plain int; None for anything else, including bools."""
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
