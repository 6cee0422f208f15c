"""Every stored recipe gives its stored plan, which is no slower than it was."""

import pytest

from evenstep.errors import ConfigError
from tests.golden.oracle import digest_of, plan_of, stored_cases, time_of

CASES = stored_cases()
SLOWER = 16


@pytest.mark.parametrize("part", range(20))
def test_stored_recipes_give_their_stored_plans(part: int) -> None:
    for number in range(part, len(CASES), 20):
        case = CASES[number]
        if case["digest"] is None:
            with pytest.raises(ConfigError):
                plan_of(case)
            continue
        plan = plan_of(case)
        assert digest_of(plan) == case["digest"], f"case {number}: {case['recipe']}"
        if "time" in case and "why" not in case:
            assert time_of(plan) <= case["time"] * (1 + 1e-6), f"case {number}: {case['recipe']}"


def test_there_are_two_thousand_stored_plans_and_few_are_slower_than_they_were() -> None:
    assert len(CASES) == 2000
    assert sum("why" in case for case in CASES) <= SLOWER
