"""Names of a package that are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from evenstep.errors import NotInstalledError


def exports(
    package: str, homes: Mapping[str, Sequence[str]], extra: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names live in the modules `homes`.

    A name is imported on first use and then kept. `extra` names the optional dependency that the
    package needs; without it, the error says how to install it.

    >>> get, names = exports("evenstep", {"core.cost": ["Cost"]})
    >>> get("Cost").__name__, names()
    ('Cost', ['Cost'])
    """
    home = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(f"{package}.{home[name]}"), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if not extra or missing == "evenstep":
                raise
            raise _missing(f"{package}.{name}", missing, extra) from None
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(home)


def need(module: str, *, extra: str, package: str) -> None:
    """Raise an error that says how to install `module` if `package` cannot be used without it."""
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise _missing(package, module, extra)


def _missing(what: str, module: str, extra: str) -> NotInstalledError:
    return NotInstalledError(
        f"{what} needs {module}, which is not installed. Run "
        f'pip install -e ".[{extra}]" in a checkout of evenstep.',
        name=module,
    )
