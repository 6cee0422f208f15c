"""Prefixes: what samples share, against its definition."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Prefixes, Recipe, find_prefixes, make_plan
from evenstep.errors import InputError

TOKENS = st.lists(st.lists(st.integers(-2, 2), max_size=6), max_size=12)


def common(one: Any, other: Any) -> int:
    """How many leading entries are equal, by definition."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def between(prefixes: Prefixes) -> dict[tuple[int, int], int]:
    """What every two samples share, by running minima."""
    order, shared = prefixes.order.tolist(), prefixes.shared.tolist()
    return {
        (min(order[i], order[j]), max(order[i], order[j])): min(shared[i + 1 : j + 1])
        for i in range(len(order))
        for j in range(i + 1, len(order))
    }


@given(TOKENS, st.sampled_from([np.int32, np.int64, np.uint16, ">i4", None]))
def test_every_two_samples_share_what_the_definition_says(tokens: Any, dtype: Any) -> None:
    given_ids = (
        tokens if dtype is None else [np.array(ids, np.int64).astype(dtype) for ids in tokens]
    )
    prefixes = find_prefixes(given_ids)
    prefixes.check([len(ids) for ids in tokens], given_ids)
    assert between(prefixes) == {
        (i, j): common(tokens[i], tokens[j])
        for i in range(len(tokens))
        for j in range(i + 1, len(tokens))
    }


@given(TOKENS, st.data())
def test_a_subset_shares_as_if_found_by_itself(tokens: Any, data: st.DataObject) -> None:
    number = st.integers(0, max(len(tokens) - 1, 0))
    samples = data.draw(st.lists(number, unique=True)) if tokens else []
    taken = find_prefixes(tokens).take(samples)
    assert between(taken) == between(find_prefixes([tokens[i] for i in samples]))


def test_a_sample_taken_twice_shares_with_itself_what_others_share() -> None:
    prefixes = find_prefixes([[1, 2, 3], [1, 2, 4], [9]])
    assert between(prefixes.take([1, 0, 1, 2, 2]))[0, 2] == 2
    assert between(prefixes.take([1, 0, 1, 2, 2]))[0, 1] == 2
    assert between(prefixes.take([1, 0, 1, 2, 2]))[3, 4] == 0


@given(TOKENS, st.data())
def test_only_samples_with_equal_groups_and_inputs_share(tokens: Any, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens))
    groups, images = data.draw(ids), data.draw(ids)
    pixels = [np.full((2, 2), image, np.float32) for image in images]
    prefixes = find_prefixes(tokens, groups, {"pixels": pixels, "kind": [b"x"] * len(tokens)})
    for (i, j), count in between(prefixes).items():
        alike = groups[i] == groups[j] and images[i] == images[j]
        assert count == (common(tokens[i], tokens[j]) if alike else 0)


def test_rows_of_an_array_and_objects_that_become_arrays_are_samples() -> None:
    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array([1, 2, 3])

    assert find_prefixes(np.array([[1, 2], [3, 4], [1, 5]])).shared.tolist() == [0, 1, 0]
    assert find_prefixes([Tensor(), Tensor()]).shared.tolist() == [0, 3]
    assert find_prefixes([np.array([1, 2], np.int32), [1, 2, 3]]).shared.tolist() == [0, 2]


def test_long_common_prefixes_are_found_to_the_token() -> None:
    one = np.arange(5000)
    for at in (0, 511, 512, 513, 1535, 1536, 4999):
        other = one.copy()
        other[at] = -1
        assert find_prefixes([one, other]).shared.tolist() == [0, at]
    assert find_prefixes([one, one[:1234]]).shared.tolist() == [0, 1234]


def test_samples_of_one_group_share_their_prompt() -> None:
    prefixes = Prefixes.of_groups(np.array([7, 3, 7, 3]), [5, 2, 5, 2])
    assert (prefixes.order.tolist(), prefixes.shared.tolist()) == ([0, 2, 1, 3], [0, 5, 0, 2])
    assert Prefixes.of_groups([], []).shared.tolist() == []


def test_prefixes_are_pickled_and_read_only() -> None:
    prefixes = find_prefixes([[1], [1, 2]])
    assert pickle.loads(pickle.dumps(prefixes)).shared.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        prefixes.shared[0] = 1


