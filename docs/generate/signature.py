"""Signatures of functions and classes, as they are written in code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

_WIDTH = 88


def signature_of(value: Any, name: str, *, bound: bool = False) -> str:
    """A call with its parameters, on several lines if it is long; the bare name if there is none.

    `bound` leaves out `self` or `cls`.

    >>> def scale(x: int, *, by: float = 2.0) -> float: ...
    >>> signature_of(scale, "scale")
    'scale(x: int, *, by: float = 2.0) -> float'
    """
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    shown = _with_marks(parameters, factories(value))
    returns = "" if inspect.isclass(value) else _returns(signature.return_annotation)
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= _WIDTH:
        return line
    inside = "".join(f"    {parameter},\n" for parameter in shown)
    return f"{name}(\n{inside}){returns}"


def factories(value: Any) -> dict[str, str]:
    """The defaults of a dataclass that a function makes, by field.

    >>> @dataclasses.dataclass
    ... class Bag:
    ...     items: list[int] = dataclasses.field(default_factory=list)
    >>> factories(Bag)
    {'items': 'list()'}
    """
    if not dataclasses.is_dataclass(value):
        return {}
    return {
        field.name: f"{getattr(field.default_factory, '__name__', '...')}()"
        for field in dataclasses.fields(value)
        if field.default_factory is not dataclasses.MISSING
    }


def annotation(value: Any) -> str:
    """A type as it is written.

    >>> annotation("int | None"), annotation(int), annotation(None)
    ('int | None', 'int', 'None')
    """
    if isinstance(value, str):
        return re.sub(r"^(['\"])(.*)\1$", r"\2", value)
    return "None" if value is None else inspect.formatannotation(value)


def default(value: Any) -> str:
    """A default value as it is written: never with an address.

    >>> default("raise"), default(len), default(1024.0)
    ("'raise'", 'len', '1024.0')
    """
    if inspect.isfunction(value) or inspect.isbuiltin(value) or inspect.isclass(value):
        return str(value.__name__)
    text = repr(value)
    return f"{type(value).__name__}(...)" if " at 0x" in text else text


def _with_marks(parameters: list[inspect.Parameter], made: dict[str, str]) -> list[str]:
    """The parameters with `/` and `*` where they belong."""
    shown: list[str] = []
    before: Any = None
    for parameter in parameters:
        if before == parameter.POSITIONAL_ONLY and parameter.kind != parameter.POSITIONAL_ONLY:
            shown.append("/")
        named = parameter.kind == parameter.KEYWORD_ONLY
        if named and before not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            shown.append("*")
        shown.append(_parameter(parameter, made))
        before = parameter.kind
    if before == inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    return shown


def _parameter(parameter: inspect.Parameter, made: dict[str, str]) -> str:
    marks: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = f"{marks.get(parameter.kind, '')}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    value = made.get(parameter.name) or default(parameter.default)
    return f"{text}={value}" if parameter.annotation is parameter.empty else f"{text} = {value}"


def _returns(value: Any) -> str:
    return "" if value is inspect.Signature.empty else f" -> {annotation(value)}"
