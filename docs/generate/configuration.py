"""The configuration schema as one page: every key with its type, default and meaning."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from docs.generate.docstrings import cell, tables_of
from evenstep.config.native import PARTS
from evenstep.core.layout import LAYOUTS, PACKER_NAMES
from evenstep.core.recipe import Recipe

_HEAD = """\
# Configuration keys

Every key of a configuration file. [Configuration](../configuration.md) explains files, overrides \
and files of other systems; `evenstep config show FILE` lists all values of a file and where they \
come from. Only `layout` is required. Dotted keys are nested in files: `layout.max_tokens` is \
`max_tokens` in the section `layout`. `--set layout.max_tokens=16k` sets one on the command line."""

_LOG_PROBS = """\
## log_probs

The recipe for log-probabilities, which need no gradients: any keys of the recipe above. What is \
not given is as in training, and `null` removes a value. Without the section there is no such \
recipe; `{}` is the same recipe."""

_TITLES = {
    "layout": "The rows of a micro-batch. `layout.kind` is `packed` unless given.",
    "topology": "The sizes of the parallel groups.",
    "steps": "The size of an optimizer step; one of the three. Without any, all samples are one.",
    "cost": "What plans balance.",
    "limits": "Hard limits per micro-batch, besides those of the layout.",
    "second_work": "Work that the tokens do not measure, such as that of an image encoder.",
    "sharing": "Long sequences that several ranks compute together. Left out: none are.",
    "stream": "How samples are read.",
    "model": "What `evenstep train` trains.",
    "data": "The samples of `evenstep train` and `evenstep lengths`.",
    "optimizer": "AdamW and its learning rate.",
    "trainer": "How `evenstep train` runs.",
}

_MODEL = (
    "cost.model",
    "text",
    "–",
    "sets the cost by a model: a name such as `llama-3-8b`, or the path of a `config.json` or its "
    "folder; only `cost.per_micro_batch` may stand beside it",
)


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## The recipe", _table(_own(Recipe, ""))]
    hints = get_type_hints(Recipe)
    for field in dataclasses.fields(Recipe):
        if field.name == "layout":
            parts += ["## layout", _TITLES["layout"], _table(_layouts())]
        elif _dataclass(hints[field.name]):
            parts += [f"## {field.name}", _TITLES[field.name]]
            rows = list(_rows(_dataclass(hints[field.name]), field.name))
            parts.append(_table([_MODEL, *rows] if field.name == "cost" else rows))
    parts.append(_LOG_PROBS)
    for name, kind in PARTS.items():
        parts += [f"## {name}", _TITLES[name], _table(_rows(kind, name))]
    return "\n\n".join(parts) + "\n"


Row = tuple[str, str, str, str]


def _table(rows: Iterator[Row] | list[Row]) -> str:
    lines = [f"| `{key}` | {cell(kind)} | {made} | {cell(why)} |" for key, kind, made, why in rows]
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *lines])


def _own(kind: type, prefix: str) -> Iterator[Row]:
    """The keys of a class that are values, not sections."""
    hints = get_type_hints(kind)
    nested = {name for name, hint in hints.items() if _dataclass(hint)} | {"layout"}
    return _rows(kind, prefix, nested)


def _rows(kind: type, prefix: str, without: Collection[str] = ()) -> Iterator[Row]:
    """The keys of a class and of the sections in it."""
    meanings = meanings_of(kind)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in without:
            continue
        path = f"{prefix}.{field.name}".strip(".")
        inner = _dataclass(hints[field.name])
        kind_words = "section" if inner else words(hints[field.name])
        yield path, kind_words, _default(field), meanings[field.name]
        if inner:
            yield from _rows(inner, path)


def _layouts() -> Iterator[Row]:
    """The keys of both layouts; a word says which has those that only one has."""
    yield (
        "layout.kind",
        ", ".join(f"`{kind}`" for kind in LAYOUTS),
        "`packed`",
        ("`packed`: segments end to end; `padded`: one per row, padded to the longest"),
    )
    names: dict[str, list[str]] = {}
    rows: dict[str, Row] = {}
    for kind, owner in LAYOUTS.items():
        for row in _rows(owner, "layout", ["kind"]):
            names.setdefault(row[0], []).append(kind)
            rows[row[0]] = row
    for key, (_, kind, made, why) in rows.items():
        if key == "layout.packer":
            kind = ", ".join(f"`{name}`" for name in PACKER_NAMES)
        only = "" if len(names[key]) == len(LAYOUTS) else f"{names[key][0]}: "
        yield key, kind, made, only + why


def meanings_of(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say about each field."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            found |= tables_of(inspect.cleandoc(base.__doc__ or ""))
    return {name: re.sub(r"\bNone\b", "`null`", text) for name, text in found.items()}


def words(hint: Any) -> str:
    """A type in words.

    >>> words(int | None), words(Literal["a", "b"]), words(tuple[str, ...])
    ('integer', '`a`, `b`', 'list of texts')
    """
    if get_origin(hint) in (Union, UnionType):
        kinds = [words(each) for each in get_args(hint) if each is not NoneType]
        return " or ".join(dict.fromkeys(kinds))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {words(get_args(hint)[0])}s"
    if get_origin(hint) not in (None, hint) and issubclass(get_origin(hint), Mapping):
        return f"{words(get_args(hint)[1])} by name"
    plain = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}
    return plain.get(hint, "text")


def _dataclass(hint: Any) -> Any:
    """The class of a section; None if the hint is that of a value, or of a layout."""
    found = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
    return found[0] if len(found) == 1 else None


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = list(field.default) if isinstance(field.default, tuple) else field.default
        if value is None or value == []:
            return "–"
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
        return f"`{text}`"
    return "–" if field.default_factory is not dataclasses.MISSING else "required"
