"""The reference is current and complete."""

import dataclasses
import importlib

import pytest

from docs.generate.commands import commands, options_of
from docs.generate.packages import PACKAGES
from docs.generate.reference import FOLDER, texts
from evenstep import Recipe
from tests.docs.links import anchors_of
from tests.internals import PARTS, SECTIONS


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return texts()


def test_the_pages_are_what_the_source_says(made: dict[str, str]) -> None:
    filed = {
        path.relative_to(FOLDER).as_posix(): path.read_text("utf-8")
        for path in FOLDER.rglob("*.md")
    }
    assert filed.keys() == made.keys(), "run make reference"
    assert [name for name in made if filed[name] != made[name]] == [], "run make reference"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_section(package: str) -> None:
    anchors = anchors_of((FOLDER / "api" / f"{package}.md").read_text("utf-8"))
    for name in importlib.import_module(package).__all__:
        assert name.lower() in anchors


def test_every_command_and_option_is_there(made: dict[str, str]) -> None:
    page = made["command-line.md"]
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    assert list(sections) == list(commands())
    for name, command in commands().items():
        for option in options_of(command):
            assert f"`{option.opts[0]}" in sections[name]
        assert "```bash\n" + name in sections[name] or f"\n{name}" in sections[name]


def test_every_key_of_a_configuration_is_there(made: dict[str, str]) -> None:
    page = made["configuration.md"]
    for field in dataclasses.fields(Recipe):
        assert f"| `{field.name}` |" in page or f"\n## {field.name}\n" in page
    for section in SECTIONS:
        assert f"\n## {section}\n" in page
    for section, kind in PARTS.items():
        for field in dataclasses.fields(kind):
            assert f"| `{section}.{field.name}` |" in page


def test_no_text_depends_on_the_machine(made: dict[str, str]) -> None:
    for name, text in made.items():
        assert " at 0x" not in text, name
        assert str(FOLDER) not in text, name
