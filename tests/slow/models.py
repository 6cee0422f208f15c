"""Survey the models of transformers.

    python -m tests.slow.models                 all classes; writes docs/models.md
    python -m tests.slow.models llama gemma3    these types; prints what was measured
"""

from __future__ import annotations

import json
import sys

from tests.slow.kinds import kinds
from tests.slow.survey import survey


def main(arguments: list[str]) -> None:
    """Print what was measured, one class per line."""
    chosen = [kind for kind in kinds() if not arguments or set(kind.types) & set(arguments)]
    for kind, found in survey(chosen):
        print(json.dumps({"class": kind.name, "types": kind.types, "task": kind.task} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
