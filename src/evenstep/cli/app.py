"""The commands, and how they end: 0 fine, 1 a plan breaks a promise, 2 cannot be done."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import typer

from evenstep import __version__
from evenstep.cli import check, compare, plan, report, terminal
from evenstep.core.glimpse import printable
from evenstep.errors import EvenstepError

app = typer.Typer(
    name="evenstep",
    help="Turns variable-length samples into full, even, exact training steps.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("check")(check.check)
app.command("compare")(compare.compare)

# typer's errors of usage, whichever click it stands on
_UsageError: type[Exception] = typer.BadParameter.mro()[1]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Say which version this is."),
) -> None:
    if version:
        with terminal.printing():
            typer.echo(f"evenstep {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        with terminal.printing():
            typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a fault is one line on standard error."""
    if arguments is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end as `evenstep ... | head` expects
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
        return _fault(str(error))
    except _UsageError as error:
        message = str(error.format_message())  # type: ignore[attr-defined]
        return _fault(f"{message.rstrip('.')}, so nothing was done. See `evenstep --help`.")
    except OSError as error:
        terminal.silence()
        what = "the system" if error.filename is None else str(error.filename)
        return _fault(
            f"{what} failed ({error.strerror or error}), so the command did not finish. "
            f"Check the files and the space left."
        )
    except MemoryError:
        return _fault("memory does not suffice, so nothing was done. Plan fewer samples or ranks.")
    return code if isinstance(code, int) else 0


def _fault(message: str) -> int:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2
