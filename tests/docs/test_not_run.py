"""Blocks that need what is not here: listed, and their names, arguments and commands exist."""

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from docs.generate.packages import PACKAGES
from tests.docs.blocks import DOCS, PAGES, name_of, page_blocks
from tests.docs.checking import command_faults, faults_of, is_installed_from_here, python_faults
from tests.docs.not_run import LIST, REASONS, SYSTEMS, listed


def test_the_list_of_blocks_that_are_not_run_is_current() -> None:
    assert LIST.read_text("utf-8") == listed(), "run python -m tests.docs.not_run and review it"


def test_every_such_block_says_what_it_needs() -> None:
    allowed = {*(f"needs {reason}" for reason in REASONS), *(f"needs {name}" for name in SYSTEMS)}
    given = {block.needs for page in PAGES for block in page_blocks(page) if block.needs}
    assert given <= allowed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_names_arguments_and_commands_of_a_page_exist(page: Path) -> None:
    imported: dict[str, Any] = {}
    for block in page_blocks(page):
        faults = faults_of(block, imported)
        assert faults == [], f"{page.name}:{block.line}"
        if "pip install" in block.text:
            assert is_installed_from_here(block.text)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_arguments_in_examples_of_docstrings_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = {name: getattr(module, name) for name in module.__all__}
    for block in page_blocks(DOCS / "reference" / "api" / f"{package}.md"):
        with suppress(SyntaxError):  # signatures
            assert faults_of(block, dict(names)) == [], f"{package}.md:{block.line}"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("from evenstep.core.plan import Plan", "evenstep.core.plan is not a public package"),
        ("from evenstep.data import Plan", "evenstep.data has no public name Plan"),
        ("from evenstep import Cost\nCost.name('x')", "Cost has no attribute name"),
        ("import evenstep\nevenstep.Recipe(lay=1)", "evenstep.Recipe has no argument lay"),
        ("from evenstep import Steps as S\nS(sample=4)", "S has no argument sample"),
    ],
)
def test_wrong_names_and_arguments_are_found(code: str, fault: str) -> None:
    assert python_faults(code, {}) == [fault]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("evenstep config chek a.yaml", "evenstep config has no command chek"),
        ("torchrun --nproc-per-node 2 -m evenstep train a.yaml --sets x=1", "has no option --sets"),
        ("evenstep plan a.npy \\\n    --max-token 8", "evenstep plan has no option --max-token"),
        ("python examples/nothing.py", "there is no examples/nothing.py"),
        ("make nothing PLANS=3", "make has no target nothing"),
    ],
)
def test_wrong_commands_are_found(line: str, fault: str) -> None:
    (found,) = command_faults(line)
    assert fault in found
