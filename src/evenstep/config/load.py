"""Load settings and recipes from files and overrides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.config.dialects import DIALECTS, Dialect
from evenstep.config.dialects.draft import log_probs_section
from evenstep.config.dialects.reader import Reader
from evenstep.config.document import Document, read_document
from evenstep.config.faults import FaultsError, unknown_word
from evenstep.config.model import beside, with_model
from evenstep.config.native import PARTS, decode_settings
from evenstep.config.nested import has, leaves
from evenstep.config.override import overridden, parsed
from evenstep.config.settings import Settings
from evenstep.config.tree import Layer, Tree, read_tree
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError

_OVERRIDE = "--set"
_RECIPE = frozenset({*(field.name for field in dataclasses.fields(Recipe)), "log_probs"})


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Settings, where each value comes from, and what else there is to say about a file.

    origins  the place of each value, by its dotted path
    notes    what the user should know, such as keys without effect
    ignored  keys of another system's file that have nothing to do with batches

        loaded = load_file(Path("grpo.yaml"), dialect="nemo-rl")
        loaded.origins["topology.dp"]  # "derived: 16 GPUs (cluster) / 8"
    """

    settings: Settings
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def load_recipe(
    path: Path | None = None,
    overrides: Iterable[str] = (),
    base: Mapping[str, Any] | None = None,
    model: str | None = None,
    dialect: str | None = None,
) -> Recipe:
    """The training recipe of a file, or of `base` without a file, with overrides applied.

    `model` is the name of a known model or the path of its configuration, which gives the cost.
    A path is relative to the working directory; one in the file, to the file's folder. `dialect`
    is the system whose file it is, such as "nemo-rl"; overrides may then be in its keys too.

    >>> load_recipe(overrides=["layout.max_tokens=8192", "overflow=split"]).overflow
    'split'
    """
    if path is not None:
        return load_settings(path, overrides, model=model, dialect=dialect).recipe
    return _decoded(dict(base or {}), list(overrides), model, None, "").recipe


def load_settings(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    model: str | None = None,
    dialect: str | None = None,
) -> Settings:
    """The settings of a file of ours, or of another system with `dialect`.

    The result has the recipe for training, and the one for log-probabilities if there is one.

        settings = load_settings(Path("grpo.yaml"), dialect="nemo-rl")
        settings.recipe, settings.log_probs
    """
    return load_file(path, overrides, model=model, dialect=dialect).settings


def load_file(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    model: str | None = None,
    dialect: str | None = None,
) -> Loaded:
    """The settings of a file with the origin of each value; the arguments of `load_settings`.

    One error has all faults.

        load_file(Path("run.yaml"), ["topology.dp=8"]).origins["topology.dp"]  # "--set"
    """
    overrides = list(overrides)
    if dialect is None:
        document = read_document(path)
        _refuse_other_system(document)
        data = beside(document.data, path.parent)
        settings = _decoded(data, overrides, model, path, str(path))
        return Loaded(settings, _native_origins(settings, document, overrides))
    if dialect not in DIALECTS:
        raise ConfigError(unknown_word("dialect", dialect, DIALECTS))
    return _load_dialect(path, overrides, model, dialect)


def _decoded(
    data: dict[str, Any],
    overrides: list[str],
    model: str | None,
    path: Path | None,
    source: str,
    faults: Iterable[str] = (),
    origins: Mapping[str, str] | None = None,
) -> Settings:
    """Decode data with overrides; an error has these faults too."""
    if model is not None:
        data = with_model(data, model, path, overrides)
    settings, found = decode_settings(overridden(data, overrides))
    found = [*faults, *(_with_origins(fault, origins or {}) for fault in found)]
    if found or settings is None:
        raise FaultsError(found, source)
    return settings


