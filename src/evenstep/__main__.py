"""Run the command line with `python -m evenstep`."""

import sys

from evenstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
