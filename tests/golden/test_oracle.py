"""Every stored recipe gives the plan that it gave when it was stored."""

import pytest

from evenstep.errors import ConfigError
from tests.golden.oracle import digest_of, plan_of, stored_cases

CASES = stored_cases()
CHANGED = 180


@pytest.mark.parametrize("part", range(20))
def test_stored_recipes_give_their_stored_plans(part: int) -> None:
    for number in range(part, len(CASES), 20):
        case = CASES[number]
        if "now" in case and case["now"] is None:
            with pytest.raises(ConfigError):
                plan_of(case)
            continue
        expected = case.get("now", case["digest"])
        assert digest_of(plan_of(case)) == expected, f"case {number}: {case['recipe']}"


def test_there_are_two_thousand_stored_plans_and_every_change_has_a_reason() -> None:
    assert len(CASES) == 2000
    changed = [case for case in CASES if "now" in case]
    assert all(case["why"] for case in changed)
    assert len(changed) == CHANGED
