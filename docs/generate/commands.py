"""The commands of `evenstep`, with their arguments and options, from the application itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer


def commands() -> dict[str, Any]:
    """Every command by its full name, groups before their commands.

    >>> [name for name in commands() if "config" in name]
    ['evenstep config', 'evenstep config check', 'evenstep config show', 'evenstep config convert']
    """
    from evenstep.cli.app import app

    return dict(_walk("evenstep", typer.main.get_command(app)))


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, each in getattr(command, "commands", {}).items():
        yield from _walk(f"{name} {inner}", each)


def arguments_of(command: Any) -> list[Any]:
    """The positional arguments of a command."""
    return [each for each in command.params if each.param_type_name == "argument"]


def options_of(command: Any) -> list[Any]:
    """The options of a command, without `--help`."""
    return [each for each in command.params if each.param_type_name == "option"]


def spellings(command: Any) -> dict[str, bool]:
    """What may be written for each option, and whether a value follows.

    >>> spellings(commands()["evenstep check"])
    {'--json': False, '--help': False, '-h': False}
    """
    found = {
        name: not option.is_flag
        for option in options_of(command)
        for name in (*option.opts, *option.secondary_opts)
    }
    return {**found, "--help": False, "-h": False}
