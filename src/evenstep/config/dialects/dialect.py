"""Dialect: the keys of another system's configuration, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from evenstep.config.dialects.reader import Reader


@dataclass(frozen=True, slots=True)
class Key:
    """The values of a key, its default, and what to say if it is given.

    `when` is the flag without which the key has no effect: a wrong value is then only noted.
    """

    kind: Literal["whole", "number", "flag", "word", "any"]
    default: Any = None
    least: int = 1
    words: tuple[str, ...] = ()
    note: str = ""
    when: str = ""


def whole(default: int | None = None, *, least: int = 1, note: str = "") -> Key:
    """An integer."""
    return Key("whole", default, least=least, note=note)


def number(default: float | None = None, *, note: str = "") -> Key:
    """A number."""
    return Key("number", default, least=0, note=note)


def flag(default: bool = False, *, note: str = "") -> Key:
    """True or false."""
    return Key("flag", default, note=note)


def word(default: str | None, *words: str, note: str = "", when: str = "") -> Key:
    """One of these words; any text without words."""
    return Key("word", default, words=words, note=note, when=when)


def anything(*, note: str = "") -> Key:
    """A value of any type."""
    return Key("any", note=note)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The configuration of one system.

    keys          every key that is read, by its dotted path
    strict        sections in which an unknown key is an error
    patterns      paths elsewhere that only batching keys have; an unknown one is an error
    others        names that resemble those of known keys and mean something else
    read          rules: raises nothing, collects faults and sets the values of a recipe
    interpolates  whether files have `defaults` and `${...}`
    """

    name: str
    system: str
    keys: Mapping[str, Key]
    read: Callable[[Reader], None]
    strict: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    others: frozenset[str] = frozenset()
    interpolates: bool = False

    @property
    def named_keys(self) -> list[str]:
        """The keys by which a file of the system is known: sections of any content are common."""
        return [name for name, key in self.keys.items() if key.kind != "any"]
