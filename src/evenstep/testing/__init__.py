"""Helpers for tests, ours and yours. The strategies need Hypothesis, the leak detector torch.

plans    assert_valid_plan, and random cases for `make_plan`
leaks    find_leaks, assert_no_leaks: do packed segments see each other?
resume   assert_exact_resume: does any stream go on as if it had never stopped?
elastic  assert_elastic_resume: does it go on with other ranks and workers, each sample once?
ranks    run_ranks: a function on several ranks at once, in threads

>>> from evenstep import Packed, Recipe, make_plan
>>> assert_valid_plan(make_plan([5, 3, 4], Recipe(layout=Packed(max_tokens=8))))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenstep.core.checks import CHECKS, violations
from evenstep.testing.plans import Case, assert_valid_plan, cases
from evenstep.testing.ranks import run_ranks

if TYPE_CHECKING:
    from evenstep.testing.elastic import assert_elastic_resume
    from evenstep.testing.leaks import Leak, LeakError, assert_no_leaks, find_leaks
    from evenstep.testing.resume import ResumeError, assert_exact_resume

__all__ = [
    "CHECKS",
    "Case",
    "Leak",
    "LeakError",
    "ResumeError",
    "assert_elastic_resume",
    "assert_exact_resume",
    "assert_no_leaks",
    "assert_valid_plan",
    "cases",
    "find_leaks",
    "run_ranks",
    "violations",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on first use: plans are tested without torch.
    if name in ("Leak", "LeakError", "assert_no_leaks", "find_leaks"):
        from evenstep.testing import leaks

        return getattr(leaks, name)
    if name in ("ResumeError", "assert_exact_resume"):
        from evenstep.testing import resume

        return getattr(resume, name)
    if name == "assert_elastic_resume":
        from evenstep.testing.elastic import assert_elastic_resume

        return assert_elastic_resume
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
