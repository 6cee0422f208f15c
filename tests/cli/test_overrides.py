"""Plain options beside --set, and numbers such as 16k."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cli import main
from tests.examples import examples
from tests.internals import number_of, overrides_of, resolved


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("5 3 8 2 7 1 4 6\n")
    return str(path)


def recipe(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return (found[1] if isinstance(found, list) else found)["recipe"]  # after padded batches of 8


@given(
    st.integers(0, 10**12), st.sampled_from(["", "k", "K", "m", "M"]), st.sampled_from(["", " "])
)
@examples(200)
def test_k_is_1024_and_m_is_its_square(number: int, unit: str, space: str) -> None:
    assert number_of(f"{space}{number}{unit}{space}") == number * 1024 ** (
        " km".index(unit.lower() or " ")
    )


@given(st.text(max_size=8))
@examples(200)
def test_any_other_text_is_no_number(text: str) -> None:
    found = number_of(text)
    if found is None:
        assert not text.strip().isdecimal() or not text.isascii()
    else:
        assert text.strip().lower().rstrip("km").isdecimal()


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_plain_options_are_the_keys_that_they_name(
    command: str, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ("--max-tokens", "1k", "--ranks", "2", "--samples-per-step", "4")
    keys = ("layout.max_tokens=1024", "topology.dp=2", "steps.samples=4")
    found = recipe(capsys, command, lengths, *plain)
    assert found == recipe(capsys, command, lengths, *(w for k in keys for w in ("--set", k)))
    assert (found["layout"]["max_tokens"], found["topology"]["dp"]) == (1024, 2)


def test_plain_options_replace_the_values_of_a_file_and_of_a_saved_plan(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, saved = str(tmp_path / "a.yaml"), str(tmp_path / "a.evenstep")
    Path(config).write_text("layout: {kind: padded, max_tokens: 64}\ntopology: {dp: 4}\n")
    found = recipe(capsys, "plan", lengths, "--config", config, "--ranks", "2", "--out", saved)
    assert (found["layout"]["kind"], found["topology"]["dp"]) == ("padded", 2)
    found = recipe(capsys, "plan", saved, "--max-tokens", "2k")
    assert (found["layout"]["max_tokens"], found["topology"]["dp"]) == (2048, 2)


def test_the_number_that_a_unit_means_is_shown_on_standard_error(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", lengths, "--max-tokens", "16k", "--set", "steps.samples=1K"]) == 0
    remarks = capsys.readouterr().err.splitlines()
    assert remarks == ["--set steps.samples 1K is 1,024", "--max-tokens 16k is 16,384"]
    assert main(["plan", lengths, "--max-tokens", "16384"]) == 0
    assert capsys.readouterr().err == ""


def test_units_in_strategies_and_configurations_are_understood(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = ("--strategy", "wide: layout.max_tokens=2k")
    assert main(["compare", lengths, "--max-tokens", "64", *strategy, "--json"]) == 0
    found = {entry["strategy"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["wide"]["recipe"]["layout"]["max_tokens"] == 2048
    config = tmp_path / "a.yaml"
    config.write_text("layout: {max_tokens: 64}\n")
    assert main(["config", "show", str(config), "--set", "layout.max_tokens=4k", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["layout"]["max_tokens"] == 4096


def test_a_part_of_a_section_may_be_set_beside_a_plain_option() -> None:
    given = ["layout={kind: padded}", "layout.round_to=8", "steps.tokens=1k"]
    found = overrides_of(given, max_tokens="64")
    assert found == [
        "layout={kind: padded}",
        "layout.round_to=8",
        "steps.tokens=1024",
        "layout.max_tokens=64",
    ]


@pytest.mark.parametrize(
    "text", ["a='16k'", 'a="16k"', "a=16kb", "a=k", "a=512", "a=1_6k", "a", "a=٣k"]
)
def test_quoted_text_and_other_words_stay_as_they_are(text: str) -> None:
    assert resolved(text) == text
