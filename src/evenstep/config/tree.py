"""Tree: a file and the files that it builds on as one, with the place that each value comes from.

The `defaults` of NeMo-RL and Hydra:

defaults: base.yaml                      a file, relative to this one's folder
defaults: [base.yaml, more.yaml]         several; later ones win, this file wins over all
defaults: [actor: dp_actor]              actor/dp_actor.yaml below the key `actor`
defaults: [actor@policy.actor: dp_actor] the same file below `policy.actor`
defaults: [base, _self_, last]           where this file stands among them
defaults: [engine: dp, actor: ${engine}] actor/dp.yaml; a file above, or `--set engine=...`, may
                                         choose another: `override engine: megatron`
hydra: {searchpath: [file://configs]}    further folders for the files that defaults name
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any, NamedTuple, TypeAlias

from evenstep.config.document import Document, read_document
from evenstep.config.nested import has, merged, nested
from evenstep.core.text import short_repr, shorten
from evenstep.errors import ConfigError, FileError

Path: TypeAlias = tuple[str, ...]

_SELF = "_self_"
_SUFFIXES = (".yaml", ".yml")
_DEEPEST = 50
_CHOICE = re.compile(r"\$\{([\w/@.]+)\}")


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A document whose keys are merged below `at`."""

    document: Document
    at: Path = ()


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The merged data and its layers; later layers win. `groups` chose files of Hydra."""

    data: dict[str, Any]
    layers: tuple[Layer, ...]
    groups: frozenset[str] = frozenset()

    def overridden(self, values: Mapping[Path, Any]) -> Tree:
        """The tree with values of the command line, which win; their place is `--set`."""
        data: Any = {}
        for path, value in values.items():
            data = merged(data, nested(path, value))
        layer = Layer(Document(File("--set"), data, lambda _: None))
        return Tree(merged(self.data, data), (*self.layers, layer), self.groups)

    def place(self, path: Sequence[str]) -> str:
        """File and line of the value at `path`."""
        for layer in reversed(self.layers):
            size = len(layer.at)
            if tuple(path[:size]) == layer.at and has(layer.document.data, path[size:]):
                return layer.document.place(path[size:])
        return self.layers[-1].document.path.name if self.layers else ""


class _Entry(NamedTuple):
    """One entry of a defaults list."""

    name: str
    at: Path
    optional: bool = False
    placed: bool = False


class _Search(NamedTuple):
    """What all files of a tree share: chosen files by group, groups seen, further folders."""

    choices: dict[str, str]
    groups: set[str]
    folders: list[File]


def read_tree(path: File, choices: Mapping[str, str] | None = None) -> Tree:
    """A file merged with the files that its `defaults` name.

    `choices` names the file of a group, or of `group@package`, in place of the file's own choice.
    """
    document = read_document(path, merges=True)
    search = _Search(dict(choices or {}), set(), _search_folders(document))
    layers = tuple(_layers(document, (), (), search))
    data: dict[str, Any] = {}
    for layer in layers:
        own = {key: value for key, value in layer.document.data.items() if key != "defaults"}
        data = merged(data, nested(layer.at, own))
    return Tree(data, layers, frozenset(search.groups))


def _layers(document: Document, at: Path, within: tuple[File, ...], search: _Search) -> list[Layer]:
    """The layers of a document in the order in which they are merged."""
    file = document.path.resolve()
    if file in within or len(within) > _DEEPEST:
        raise ConfigError(f"{document.path} is among its own defaults. Remove one of the entries.")
    entries = _entries(document, at, search)
    if not any(entry.name == _SELF for entry in entries):
        entries.append(_Entry(_SELF, at))
    found: list[Layer] = []
    for entry in entries:
        if entry.name == _SELF:
            found.append(Layer(document, at))
            continue
        target = _file(document, entry, search)
        if target is not None:
            below = read_document(target, merges=True)
            place = entry.at
            if below.package and not entry.placed:
                place = _package(below.package, at)
            found += _layers(below, place, (*within, file), search)
    return found


def _entries(document: Document, at: Path, search: _Search) -> list[_Entry]:
    listed = document.data.get("defaults", [])
    listed = listed if isinstance(listed, list) else [listed]
    for item in listed:  # what this file overrides in the files below; a file above has the say
        key = next(iter(item)) if isinstance(item, Mapping) and len(item) == 1 else ""
        if "override" in str(key).split()[:-1] and isinstance(item[key], str):
            search.choices.setdefault(str(key).split()[-1], item[key])
    found = []
    for item in listed:
        if isinstance(item, str):
            name, _, package = item.partition("@")
            place = at if package in ("", "_here_") else _package(package, at)
            found.append(_Entry(name, place, placed=bool(package)))
        elif isinstance(item, Mapping) and len(item) == 1:
            entry = _group(document, *next(iter(item.items())), at, search)
            found += [] if entry is None else [entry]
        else:
            raise ConfigError(
                f"{document.place(['defaults'])}: defaults has {short_repr(item)}, expected the "
                f"name of a file or `group: name`."
            )
    return found


def _group(document: Document, key: str, value: Any, at: Path, search: _Search) -> _Entry | None:
    """The entry `group@package: name`; None if it selects nothing or is Hydra's own."""
    words = str(key).split()
    group, _, package = words[-1].partition("@")
    if "override" in words[:-1] or group.startswith("hydra/"):
        return None
    search.groups.add(words[-1])
    value = search.choices.get(words[-1], value)
    if value is None:
        return None
    name = _CHOICE.sub(lambda choice: search.choices.get(choice[1], choice[0]), str(value))
    if not isinstance(value, str) or "${" in name:
        raise ConfigError(
            f"{document.place(['defaults'])}: defaults has {short_repr({key: value})}, which names "
            f"no file. Write the name of the file out."
        )
    search.choices.setdefault(words[-1], name)
    inside = (*at, *group.strip("/").split("/"))
    place = _package(package, at) if package else inside
    return _Entry(f"{group}/{name}", place, "optional" in words[:-1], bool(package))


