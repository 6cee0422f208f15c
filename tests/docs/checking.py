"""Check code without running it: the names, arguments and commands of Evenstep in it exist."""

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

from docs.generate.commands import commands, spellings
from docs.generate.packages import PACKAGES
from tests.docs.blocks import ROOT, Block

_COMMANDS = {name.removeprefix("evenstep").strip(): each for name, each in commands().items()}


def faults_of(block: Block, imported: dict[str, Any]) -> list[str]:
    """What is wrong with a block; `imported` are the names of Evenstep that the page has so far."""
    if block.kind == "python":
        return python_faults(block.text, imported)
    return command_faults(block.text) if block.kind == "bash" else []


def python_faults(code: str, imported: dict[str, Any]) -> list[str]:
    """Imports that are not public, and keyword arguments that a signature lacks.

    >>> python_faults("from evenstep import Recipes", {})
    ['evenstep has no public name Recipes']
    >>> python_faults("from evenstep import Packed\\nPacked(tokens=8)", {})
    ['Packed has no argument tokens']
    """
    tree = ast.parse(code)
    faults: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("evenstep"):
            faults += _import(str(node.module), node.names, imported)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("evenstep") and alias.name not in PACKAGES:
                    faults.append(f"{alias.name} is not a public package")
                elif alias.name.startswith("evenstep"):
                    imported["evenstep"] = importlib.import_module("evenstep")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            faults += _call(node, imported)
    return faults


def _import(module: str, names: list[ast.alias], imported: dict[str, Any]) -> list[str]:
    if module not in PACKAGES:
        return [f"{module} is not a public package"]
    package, faults = importlib.import_module(module), []
    for alias in names:
        if alias.name in package.__all__:
            imported[alias.asname or alias.name] = getattr(package, alias.name)
        else:
            faults.append(f"{module} has no public name {alias.name}")
    return faults


def _call(node: ast.Call, imported: dict[str, Any]) -> list[str]:
    value = _value(node.func, imported)
    if isinstance(value, str):
        return [value]
    try:
        parameters = inspect.signature(value).parameters if value is not None else None
    except (TypeError, ValueError):
        return []
    if parameters is None or any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return []
    given = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
    return [f"{ast.unparse(node.func)} has no argument {n}" for n in given if n not in parameters]


def _value(node: ast.expr, imported: dict[str, Any]) -> Any:
    """What a name or `Name.attribute` of Evenstep is; None for others; a fault as text."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _value(node.value, imported)
    if owner is None or isinstance(owner, str):
        return owner
    if not hasattr(owner, node.attr):
        return f"{ast.unparse(node.value)} has no attribute {node.attr}"
    return getattr(owner, node.attr)


def command_faults(text: str) -> list[str]:
    """Commands, options, programs and targets that do not exist.

    >>> command_faults("evenstep plann x.npy")
    ['evenstep has no command plann']
    >>> command_faults("evenstep plan x.npy --rank 4  # eight")
    ['evenstep plan has no option --rank']
    """
    lines = text.replace("\\\n", " ").splitlines()
    return [fault for line in lines for fault in _line_faults(shlex.split(line, comments=True))]


def _line_faults(words: list[str]) -> list[str]:
    if "evenstep" in words and (words[0] == "evenstep" or "-m" in words):
        return _evenstep(words[words.index("evenstep") + 1 :])
    programs = [word for word in words if word.endswith(".py") and "/" in word]
    faults = [f"there is no {each}" for each in programs if not (ROOT / each).exists()]
    if words[:1] == ["make"]:
        made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
        faults += [f"make has no target {w}" for w in words[1:] if "=" not in w and w not in made]
    return faults


def _evenstep(words: list[str]) -> list[str]:
    name, rest = "", list(words)
    while rest and not rest[0].startswith("-") and f"{name} {rest[0]}".strip() in _COMMANDS:
        name = f"{name} {rest.pop(0)}".strip()
    command, called = _COMMANDS[name], f"evenstep {name}".strip()
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return [f"{called} has no command {rest[0]}"]
    known = spellings(command)
    options = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return [f"{called} has no option {option}" for option in options if option not in known]


def extras_of(text: str) -> set[str]:
    """The extras that a `pip install` names."""
    return {e for group in re.findall(r"\[([\w,]+)\]", text) for e in group.split(",")}


def is_installed_from_here(text: str, root: Path = ROOT) -> bool:
    """Whether all extras of a `pip install` line exist."""
    declared = (root / "pyproject.toml").read_text("utf-8").partition("optional-dependencies]")[2]
    known = set(re.findall(r"^(\w+) = \[", declared.partition("[project.scripts]")[0], re.M))
    return extras_of(text) <= known
