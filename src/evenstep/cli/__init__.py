"""The command line: files -> **`evenstep plan | report | check | compare`** -> tables, files.

Every command reads, works, writes whole files, then prints. What needs time to import is imported
inside the command that needs it.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a fault is one line on standard error."""
    try:
        from evenstep.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("evenstep"):
            raise
        print(
            f"error: {error.name} is not installed, so no command can run. Install the command "
            f"line with it: pip install 'evenstep[cli]'.",
            file=sys.stderr,
        )
        return 2
    return run(arguments)