def prefixes(order: list[int], shared: list[int]) -> Prefixes:
    return Prefixes(np.array(order), np.array(shared))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prefixes([0, 0], [0, 0]).check([3, 3]), r"each of the samples 0 to 1 once"),
        (lambda: prefixes([0], [0]).check([3, 3]), r"1 samples .* for 2 samples"),
        (lambda: prefixes([0, 1], [0]).check([3, 3]), r"1 shared lengths for 2"),
        (lambda: prefixes([1, 0], [0, 4]).check([9, 3]), r"sample 0 .* 4 tokens .* 0 to 3 .*\[1\]"),
        (lambda: prefixes([1, 0], [0, -1]).check([9, 3]), r"sample 0 cannot share -1 tokens"),
        (lambda: prefixes([1, 0], [1, 1]).check([9, 3]), r"sample 1 cannot share 1 tokens"),
        (lambda: prefixes([0, 1], [0, 2]).check([2, 2], [[1, 2], [1, 3]]), r"0 and 1 .* token 1"),
        (lambda: prefixes([0, 1], [0, 1]).check([2, 2], [[1, 2]]), r"lengths \[2\], not \[2, 2\]"),
        (lambda: prefixes([0, 1], [0, 1]).check([2, 3], [[1, 2]] * 2), r"lengths \[2, 2\], not"),
        (lambda: Prefixes.of_groups([1, 1], [2, 3]), r"samples 0 and 1 .* 2 and 3 tokens"),
        (lambda: Prefixes.of_groups([1, 1], [2]), r"2 groups and 1 prompt lengths"),
        (lambda: find_prefixes([[1], [0.5]]), r"sample 1 must be .* integers .* got \[0.5\]"),
        (lambda: find_prefixes([[1], [[2]]]), r"sample 1 must be"),
        (lambda: find_prefixes([[1], [[2], [3, 4]]]), r"sample 1 must be"),
        (lambda: find_prefixes([[1], [2]], groups=[1]), r"groups has 1 entries for 2 samples"),
        (
            lambda: find_prefixes([[1]], same={"image": []}),
            r"\['image'\] has 0 entries for 1 samples",
        ),
        (lambda: find_prefixes([[1]], same={"image": [{}]}), r"same\['image'\] has a dict"),
    ],
)
def test_wrong_prefixes_are_errors_that_name_the_sample(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


LISTS: Any = [[1], [2]]
OTHER: Any = 5
NONE: Any = [None, None]
make_prefixes: Any = Prefixes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_prefixes([0, 1], [0, 2.5]),
            "shared of prefixes must be a list of whole numbers",
        ),
        (lambda: make_prefixes([0, 1], [0, float("nan")]), "shared of prefixes must be a list"),
        (lambda: make_prefixes([2**63], [0]), "order of prefixes must be a list of whole numbers"),
        (lambda: make_prefixes(None, None), "order of prefixes must be a list of whole numbers"),
        (lambda: Prefixes.of_groups([0, 0], [1.5, 1.5]), "the prompt lengths must be a list"),
        (lambda: Prefixes.of_groups([0, 0], 3), "the prompt lengths must be a list"),
        (lambda: find_prefixes([[1], [1]], groups=LISTS), "groups must have one number or"),
        (lambda: find_prefixes([[1], [1]], groups=NONE), "groups must have one number"),
        (lambda: Prefixes.of_groups(NONE, [3, 3]), "groups must have one number or"),
        (lambda: Prefixes.of_groups([math.nan] * 2, [3, 3]), "groups must have one number or"),
        (lambda: find_prefixes([[1], [1]], groups=OTHER), "groups must be a list or an array"),
        (lambda: find_prefixes([[1], [1]], same=OTHER), "same must map names to one value per"),
        (
            lambda: find_prefixes([[1]], same={"x": OTHER}),
            r"same\['x'\] must be a list or",
        ),
        (lambda: find_prefixes(OTHER), "input_ids must hold the token ids of each sample, got 5"),
        (lambda: find_prefixes(np.array(3)), "input_ids must hold the token ids of each sample"),
        (lambda: find_prefixes([[1.5, 2.0]]), r"sample 0 must be .* got \[1.5, 2.0\]"),
        (lambda: find_prefixes([[2**64 - 1], [-1]]), "sample 0 .* integers below 2.*63"),
        (
            lambda: make_prefixes([0, 1], [0, 1]).check(OTHER),
            "lengths of the samples must be",
        ),
        (
            lambda: make_prefixes([0, 1], [0, 1]).take([0.5]),
            "the samples to take must be a",
        ),
        (
            lambda: find_prefixes([[1], [1]], same={"x": [[[1, 2], [3]]] * 2}),
            r"same\['x'\] has a list, which cannot be compared",
        ),
        (
            lambda: make_plan([5, 6], Recipe(layout=Packed(max_tokens=20)), prefixes=LISTS),
            r"prefixes must be Prefixes, got list. Use find_prefixes",
        ),
    ],
)
def test_other_values_are_refused_in_one_sentence(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_groups_are_not_replaced_by_an_input_of_that_name() -> None:
    prefixes = find_prefixes([[1, 2, 3], [1, 2, 4]], groups=[0, 1], same={"groups": [5, 5]})
    assert prefixes.shared.tolist() == [0, 0]