def _refuse_other_system(document: Document) -> None:
    """One sentence for a file of another system, instead of a fault for each of its keys."""
    likely = "" if "layout" in document.data else _likely(document.data)
    if likely:
        system = DIALECTS[likely].system
        raise FaultsError(
            [
                f"this is a configuration of {system}, it seems. Add --from {likely}, or "
                f"dialect={likely!r} in Python."
            ],
            str(document.path),
        )


def _likely(data: Mapping[str, Any]) -> str:
    """The dialect that knows most of the keys in a file; empty if none knows any."""
    counts = {
        name: sum(has(data, key.split(".")) for key in dialect.named_keys)
        for name, dialect in DIALECTS.items()
    }
    likely = max(counts, key=lambda name: counts[name])
    return likely if counts[likely] else ""


def _refuse_unknown(reader: Reader, path: Path) -> None:
    """A file without a single key of its dialect would load as defaults."""
    if reader.has_known_key or reader.faults:
        return
    likely = _likely(reader.tree.data)
    advice = "Check the path, and --from."
    if likely:
        advice = f"It seems to be a file of {DIALECTS[likely].system}: use --from {likely}."
    names = " or ".join(list(reader.dialect.keys)[:2])
    raise FaultsError(
        [
            f"the file has none of the keys of {reader.dialect.system} that concern batches, such "
            f"as {names}. {advice}"
        ],
        str(path),
    )


# Dialects ----------------------------------------------------------------------------------------


def _load_dialect(path: Path, overrides: list[str], model: str | None, name: str) -> Loaded:
    dialect = DIALECTS[name]
    tree, overrides, absent = _overridden_tree(path, overrides, dialect)
    reader = Reader(dialect, tree, _ranks(overrides))
    reader.faults += [
        f"{name} is not a key of the file. Check its spelling, or write +{name} to add it. (--set)"
        for name in absent
        if not any(fault.startswith(f"{name} ") for fault in reader.faults)
    ]
    _refuse_unknown(reader, path)
    dialect.read(reader)
    data = {**reader.train.data(), **reader.stream.data()}
    origins = {**reader.train.origins, **reader.stream.origins}
    if reader.log_probs is not None:
        data["log_probs"] = log_probs_section(reader.train, reader.log_probs)
        found = reader.log_probs.origins
        origins |= {f"log_probs.{path}": origin for path, origin in found.items()}
    if model is not None:  # it replaces the cost that the other system assumes
        data.pop("cost", None)
        data.get("log_probs", {}).pop("cost", None)
    settings = _decoded(data, overrides, model, None, str(path), reader.faults, origins)
    origins = _all_origins(settings, origins, overrides)
    return Loaded(settings, origins, tuple(reader.notes), tuple(reader.ignored))


def _overridden_tree(
    path: Path, overrides: list[str], dialect: Dialect
) -> tuple[Tree, list[str], list[str]]:
    """A file with overrides in its own keys; the other overrides, and keys that it does not have.

    An override of a Hydra group chooses a file. `+` adds a key, so that it may be absent.
    """
    for text in overrides:
        if text.startswith("~"):
            raise ConfigError(
                f"{text} removes a key, which is not supported. Set the key to null, or remove it "
                f"from the file."
            )
    pairs = [_pair(text.lstrip("+")) for text in overrides]
    if dialect.interpolates:
        words = {".".join(keys): value for keys, value in pairs if isinstance(value, str)}
        tree = read_tree(path, words)
    else:
        tree = _single(read_document(path, merges=True))
    added = {keys for text, (keys, _) in zip(overrides, pairs, strict=True) if text[:1] == "+"}
    theirs = {
        keys: value for keys, value in pairs if keys in added or not _is_native(keys, dialect, tree)
    }
    native = [text for text, (keys, _) in zip(overrides, pairs, strict=True) if keys not in theirs]
    values = {keys: theirs[keys] for keys in theirs if ".".join(keys) not in tree.groups}
    absent = [
        ".".join(keys)
        for keys in values
        if dialect.interpolates and keys not in added and not _is_key(keys, dialect, tree)
    ]
    return (tree.overridden(values) if values else tree), native, absent


