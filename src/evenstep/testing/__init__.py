"""Checkers for your tests and ours.

plans      assert_valid_plan; random cases for `make_plan` (needs Hypothesis)
gradients  assert_same_gradient: is a step's gradient the same in every layout? (needs torch)
leaks      find_leaks, assert_no_leaks: do packed segments see each other? (needs torch)
resume     assert_exact_resume: does a stream resume as if it had never stopped?
elastic    assert_elastic_resume: the same on other ranks and workers, each sample once
ranks      run_ranks: a function on several ranks at once, in threads

>>> from evenstep import Packed, Recipe, make_plan
>>> from evenstep.testing import assert_valid_plan
>>> assert_valid_plan(make_plan([5, 3, 4], Recipe(layout=Packed(max_tokens=8))))
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.testing.elastic import assert_elastic_resume
    from evenstep.testing.gradients import GradientError, assert_same_gradient
    from evenstep.testing.leaks import Leak, LeakError, assert_no_leaks, find_leaks
    from evenstep.testing.plans import Case, assert_valid_plan, cases
    from evenstep.testing.ranks import run_ranks
    from evenstep.testing.resume import ResumeError, assert_exact_resume

__all__ = [
    "Case",
    "GradientError",
    "Leak",
    "LeakError",
    "ResumeError",
    "assert_elastic_resume",
    "assert_exact_resume",
    "assert_no_leaks",
    "assert_same_gradient",
    "assert_valid_plan",
    "cases",
    "find_leaks",
    "run_ranks",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "elastic": ["assert_elastic_resume"],
            "gradients": ["GradientError", "assert_same_gradient"],
            "leaks": ["Leak", "LeakError", "assert_no_leaks", "find_leaks"],
            "plans": ["Case", "assert_valid_plan", "cases"],
            "ranks": ["run_ranks"],
            "resume": ["ResumeError", "assert_exact_resume"],
        },
        extra="dev",
    )
