"""The commands and their exit codes: 0 success, 1 a plan or a file is invalid, 2 an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from evenstep import __version__
from evenstep.cli import (
    check,
    compare,
    config,
    export,
    lengths,
    options,
    plan,
    report,
    simulate,
    terminal,
    train,
    tune,
)
from evenstep.core.text import printable
from evenstep.errors import EvenstepError

app = typer.Typer(
    name="evenstep",
    help="Turn variable-length samples into full, even and exact training steps.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    lengths.lengths,
    plan.plan,
    report.report,
    check.check,
    compare.compare,
    train.train,
    export.export,
    simulate.simulate,
    tune.tune,
):
    app.command(help=options.help_of(_command))(_command)
app.add_typer(config.app, name="config")

# typer's base class of usage errors, whichever click it uses
_UsageError: type[Exception] = typer.BadParameter.mro()[1]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    if version:
        with terminal.printing():
            typer.echo(f"evenstep {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        with terminal.printing():
            typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on standard error, or one
    for each fault of a configuration."""
    with terminal.any_text():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = app(
            list(arguments) if arguments is not None else None,
            prog_name="evenstep",
            standalone_mode=False,
        )
    except EvenstepError as error:
        faults = getattr(error, "faults", ())  # of a configuration
        return _fault(*(str(error).splitlines() if len(faults) > 1 else [str(error)]))
    except _UsageError as error:
        message = str(error.format_message())  # type: ignore[attr-defined]
        message = message.rstrip(".")
        end = "" if message.endswith("?") else "."
        return _fault(f"{message}{end} See `evenstep --help`.")
    except OSError as error:
        terminal.silence(sys.stdout)
        where = "" if error.filename is None else f"{error.filename}: "
        return _fault(f"{where}{error.strerror or error}. Check the file and the free disk space.")
    except MemoryError:
        return _fault("out of memory. Plan fewer samples or ranks.")
    return code if isinstance(code, int) else 0


def _fault(message: str, *listed: str) -> int:
    """Print a message of one line, and what it lists, a line each."""
    terminal.say(f"error: {printable(' '.join(message.split()))}")
    for line in listed:
        terminal.say(f"  {printable(' '.join(line.split()))}")
    return 2
