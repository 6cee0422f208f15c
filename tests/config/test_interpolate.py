"""Interpolations are worth what OmegaConf says, or the one that cannot be resolved is named."""

from typing import Any

import pytest

from tests.internals import Interpolated, UnresolvedError

DATA: dict[str, Any] = {
    "a": 3,
    "half": 0.5,
    "name": "x",
    "list": [1, 2, {"deep": 7}],
    "empty": None,
    "missing": "???",
    "b": {"c": 4, "d": "${.c}", "e": "${..a}", "f": {"g": "${...a}", "h": "${..c}"}},
    "section": "${b}",
    "loop": "${pool}",
    "pool": "${loop}",
}


def value(text: str, **more: Any) -> Any:
    return Interpolated({**DATA, **more, "here": {"x": text, "y": 5}}).at(("here", "x"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("${a}", 3),
        ("${b.c}", 4),
        ("${b.d}", 4),
        ("${b.e}", 3),
        ("${b.f.g}", 3),
        ("${b.f.h}", 4),
        ("${.y}", 5),
        ("${..a}", 3),
        ("${list.1}", 2),
        ("${list[2].deep}", 7),
        ("${empty}", None),
        ("${section.c}", 4),
        ("${section.f.h}", 4),
        ("${mul:2,3}", 6),
        ("${mul:${a}, ${b.c}}", 12),
        ("${add:${mul:2,${a}},1}", 7),
        ("${sub:5,2}", 3),
        ("${div:6,4}", 1.5),
        ("${max:2,${a}}", 3),
        ("${min:2,${a}}", 2),
        ("${mul:${half},4}", 2.0),
        ("${oc.select:b.c,9}", 4),
        ("${oc.select:b.zzz,9}", 9),
        ("${oc.select:b.zzz}", None),
        ("${oc.select:b.zzz,${a}}", 3),
        ("${oc.select:.y,9}", 5),
        ("${oc.select:nowhere.at.all,[]}", []),
        ("${oc.select:b.zzz,'a, b'}", "a, b"),
        ("run-${name}/${a}", "run-x/3"),
        ("\\${a}", "${a}"),
        ("${b.${oc.select:zzz,c}}", 4),
    ],
)
def test_interpolations_are_resolved(text: str, expected: Any) -> None:
    found = value(text)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${oc.env:HOME}", "${oc.env:HOME}, which cannot be resolved: it depends on the environ"),
        ("${oc.env:HOME,1}", "it depends on the environment"),
        ("${now:%Y-%m-%d}", "now is not known"),
        ("${eval:1+1}", "eval is not known"),
        ("${zzz}", "there is no zzz"),
        ("${b.zzz.y}", "there is no b.zzz.y"),
        ("${....a}", "not the path of a key"),
        ("${mul:1}", "mul takes two numbers"),
        ("${mul:1,x}", "mul takes two numbers"),
        ("${mul:1,true}", "mul takes two numbers"),
        ("${div:1,0}", "division by zero"),
        ("${a", "closing brace"),
        ("${}", "not the path of a key"),
        ("${mul:${zzz},1}", "there is no zzz"),
        ("${loop}", "refers to itself"),
        ("${here.x}", "refers to itself"),
        ("${missing}", "???"),
        ("${oc.select:b.d,{}", "closing brace"),
    ],
)
def test_what_cannot_be_resolved_is_named(text: str, why: str) -> None:
    with pytest.raises(UnresolvedError) as caught:
        value(text)
    assert why in str(caught.value)


def test_a_chain_that_doubles_at_every_step_is_refused() -> None:
    data = {f"x{n}": f"${{x{n + 1}}}${{x{n + 1}}}" for n in range(40)} | {"x40": "y"}
    with pytest.raises(UnresolvedError):
        Interpolated(data).at(("x0",))


def test_a_path_without_a_value_is_a_key_error() -> None:
    for path in (("zzz",), ("a", "b"), ("list", "9")):
        with pytest.raises(KeyError):
            Interpolated(DATA).at(path)
