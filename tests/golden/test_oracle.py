"""Every stored recipe gives the plan that it gave when it was stored."""

import pytest

from tests.golden.oracle import digest_of, plan_of, stored_cases

CASES = stored_cases()


@pytest.mark.parametrize("part", range(20))
def test_stored_recipes_give_their_stored_plans(part: int) -> None:
    for number in range(part, len(CASES), 20):
        case = CASES[number]
        assert digest_of(plan_of(case)) == case["digest"], f"case {number}: {case['recipe']}"


def test_there_are_two_thousand_stored_plans() -> None:
    assert len(CASES) == 2000