def _package(package: str, at: Path) -> Path:
    if package == "_global_":
        return ()
    if package == "_here_":
        return at
    inside = package.removeprefix("_global_.")
    return tuple(inside.split(".")) if inside != package else (*at, *package.split("."))


def _search_folders(document: Document) -> list[File]:
    """The folders of `hydra.searchpath`: below the working directory, or a folder above the file.

    `file://verl/trainer/config`, or `pkg://verl.trainer.config` of an installed package.
    """
    hydra = document.data.get("hydra")
    listed = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    folders = []
    for item in listed if isinstance(listed, list) else []:
        kind, _, place = str(item).rpartition("://")
        path = File(place.replace(".", "/") if kind == "pkg" else place)
        above = [File.cwd(), *document.path.resolve().parents]
        if kind == "pkg" and path.parts:
            spec = importlib.util.find_spec(path.parts[0])
            above += [
                File(found).parent for found in (spec and spec.submodule_search_locations) or ()
            ]
        folders += [base / path for base in above if (base / path).is_dir()][:1]
    return folders


def _file(document: Document, entry: _Entry, search: _Search) -> File | None:
    """The file of an entry; a group such as /optim is looked for in the folders above as well."""
    folder = document.path.parent
    bases = [folder / entry.name, *(base / entry.name for base in search.folders)]
    if entry.name.startswith("/"):
        above = [folder, *list(folder.resolve().parents)[:3]]
        bases = [File(entry.name), *(base / entry.name.lstrip("/") for base in above)]
    for base in bases:
        for suffix in ("", *_SUFFIXES):
            target = base.with_name(f"{base.name}{suffix}")
            if target.is_file():
                return target
    if entry.optional:
        return None
    place = folder if str(folder) != "." else "the working directory"
    raise FileError(
        f"{document.place(['defaults'])}: defaults names {shorten(entry.name)}, and {place} has no "
        f"such file. Add the file or its folder (hydra.searchpath), or remove the entry."
    )
