"""The README works as written."""

import re
from importlib import import_module
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def test_its_python_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "steps.evenstep").exists()
    assert "True" in capsys.readouterr().out  # packs_optimal


def test_its_tree_names_what_there_is() -> None:
    tree = README.read_text("utf-8").split("    src/evenstep/\n")[1].split("    tests/")[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    package = README.parent / "src" / "evenstep"
    there = {
        path.name
        for path in package.iterdir()
        if path.name not in ("py.typed", "__pycache__", "__init__.py", "__main__.py")
    }
    assert named == there


def test_its_table_says_where_names_are() -> None:
    rows = re.findall(r"^\| `(evenstep\..*?) \| (.*?) \|$", README.read_text("utf-8"), re.M)
    assert len(rows) == 6
    for modules, names in rows:
        first, *others = re.findall(r"[\w.]+", modules)
        package = first.rsplit(".", 1)[0]
        there = [import_module(name) for name in (first, *(package + name for name in others))]
        for name in re.findall(r"\w+", names):
            assert any(hasattr(module, name) for module in there), name
