"""What a field may hold, said in one way: fault, consequence, remedy."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, get_args

from evenstep.errors import ConfigError

MOST = 2**40  # beyond any budget; sums of as many still fit 64 bits
MOST_RANKS = 2**20


def whole_number(path: str, value: object, *, least: int = 1, most: int = MOST) -> int:
    """A whole number between `least` and `most`, numpy's among them, as a plain int.

    >>> import numpy as np
    >>> whole_number("seed", np.int64(3))
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(
            f"{path} is {value!r}, which is not a whole number, so nothing could be planned by it. "
            f"Set it to an integer of {least} or more."
        )
    number = int(value)
    if not least <= number <= most:
        raise ConfigError(
            f"{path} is {number}, and with that nothing would fit or ever run. Set it between "
            f"{least} and {most}."
        )
    return number


def whole_field(owner: object, path: str, *, least: int = 1, most: int = MOST) -> None:
    """Let a field of a frozen dataclass hold a plain int, or refuse what it holds.

    "pool.samples" is the field `samples` of a `Pool`, as a message calls it.
    """
    name = path.rpartition(".")[2]
    value = whole_number(path, getattr(owner, name), least=least, most=most)
    object.__setattr__(owner, name, value)


def real_field(owner: object, path: str) -> float:
    """Let a field of a frozen dataclass hold a plain float, numpy's numbers among them.

    "cost.per_token" is the field `per_token` of a `Cost`; 3 becomes 3.0, so that equal numbers are
    equal data.
    """
    name = path.rpartition(".")[2]
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(
            f"{path} is {value!r}, which is not a number, so nothing could be planned by it. "
            f"Set it to a number."
        )
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    object.__setattr__(owner, name, number)
    return number


def one_of(path: str, value: object, words: Any) -> None:
    """Refuse a word that is not among those of a `Literal`."""
    if value not in get_args(words):
        raise ConfigError(
            f"{path} is {value!r}, which does not exist, so it would have no effect. Use "
            f"{' or '.join(map(repr, get_args(words)))}."
        )
