"""The interface: one page for each package, with every public name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

from docs.generate.docstrings import fenced, markdown
from docs.generate.packages import PACKAGES
from docs.generate.signature import annotation, signature_of

_SPECIAL = ("__call__", "__getitem__", "__iter__", "__len__")


def pages() -> dict[str, str]:
    """File names and texts."""
    texts = {f"{package}.md": _page(package) for package in PACKAGES}
    return {"README.md": _contents(), **texts}


def _contents() -> str:
    rows = [
        f"| [`{package}`]({package}.md) | {about} | "
        + ", ".join(
            f"[`{name}`]({package}.md#{name.lower()})" for name in import_module(package).__all__
        )
        + " |"
        for package, about in PACKAGES.items()
    ]
    head = [
        "# Interface",
        "",
        "Import names from these packages, never from the modules inside them. Everything listed "
        "here is public; nothing else is.",
        "",
        "| package | in it | names |",
        "| --- | --- | --- |",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _page(package: str) -> str:
    module = import_module(package)
    parts = [f"# {package}", PACKAGES[package]]
    for name in module.__all__:
        parts += _entry(module, name)
    return "\n\n".join(parts) + "\n"


def _entry(module: ModuleType, name: str) -> Iterator[str]:
    """The section of one name."""
    value = getattr(module, name)
    yield f"## {name}"
    if inspect.isclass(value):
        yield fenced("python", f"class {signature_of(value, name)}")
        yield markdown(inspect.getdoc(value) or "")
        for member, about in _members(value):
            yield f"### {name}.{member}"
            yield about
        return
    yield fenced("python", signature_of(value, name))
    yield markdown(inspect.getdoc(value) or "")


def _members(owner: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties that a class or a base of this project defines."""
    ours = [base for base in owner.__mro__ if base.__module__.startswith("evenstep")]
    members = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    for name in sorted(members):
        about = inspect.getdoc(getattr(owner, name, None))
        public = not name.startswith("_") or name in _SPECIAL
        if public and about and _is_documented(members[name]):
            call = fenced("python", _call(owner, name, members[name]))
            yield name, f"{call}\n\n{markdown(about)}"


def _is_documented(member: Any) -> bool:
    inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if isinstance(inner, property | cached_property):
        return True
    return inspect.isfunction(inner) and bool(inner.__doc__)


def _call(owner: type, name: str, member: Any) -> str:
    if isinstance(member, property | cached_property):
        getter = member.fget if isinstance(member, property) else member.func
        returns = inspect.signature(getter).return_annotation if getter else ""
        return f"{name}: {annotation(returns)}"
    if isinstance(member, classmethod | staticmethod):
        bound = isinstance(member, classmethod)
        return signature_of(member.__func__, f"{owner.__name__}.{name}", bound=bound)
    return signature_of(member, name, bound=True)
