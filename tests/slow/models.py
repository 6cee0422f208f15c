"""Survey the models of transformers.

python -m tests.slow.models                 all; writes docs/models.md and benchmarks/results
python -m tests.slow.models llama gemma3    these types; prints what was measured
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.slow.kinds import kinds
from tests.slow.ranks import ARCHITECTURES, IMPLEMENTATIONS, errors_on_ranks
from tests.slow.report import Finding, page
from tests.slow.survey import survey
from tests.train.processes import results_of

ROOT = Path(__file__).resolve().parents[2]


def main(chosen: list[str]) -> None:
    """Measure all classes and write the page, or print what was measured of some types."""
    findings: list[Finding] = []
    for kind, found in survey(k for k in kinds() if not chosen or set(k.types) & set(chosen)):
        finding = {"class": kind.name, "types": kind.types, "task": kind.task, **found}
        findings.append(finding)
        print(json.dumps(finding) if chosen else f"{len(findings)} {kind.name}", flush=True)
    if not chosen:
        write(sorted(findings, key=lambda each: list(each["types"])), on_ranks())


def on_ranks() -> dict[str, dict[str, float]]:
    """Errors on two ranks, by type, wrapper and implementation."""
    found = {}
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            ranks = results_of(2, errors_on_ranks, Path(folder), name, IMPLEMENTATIONS)
        found[name] = {key: errors["single norm"] for key, errors in ranks[0]["errors"].items()}
        print(name, found[name], flush=True)
    return found


def write(findings: list[Finding], ranks: dict[str, dict[str, float]]) -> None:
    """The page, and its figures as JSON, one class per line."""
    versions = {name: version(name) for name in ("transformers", "torch")}
    named = " and ".join(f"{name} {number}" for name, number in versions.items())
    (ROOT / "docs" / "models.md").write_text(page(findings, ranks, named))
    lines = ",\n".join(json.dumps(_rounded(each)) for each in findings)
    head = json.dumps({"versions": versions, "ranks": _rounded(ranks)})[:-1]
    results = ROOT / "benchmarks" / "results" / "models.json"
    results.write_text(f'{head}, "models": [\n{lines}\n]}}\n')


def _rounded(value: Any) -> Any:
    """Errors with three digits."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.3g}")
    return str(value) if isinstance(value, float) else value


if __name__ == "__main__":
    main(sys.argv[1:])
