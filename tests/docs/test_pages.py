"""Every code block of README and the documentation runs, or says what it needs."""

from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from evenstep.config import load_settings
from tests.docs.blocks import PAGES, Block, blocks_of, name_of, page_blocks
from tests.docs.running import run_in_a_process, run_page

QUICK = {
    "docs/compat/areal.md",
    "docs/lengths.md",
}
"""Pages of a few seconds; the others are slow tests."""
KINDS = {"bash", "json", "python", "text", "toml", "yaml"}


def marked(page: Path) -> object:
    slow = () if name_of(page) in QUICK else (pytest.mark.slow,)
    return pytest.param(page, id=name_of(page), marks=slow)


def runs(blocks: list[Block]) -> bool:
    return any(b.kind in ("python", "bash") and not b.needs and not b.file for b in blocks)


RUN = [page for page in PAGES if runs(page_blocks(page))]


@pytest.mark.parametrize("page", [marked(page) for page in RUN])
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    run_in_a_process(name_of(page), tmp_path)


def test_the_quick_pages_exist_and_run_python_and_commands() -> None:
    quick = [page for page in RUN if name_of(page) in QUICK]
    assert len(quick) == len(QUICK)
    kinds = {b.kind for page in quick for b in page_blocks(page) if not b.needs}
    assert {"python", "bash"} <= kinds


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_is_fenced_and_has_a_known_kind(page: Path) -> None:
    text = page.read_text("utf-8")
    indented = [t for t in MarkdownIt().enable("table").parse(text) if t.type == "code_block"]
    assert [f"line {token.map[0] + 1}: {token.content}" for token in indented if token.map] == []
    blocks = blocks_of(text)
    assert {block.kind for block in blocks} <= KINDS
    fences = [t for t in MarkdownIt().enable("table").parse(text) if t.type == "fence"]
    assert len(fences) == len(blocks)
    marks = text.count("<!-- not run: ") + text.count("<!-- file: ")
    assert marks == sum(1 for block in blocks if block.needs or block.file)


def configurations(page: Path) -> list[Block]:
    """The YAML blocks of a page that are native configurations."""
    blocks = [block for block in page_blocks(page) if block.kind == "yaml"]
    return [block for block in blocks if "layout" in (yaml.safe_load(block.text) or {})]


@pytest.mark.parametrize("page", [p for p in PAGES if configurations(p)], ids=name_of)
def test_a_configuration_on_a_page_is_valid(page: Path, tmp_path: Path) -> None:
    for block in configurations(page):
        file = tmp_path / f"line-{block.line}.yaml"
        file.write_text(block.text, "utf-8")
        assert load_settings(file).recipe is not None


def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    text = "```python\nx = 1\n```\n```bash\nfalse\ntrue\n```\n"
    with pytest.raises(AssertionError, match=r"page\.md:5 exits with 1"):
        run_page("page.md", blocks_of(text), tmp_path)
    with pytest.raises(ZeroDivisionError):
        run_page("page.md", blocks_of("```python\n1 / 0\n```\n"), tmp_path)


def test_files_and_names_are_kept_between_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "<!-- file: a/b.py -->\n```python\nprint(2)\n```\n"
        "```bash\npython a/b.py > out.txt\n```\n"
        "<!-- not run: needs a GPU -->\n```python\nraise SystemExit\n```\n"
        "```python\nfrom pathlib import Path\n```\n"
        '```python\nassert Path("out.txt").read_text() == "2\\n"\n```\n'
    )
    run_page("page.md", blocks_of(text), tmp_path)
