"""The command line: files -> **`evenstep lengths | plan | compare | train | …`** -> tables, files.

Every command reads, works, writes whole files, then prints. Slow imports are inside the command
that needs them.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on standard error."""
    try:
        from evenstep.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("evenstep"):
            raise
        print(
            f"error: the command line needs {error.name}, which is not installed. Run "
            f'pip install -e ".[cli]" in a checkout of evenstep.',
            file=sys.stderr,
        )
        return 2
    return run(arguments)
