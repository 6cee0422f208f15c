"""`python -m evenstep` is `evenstep`."""

import sys

from evenstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
