"""What users import: every public name, from its package, with a docstring that shows its use."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate.packages import PACKAGES

ROOT = Path(__file__).resolve().parents[1]


def names_of(package: str) -> list[str]:
    return list(importlib.import_module(package).__all__)


NAMES = [(package, name) for package in PACKAGES for name in names_of(package)]


@pytest.mark.parametrize("package", ["evenstep.compat", "evenstep.integrations"])
def test_what_lists_its_names_is_public(package: str) -> None:
    folder = ROOT / "src" / package.replace(".", "/")
    files = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    listing = [path for path in files if "\n__all__ = " in path.read_text("utf-8")]
    names = {(path.parent if path.stem == "__init__" else path).stem for path in listing}
    assert {f"{package}.{name}" for name in names} == {
        each for each in PACKAGES if each.startswith(f"{package}.")
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_names_in_order_and_gives_each(package: str) -> None:
    module, names = importlib.import_module(package), names_of(package)
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(module, name) is not None
    assert set(names) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


def test_tests_import_modules_through_one_file_alone() -> None:
    """So that moving code inside a package changes no test but `tests/internals.py`."""
    single = ("cli", "compat", "errors", "integrations", "screen")
    packages = {*PACKAGES, *(f"evenstep.{name}" for name in single)}
    others = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / "tests").rglob("*.py")
        if path != ROOT / "tests" / "internals.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for module in modules_of(node)
        if module.split(".")[0] == "evenstep" and module not in packages
    }
    assert others == set()


def modules_of(node: ast.AST) -> list[str]:
    """The modules that an import, or a patch of a dotted name, names."""
    match node:
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(name)), *_]):
            return [name.rpartition(".")[0]]
    return []


def test_every_name_has_one_home() -> None:
    homes: dict[str, list[str]] = {}
    for package, name in NAMES:
        homes.setdefault(name, []).append(package)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize("package", [p for p in PACKAGES if "." not in p or p.count(".") == 1])
def test_what_the_type_checker_sees_is_what_is_loaded(package: str) -> None:
    source = ast.parse((ROOT / "src" / package.replace(".", "/") / "__init__.py").read_text())
    blocks = [node for node in source.body if isinstance(node, ast.If)]
    typed = {
        alias.name: node.module
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(typed) == names_of(package)
    for name, module in typed.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(
            importlib.import_module(package), name
        )


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_has_a_docstring_with_an_example(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    text = inspect.getdoc(value)
    assert text, f"{package}.{name} has no docstring"
    if inspect.isclass(value) and (
        issubclass(value, Exception) or getattr(value, "_is_protocol", False)
    ):
        return  # raised or implemented rather than called
    assert ">>>" in text or "\n    " in text, f"{package}.{name} shows no example"


def test_the_files_of_the_tour_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    tour = re.findall(
        r"`((?:core|data|planning|tensors|train|testing|integrations)/[\w/.]+)`", text
    )
    assert tour
    for path in tour:
        assert (ROOT / "src" / "evenstep" / path).exists(), path


def test_the_tree_of_the_contributing_page_names_what_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    tree = text.split("    src/evenstep/\n")[1].split("    tests/")[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line[6:7] != " "}
    left_out = ("py.typed", "__pycache__", "__init__.py", "__main__.py")
    there = {path.name for path in (ROOT / "src" / "evenstep").iterdir()} - set(left_out)
    assert named == there


def test_the_tour_has_at_most_eight_stations() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.split("## One sample, from file to gradient and back")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d+\. ", section, re.M)) <= 8


def printed(program: str) -> str:
    """What a program prints in a process of its own."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_evenstep_loads_neither_torch_nor_the_compiler() -> None:
    program = (
        "import sys, evenstep\n"
        "from evenstep import Packed, Recipe, Plan\n"
        "from evenstep.data import InMemory\n"
        "print([name for name in ('torch', 'numba', 'rich', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("torch", "from evenstep.train import Runner"),
        ("torch", "from evenstep.tensors import Batch"),
        ("torch", "import evenstep.integrations.dataloader"),
        ("torch", "import evenstep.compat.cosmos_rl"),
        ("torch", "from evenstep.demo import Decoder"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command(module: str, use: str) -> None:
    program = (
        "import sys\n"
        f"sys.modules[{module!r}] = None\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        f"del sys.modules[{module!r}]\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"try:\n    {use}\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    said = done.stdout.strip()
    assert f'needs {module}, which is not installed. Run pip install -e ".[torch]"' in said
    assert "\n" not in said