def _is_native(path: tuple[str, ...], dialect: Dialect, tree: Tree) -> bool:
    """Whether an override is one of ours; else it is one of the other system's keys.

    layout.max_tokens, trainer.out     ours
    actor_rollout_ref.rollout.n        theirs: a section of the file or the dialect
    trainer.nnodes, data.val_files     theirs: a key of the dialect, a key of the file
    toplogy.dp                         ours, so that its fault is named
    """
    name = ".".join(path)
    if name in dialect.keys or name in tree.groups:
        return False
    if path[0] in _RECIPE:
        return True
    sections = {*tree.data, *(key.partition(".")[0] for key in dialect.keys)}
    if path[0] not in PARTS or path[0] not in sections:
        return path[0] not in sections
    fields = [field.name for field in dataclasses.fields(PARTS[path[0]])]
    named = dialect.interpolates or has(tree.data, path)  # absent keys are named as theirs
    return len(path) == 1 or path[1] in fields or not named


def _is_key(path: tuple[str, ...], dialect: Dialect, tree: Tree) -> bool:
    """Whether a path is in the file, or is a key or a section of the dialect."""
    name = ".".join(path)
    known = any(key == name or key.startswith(f"{name}.") for key in dialect.keys)
    return known or has(tree.data, path)


def _pair(text: str) -> tuple[tuple[str, ...], Any]:
    """The path and the value of an override; a value that is not YAML is text, as for Hydra."""
    try:
        return parsed(text)
    except ConfigError:
        key, _, value = text.partition("=")
        path, _ = parsed(f"{key}=0" if "=" in text else text)
        return path, value


def _single(document: Document) -> Tree:
    return Tree(document.data, (Layer(document),))


def _ranks(overrides: list[str]) -> int | None:
    """The number of ranks that `--set topology.dp=8` gives."""
    topology = overridden({}, overrides).get("topology")
    ranks = topology.get("dp") if isinstance(topology, Mapping) else None
    return ranks if isinstance(ranks, int) and ranks > 0 else None


def _with_origins(fault: str, origins: Mapping[str, str]) -> str:
    """A fault of the native schema, with the keys of the other system behind it."""
    sentence = fault.removeprefix("log_probs: ")
    prefix = "log_probs." if sentence != fault else ""
    named = [
        f"{path} is {origins[prefix + path]}"
        for path in dict.fromkeys(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", sentence))
        if prefix + path in origins
    ]
    return f"{fault} ({'; '.join(named)})" if named else fault


# Origins -----------------------------------------------------------------------------------------


def _native_origins(settings: Settings, document: Document, overrides: list[str]) -> dict[str, str]:
    """The place of each value of a native file."""
    found = {
        path: document.place(path.split("."))
        for path in leaves(settings.to_dict())
        if has(document.data, path.split("."))
    }
    if has(document.data, ("cost", "model")):
        place = f"cost.model, {document.place(('cost', 'model'))}"
        found |= {f"cost.{name}": place for name in ("per_token", "per_pair")}
    return _all_origins(settings, found, overrides)


def _all_origins(
    settings: Settings, found: Mapping[str, str], overrides: list[str]
) -> dict[str, str]:
    """An origin for every value: given, overridden, as in training, or the default."""
    set_by = [".".join(parsed(text)[0]) for text in overrides]
    values = leaves(settings.to_dict())
    origins: dict[str, str] = {}
    for path, value in values.items():
        own = path.removeprefix("log_probs.")
        if any(path == name or path.startswith(f"{name}.") for name in set_by):
            origins[path] = _OVERRIDE
        elif path in found:
            origins[path] = found[path]
        elif own != path and _same(own, value, values) and origins[own] != "default":
            origins[path] = "as in training"
        else:
            origins[path] = "default"
    return origins


def _same(path: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Whether there is this value at the path."""
    return path in values and bool(values[path] == value)
