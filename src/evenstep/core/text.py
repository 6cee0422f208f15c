"""Text of values for messages and `repr`, and checks of single fields."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np

from evenstep.errors import ConfigError


def short_repr(value: object, most: int = 80) -> str:
    """The `repr` of a value, shortened. The whole `repr` is never built.

    A few lines of YAML can describe a value whose `repr` fills the memory.

    >>> short_repr("x" * 999, 12)
    "'xxxxxxx..."
    """
    # Three levels deep and no longer than could be shown.
    limited = reprlib.Repr()
    limited.maxlevel = 3
    limited.maxstring = limited.maxother = limited.maxlong = 2 * most
    try:
        text = limited.repr(value)
    except ValueError:  # Python refuses to convert integers of more than 4,300 digits
        text = f"{type(value).__name__} of very many digits"
    return shorten(text, most)


def shorten(text: str, most: int = 80) -> str:
    """The text, shortened to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]}..."


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b"]), listed(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    r"""The text with control characters escaped, which would affect a terminal.

    >>> printable("a\x1b[31m.txt")
    'a\\x1b[31m.txt'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class Derived:
    """Base of frozen dataclasses with slots that keep what `cached_property` computes.

    Fields alone are compared and pickled.
    """

    __slots__ = ("__dict__",)


def set_fields(value: Any, state: Sequence[Any]) -> None:
    """`__setstate__` of frozen dataclasses with slots that had fewer fields in earlier versions:
    those that old pickles lack, the last ones, are None."""
    for at, each in enumerate(fields(value)):
        object.__setattr__(value, each.name, state[at] if at < len(state) else None)


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
        shown = short_repr(value if number is None else number)
        raise ConfigError(f"{path} must be an integer in [{least}, {most}], got {shown}.")
    return number


def whole_field(
    owner: object, path: str, *, least: int = 1, most: int = MOST, optional: bool = False
) -> None:
    """Convert a field of a frozen dataclass to a plain int, or raise; None if it is `optional`.

    The path "pool.samples" is the field `samples`, as messages call it.
    """
    name = path.rpartition(".")[2]
    value = getattr(owner, name)
    if value is not None or not optional:
        object.__setattr__(owner, name, whole_number(path, value, least=least, most=most))


def seed_number(value: object) -> int:
    """A valid seed as a plain int."""
    number = _plain(value)
    if number is None:
        raise ConfigError(f"seed must be an integer in [0, 2**63), got {short_repr(value)}.")
    if not 0 <= number < _SEEDS:
        raise ConfigError(f"seed must be in [0, 2**63), got {short_repr(number)}.")
    return number


def truth_value(path: str, value: object) -> bool:
    """A bool, also of numpy, as a plain bool. Text such as "no" is refused.

    >>> truth_value("shuffle", np.False_)
    False
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{path} must be true or false, got {short_repr(value)}.")
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
        raise ConfigError(f"{path} must be a number, got {short_repr(value)}.")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    object.__setattr__(owner, name, number)
    return number


def one_of(path: str, value: object, words: Any) -> None:
    """Raise if `value` is not one of these words, or of those of a `Literal`."""
    words = get_args(words) or tuple(words)  # a tuple compares values that have no hash
    if value not in words:
        raise ConfigError(
            f"unknown {path} {short_repr(value)}; expected one of: {', '.join(words)}."
        )


def _plain(value: object) -> int | None:
    """An integer as a plain int; None for anything else, including bools."""
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "step"), counted(1200, "micro-batch"), counted(2, "epoch")
    ('1 step', '1,200 micro-batches', '2 epochs')
    """
    plural = f"{noun}es" if noun.endswith("batch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def fill(tokens: float, slots: float) -> str:
    """The share of slots that hold tokens; 100% only if all do. Empty without slots.

    >>> fill(992, 1000), fill(99999, 100000), fill(8, 8), fill(0, 0)
    ('fill 99.2%', 'fill 99.9%', 'fill 100%', '')
    """
    if not slots > 0:
        return ""
    ratio = tokens / slots
    if ratio == 1:
        return "fill 100%"
    return f"fill {min(100 * ratio, 99.9) if ratio < 1 else 100 * ratio:.1f}%"


def attempt(measure: Callable[[], str]) -> str:
    """The result of `measure`; empty if it raises, for example on a damaged value."""
    try:
        with np.errstate(all="ignore"):
            return measure()
    except Exception:
        return ""


def line(name: str, parts: Iterable[str]) -> str:
    """The parts that are not empty, in one line.

    >>> line("Plan", ["2 steps", "", "1 rank"])
    'Plan(2 steps, 1 rank)'
    """
    return f"{name}({', '.join(part for part in parts if part)})"


def constructor(value: object) -> str:
    """The constructor call of a dataclass, with the fields that differ from their defaults.

    >>> from evenstep.core.recipe import Topology
    >>> constructor(Topology(dp=8))
    'Topology(dp=8)'
    """
    if is_dataclass(value) and not isinstance(value, type):
        parts = []
        for each in fields(value):
            part, make = getattr(value, each.name), each.default_factory
            if each.init and part != (each.default if make is MISSING else make()):
                parts.append(f"{each.name}={constructor(part)}")
        return line(type(value).__name__, parts)
    if isinstance(value, Mapping):
        return repr(dict(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)
