"""`evenstep config`: check, show and convert configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from evenstep.cli import files, options, terminal

if TYPE_CHECKING:
    from evenstep.config import Loaded

File: TypeAlias = Annotated[
    Path,
    typer.Argument(help="A configuration file, YAML or TOML.", metavar="FILE", show_default=False),
]
Out: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Write the YAML to this file.", metavar="FILE", show_default=False),
]

app = typer.Typer(help="Check, show and convert configuration files.")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with terminal.printing():
            typer.echo(context.get_help())


@app.command()
def check(
    file: File, from_: options.From = None, set_: options.Set = None, json: options.Json = False
) -> int:
    """Check a configuration and list all its faults. Exits with code 1 if there are any."""
    from evenstep.cli import config_output, output
    from evenstep.cli.overrides import overrides_of
    from evenstep.config import FaultsError, load_file

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        notes = load_file(file, overrides_of(set_), dialect=from_).notes
    except FaultsError as error:
        faults = error.faults
    with terminal.printing():
        if json:
            output.print_json({"valid": not faults, "faults": faults, "notes": notes})
        else:
            config_output.print_check(file.name, faults, notes)
    return int(bool(faults))


@app.command()
def show(
    file: File, from_: options.From = None, set_: options.Set = None, json: options.Json = False
) -> None:
    """Show every value and where it comes from: a line, an override, a rule or a default."""
    from evenstep.cli import config_output, output
    from evenstep.cli.overrides import overrides_of
    from evenstep.config import load_file

    loaded = load_file(file, overrides_of(set_), dialect=from_)
    with terminal.printing():
        if json:
            output.print_json(_summary(loaded))
        else:
            config_output.print_loaded(loaded, file.name)


@app.command()
def convert(
    file: File,
    from_: options.From,
    set_: options.Set = None,
    out: Out = None,
    json: options.Json = False,
) -> None:
    """Convert another system's configuration to a native one."""
    from evenstep.cli import output
    from evenstep.cli.overrides import overrides_of
    from evenstep.config import load_file, native_yaml
    from evenstep.core.plan_file import replace_file

    files.refuse_unwritable([file], out)
    loaded = load_file(file, overrides_of(set_), dialect=from_)
    head = (f"Converted from {file.name} ({from_}).", *loaded.notes)
    text = native_yaml(loaded.settings, loaded.origins, head)
    if out is not None:
        replace_file(out, text.encode())
    with terminal.printing([out] if out else []):
        if json:
            output.print_json(_summary(loaded))
        elif out is None:
            print(text, end="")
    for note in loaded.notes if out is not None or json else ():
        output.remark(f"note: {note}")
    if out is not None:
        output.remark(f"wrote {out}")


def _summary(loaded: Loaded) -> dict[str, Any]:
    from evenstep.config import native_data

    return {
        "settings": loaded.settings.to_dict(),
        "native": native_data(loaded.settings),
        "origins": dict(loaded.origins),
        "notes": loaded.notes,
        "ignored": loaded.ignored,
    }
