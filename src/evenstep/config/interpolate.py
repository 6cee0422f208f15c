"""Resolve the interpolations of OmegaConf: `${a.b}`, `${.x}`, `${mul:a,b}`, `${oc.select:a,1}`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.config.tree import Path
from evenstep.config.yaml import parse_yaml
from evenstep.core.text import short_repr, shorten
from evenstep.errors import ConfigError

_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
}
_RESOLVER = re.compile(r"\s*([A-Za-z_][\w.]*)\s*:(.*)", re.DOTALL)
_KEYS = re.compile(r"[\w$-]+(?:\.[\w$-]+|\[[\w-]+\])*")
_MOST = 10_000
MISSING = "???"


class UnresolvedError(ConfigError):
    """An interpolation that cannot be resolved; the message names it."""


class Interpolated:
    """Data whose interpolations are resolved when a value is asked for.

    >>> values = Interpolated({"a": 512, "b": {"c": 4, "d": "${mul:${a}, ${.c}}"}})
    >>> values.at(("b", "d"))
    2048
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self._steps = 0
        self._within: list[Path] = []

    def at(self, path: Sequence[str]) -> Any:
        """The value at `path`, resolved; KeyError if there is none."""
        self._steps, self._within = 0, []
        return self._value(tuple(path))

    def _value(self, path: Path) -> Any:
        self._steps += 1
        if path in self._within or self._steps > _MOST:
            raise UnresolvedError(
                f"{shorten('.'.join(path))} refers to itself. Write its value out."
            )
        self._within.append(path)
        try:
            value: Any = self.data
            for depth, key in enumerate(path):
                if isinstance(value, str) and value.startswith("${"):  # a section elsewhere
                    return self._value((*self._section(value, path[:depth]), *path[depth:]))
                value = _item(value, key)
            return self._text(value, path) if isinstance(value, str) else value
        finally:
            self._within.pop()

    def _section(self, text: str, path: Path) -> Path:
        """The path of the section that a text refers to."""
        if _closing(text, 0, path) != len(text) - 1 or _RESOLVER.fullmatch(text[2:-1]):
            raise _unresolved(text, path, "it is not a section")
        return self._target(text[2:-1], path, text)

    def _text(self, text: str, path: Path) -> Any:
        """The value of a text: what a single interpolation is worth, or text with all replaced."""
        if text == MISSING:
            raise UnresolvedError(f"{'.'.join(path)} is ???, which stands for a missing value.")
        if "${" not in text:
            return text
        parts: list[Any] = []
        at = 0
        while at < len(text):
            begin = text.find("${", at)
            if begin < 0:
                parts.append(text[at:])
                break
            if begin and text[begin - 1] == "\\":
                parts.append(text[at : begin - 1] + "${")
                at = begin + 2
                continue
            end = _closing(text, begin, path)
            parts += [text[at:begin]] if begin > at else []
            parts.append(self._one(text[begin + 2 : end], path))
            at = end + 1
        return parts[0] if len(parts) == 1 else "".join(map(str, parts))

    def _one(self, inner: str, path: Path) -> Any:
        """What `${inner}` is worth."""
        resolver = _RESOLVER.fullmatch(inner)
        if resolver is None:
            target = self._text(inner, path) if "${" in inner else inner
            return self._node(str(target).strip(), path, f"${{{inner}}}")
        return self._call(resolver[1], _arguments(resolver[2]), path, f"${{{inner}}}")

    def _node(self, reference: str, path: Path, shown: str) -> Any:
        target = self._target(reference, path, shown)
        try:
            return self._value(target)
        except KeyError:
            raise _unresolved(shown, path, f"there is no {shorten('.'.join(target))}") from None

    def _target(self, reference: str, path: Path, shown: str) -> Path:
        """The path that a reference means; each dot before it stands for one level up."""
        dots = len(reference) - len(reference.lstrip("."))
        keys = reference[dots:]
        if not _KEYS.fullmatch(keys) or dots > len(path):
            raise _unresolved(shown, path, "it is not the path of a key")
        start = path[: len(path) - dots] if dots else ()
        return (*start, *re.findall(r"[^.\[\]]+", keys))

    def _select(self, words: list[str], path: Path, shown: str) -> Any:
        """The value at the path of the first argument; without one, the second argument."""
        target = self._target(str(self._argument(words[0], path, shown)), path, shown)
        try:
            return self._value(target)
        except KeyError:
            return self._argument(words[1], path, shown) if len(words) == 2 else None

    def _call(self, name: str, words: list[str], path: Path, shown: str) -> Any:
        if name == "oc.select" and 1 <= len(words) <= 2:
            return self._select(words, path, shown)
        if name not in _NUMBERS:
            why = "it depends on the environment" if name == "oc.env" else f"{name} is not known"
            raise _unresolved(shown, path, why)
        numbers = [self._argument(word, path, shown) for word in words]
        if len(numbers) != 2 or not all(
            isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
        ):
            raise _unresolved(shown, path, f"{name} takes two numbers, got {short_repr(numbers)}")
        try:
            return _NUMBERS[name](*numbers)
        except (ArithmeticError, ValueError) as error:
            raise _unresolved(shown, path, str(error)) from None

    def _argument(self, word: str, path: Path, shown: str) -> Any:
        word = word.strip()
        if "${" in word:
            return self._text(word, path)
        try:
            return parse_yaml(word, "an argument")
        except ConfigError:
            raise _unresolved(shown, path, f"{short_repr(word)} is not a value") from None


def _unresolved(shown: str, path: Path, why: str) -> UnresolvedError:
    return UnresolvedError(
        f"{shorten('.'.join(path))} is {shorten(shown, 120)}, which cannot be resolved: {why}. "
        f"Write its value out."
    )


def _item(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return value[key]
    if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
        return value[int(key)]
    raise KeyError(key)


def _closing(text: str, begin: int, path: Path) -> int:
    """Where the interpolation that begins at `begin` ends."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0 and text[at] == "}":
            return at
    raise _unresolved(text[begin:], path, "its closing brace is missing")


def _arguments(text: str) -> list[str]:
    """The arguments between commas, without those of nested interpolations."""
    words, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            words.append("")
        else:
            words[-1] += char
    return words if text.strip() else []
