"""Files that build on other files: the `defaults` of NeMo-RL and Hydra.

defaults: base.yaml                      a file, relative to this one's folder
defaults: [base.yaml, more.yaml]         several; later ones win, this file wins over all
defaults: [actor: dp_actor]              actor/dp_actor.yaml below the key `actor`
defaults: [actor@policy.actor: dp_actor] the same file below `policy.actor`
defaults: [base, _self_, last]           where this file stands among them
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as File
from typing import Any, NamedTuple

from evenstep.config.document import Document, read_document
from evenstep.config.tree import Layer, Path, Tree, merged, nested
from evenstep.core.glimpse import cut, glimpse
from evenstep.errors import ConfigError, FileError

_SELF = "_self_"
_SUFFIXES = (".yaml", ".yml")
_DEEPEST = 50


class _Entry(NamedTuple):
    """One entry of a defaults list."""

    name: str
    at: Path
    optional: bool = False


def read_tree(path: File) -> Tree:
    """A file merged with the files that its `defaults` name."""
    layers = tuple(_layers(read_document(path, merges=True), (), ()))
    data: dict[str, Any] = {}
    for layer in layers:
        own = {key: value for key, value in layer.document.data.items() if key != "defaults"}
        data = merged(data, nested(layer.at, own))
    return Tree(data, layers)


def _layers(document: Document, at: Path, within: tuple[File, ...]) -> list[Layer]:
    """The layers of a document in the order in which they are merged."""
    file = document.path.resolve()
    if file in within or len(within) > _DEEPEST:
        raise ConfigError(f"{document.path} is among its own defaults. Remove one of the entries.")
    entries = _entries(document, at)
    if not any(entry.name == _SELF for entry in entries):
        entries.append(_Entry(_SELF, at))
    found: list[Layer] = []
    for entry in entries:
        if entry.name == _SELF:
            found.append(Layer(document, at))
            continue
        target = _file(document, entry)
        if target is not None:
            found += _layers(read_document(target, merges=True), entry.at, (*within, file))
    return found


def _entries(document: Document, at: Path) -> list[_Entry]:
    listed = document.data.get("defaults", [])
    listed = listed if isinstance(listed, list) else [listed]
    found = []
    for item in listed:
        if isinstance(item, str):
            name, _, package = item.partition("@")
            found.append(_Entry(name, at if package in ("", "_here_") else _package(package, at)))
        elif isinstance(item, Mapping) and len(item) == 1:
            entry = _group(document, *next(iter(item.items())), at)
            found += [] if entry is None else [entry]
        else:
            raise ConfigError(
                f"{document.place(['defaults'])}: defaults has {glimpse(item)}, expected the name "
                f"of a file or `group: name`."
            )
    return found


def _group(document: Document, key: str, value: Any, at: Path) -> _Entry | None:
    """The entry `group@package: name`; None if it selects nothing or is Hydra's own."""
    words = str(key).split()
    optional = "optional" in words[:-1]
    group, _, package = words[-1].partition("@")
    if value is None or group.startswith("hydra/"):
        return None
    if not isinstance(value, str) or "${" in value:
        raise ConfigError(
            f"{document.place(['defaults'])}: defaults has {glimpse({key: value})}, which names no "
            f"file. Write the name of the file out."
        )
    inside = (*at, *group.strip("/").split("/"))
    return _Entry(f"{group}/{value}", _package(package, at) if package else inside, optional)


def _package(package: str, at: Path) -> Path:
    if package == "_global_":
        return ()
    if package == "_here_":
        return at
    inside = package.removeprefix("_global_.")
    return tuple(inside.split(".")) if inside != package else (*at, *package.split("."))


def _file(document: Document, entry: _Entry) -> File | None:
    """The file of an entry; a group such as /optim is looked for in the folders above as well."""
    folder = document.path.parent
    bases = [folder / entry.name]
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
        f"{document.place(['defaults'])}: defaults names {cut(entry.name)}, and {place} has no "
        f"such file. Add the file, or remove the entry."
    )
