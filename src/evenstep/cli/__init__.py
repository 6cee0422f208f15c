"""The command line: files -> **`evenstep plan | report | check | compare`** -> tables, files.

Every command reads, works, writes whole files, then prints. What needs time to import is imported
inside the command that needs it.
"""

from evenstep.cli.app import main

__all__ = ["main"]
