"""Reader: the values of a dialect's keys, checked, with the faults and notes on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from evenstep.config.dialects.dialect import Dialect, Key
from evenstep.config.dialects.draft import Draft
from evenstep.config.faults import misspelt, not_a_mapping, unknown_key, unknown_word
from evenstep.config.interpolate import Interpolated, UnresolvedError
from evenstep.config.nested import has
from evenstep.config.tree import Tree
from evenstep.core.text import short_repr, shorten

STAND_IN = 2**30
"""Stands for a number that is missing or wrong, so that other faults are found too."""
_MARKS = frozenset({"_target_", "_override_", "hydra"})


class Reader:
    """What a dialect's rules read from and write to."""

    def __init__(self, dialect: Dialect, tree: Tree, ranks: int | None) -> None:
        self.dialect, self.tree, self.ranks = dialect, tree, ranks
        self.train, self.stream = Draft(), Draft()
        self.log_probs: Draft | None = None
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.ignored: list[str] = []
        self._values = Interpolated(tree.data)
        self._wrong: set[str] = set()
        self._scan(tree.data, ())
        for name, key in dialect.keys.items():
            if self._present(name):
                self._check(name)
                self.notes += [f"{self.where(name)}: {key.note}"] if key.note else []

    @property
    def has_known_key(self) -> bool:
        """Whether the file has at least one key of the dialect, whatever its value."""
        names = self.dialect.keys
        return any(has(self.tree.data, name.split(".")) or self._present(name) for name in names)

    # Values --------------------------------------------------------------------------------------

    def given(self, name: str) -> bool:
        """Whether the file sets this key to a value that can be used."""
        return self._present(name) and self[name] is not None and name not in self._wrong

    def __getitem__(self, name: str) -> Any:
        """The value of a key, or its default."""
        default = self.dialect.keys[name].default
        try:
            value = self._raw(name)
        except KeyError:
            return default
        except UnresolvedError as error:
            self._fault(name, f"{error} ({self.tree.place(name.split('.'))})")
            return default
        if name in self._wrong or value is None:
            return default
        return _plain(self.dialect.keys[name], value)

    def below(self, name: str, *path: str) -> Any:
        """The value at `path` inside the value of a key; None without one."""
        if not self._present(name):
            return None
        try:
            return self._at((*name.split("."), *path))
        except KeyError:
            return None
        except UnresolvedError as error:
            self._fault(name, f"{error} ({self.tree.place(name.split('.'))})")
            return None

    def need(self, name: str, why: str) -> Any:
        """The value of a key that must be set, because of `why`."""
        value = self[name]
        if not value and name not in self._wrong:
            self._fault(name, f"{name} is missing: {why}.")
        return value or STAND_IN

    def where(self, name: str) -> str:
        """The key and the place that its value comes from."""
        if not self._present(name):
            return f"{name}, default of {self.dialect.system}"
        text = self._written(name)
        formula = f", {shorten(text)}" if isinstance(text, str) and "${" in text else ""
        return f"{name}, {self.tree.place(name.split('.'))}{formula}"

    def take(self, draft: Draft, path: str, name: str) -> None:
        """Set a value of the native schema to the value of a key."""
        draft.set(path, self[name], self.where(name))

    def share_prompts(self, name: str) -> None:
        """If `name` asks for several answers to a prompt, they share it where plans can.

        Packers by name know no shared tokens: the planner then forms packs, also of `log_probs`.
        """
        values = self.train.values
        packed = values.get("layout.kind") == "packed" and "layout.max_tokens" in values
        if self[name] < 2 or not packed:
            return
        prevents = ["topology.cp", "layout.pad_to", "balance", "equal_tokens"]
        if "topology.variable_seq_lengths" not in values:
            prevents.append("topology.pp")
        reason = next((key for key in prevents if key in values), None)
        if reason is not None:
            self.note(
                f"{name}: the answers to a prompt could share it (stream.share_prefixes), but not "
                f"with {reason}."
            )
            return
        origin = f"derived: {self[name]} answers to a prompt ({self.where(name)})"
        self.stream.set("stream.share_prefixes", True, origin)
        packers = [draft.drop("layout.packer") for draft in (self.train, self.log_probs) if draft]
        if packers[0] is not None:
            self.note(
                f"{name}: the {self[name]} answers to a prompt share it, so the planner forms "
                f"packs, not {packers[0]}. To keep that packer instead, set "
                f"stream.share_prefixes=false and layout.packer={packers[0]}."
            )

    # Faults and notes ----------------------------------------------------------------------------

    def refuse(self, sentence: str, *names: str) -> None:
        """A rule is broken. `names` are the keys involved; not said if one of them is wrong."""
        if not self._wrong.intersection(names):
            given = [name for name in names if self._present(name)]
            places = ", ".join(dict.fromkeys(self.tree.place(name.split(".")) for name in given))
            sentence = f"{sentence} ({places})" if places else sentence
            self.faults += [] if sentence in self.faults else [sentence]

    def note(self, sentence: str) -> None:
        """Say something that the user should know."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _fault(self, name: str, sentence: str) -> None:
        if name not in self._wrong:
            self._wrong.add(name)
            self.faults.append(sentence)

    # Reading -------------------------------------------------------------------------------------

    def _present(self, name: str) -> bool:
        """Whether the file sets this key, to whatever value."""
        try:
            return self._raw(name) is not None
        except KeyError:
            return False
        except UnresolvedError:
            return True

    def _raw(self, name: str) -> Any:
        return self._at(tuple(name.split(".")))

    def _at(self, path: tuple[str, ...]) -> Any:
        if self.dialect.interpolates:
            return self._values.at(path)
        value: Any = self.tree.data
        for key in path:
            if not isinstance(value, Mapping):
                raise KeyError(key)
            value = value[key]
        return value

    def _written(self, name: str) -> Any:
        value: Any = self.tree.data
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _check(self, name: str) -> None:
        """Report a wrong type. What cannot be resolved counts only where it is used."""
        try:
            value = self._raw(name)
        except UnresolvedError:
            return
        key = self.dialect.keys[name]
        expected = _expected(key, value)
        if expected and key.when and not self[key.when]:
            self._wrong.add(name)
            self.note(f"{self.where(name)}: has no effect without {key.when}.")
        elif expected:
            place = self.tree.place(name.split("."))
            words = key.words
            sentence = (
                unknown_word(name, value, words)
                if words
                else f"{name} must be {expected}, got {short_repr(value)}."
            )
            self._fault(name, f"{sentence} ({place})")

    # Keys that are not known ---------------------------------------------------------------------

    def _scan(self, data: Mapping[str, Any], path: tuple[str, ...]) -> None:
        """Report unknown keys in batching sections, and list the other unknown keys."""
        children = self._children(path)
        for key, value in data.items():
            below = (*path, str(key))
            if key in _MARKS:
                continue
            if key not in children:
                self._unknown(below, children)
            elif ".".join(below) not in self.dialect.keys:
                section = self._section(below, value)
                if section is not None:
                    self._scan(section, below)

    def _section(self, path: tuple[str, ...], value: Any) -> Mapping[str, Any] | None:
        if self.dialect.interpolates and isinstance(value, str) and "${" in value:
            try:
                value = self._values.at(path)
            except (KeyError, UnresolvedError) as error:
                self.faults.append(f"{error} ({self.tree.place(path)})")
                return None
        if value is None or isinstance(value, Mapping):
            return value
        self.faults.append(f"{not_a_mapping('.'.join(path), value)} ({self.tree.place(path)})")
        return None

    def _children(self, path: tuple[str, ...]) -> list[str]:
        """The names of known keys and sections below a path."""
        prefix = "".join(f"{key}." for key in path)
        names = [name[len(prefix) :] for name in self.dialect.keys if name.startswith(prefix)]
        return list(dict.fromkeys(name.partition(".")[0] for name in names))

    def _unknown(self, path: tuple[str, ...], children: Iterable[str]) -> None:
        name, parent = ".".join(path), ".".join(path[:-1])
        known = list(children)
        guess = misspelt(path[-1], known)
        if parent in self.dialect.strict:
            sentence = unknown_key(name, parent, known)
        elif path[-1] in self.dialect.others:
            sentence = ""
        elif any(fnmatchcase(name, pattern) for pattern in self.dialect.patterns):
            sentence = unknown_key(name, f"{self.dialect.system} in {parent}", self._alike(parent))
        else:
            meant = ".".join((*path[:-1], guess))
            sentence = f"{name} is not a known key. Did you mean {meant}?" if guess else ""
        if sentence:
            self.faults.append(f"{sentence} ({self.tree.place(path)})")
        else:
            self.ignored.append(name)

    def _alike(self, parent: str) -> list[str]:
        """The known keys of a section that match a pattern."""
        return [
            key.rpartition(".")[2]
            for key in self.dialect.keys
            if key.rpartition(".")[0] == parent
            and any(fnmatchcase(key, pattern) for pattern in self.dialect.patterns)
        ]


def _expected(key: Key, value: Any) -> str:
    """What a value should have been; empty if it is right."""
    if value is None or key.kind == "any":
        return ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match key.kind:
        case "flag":
            return "" if isinstance(value, bool) else "true or false"
        case "word":
            if isinstance(value, str) and (not key.words or value.lower() in key.words):
                return ""
            return f"one of {', '.join(key.words)}" if key.words else "text"
        case "whole":
            right = is_number and value == value // 1 and key.least <= value < 2**53
            return "" if right else f"an integer of at least {key.least}"
    return "" if is_number and value >= key.least else f"a number of at least {key.least}"


def _plain(key: Key, value: Any) -> Any:
    if key.kind == "whole":
        return int(value)
    return value.lower() if key.kind == "word" and key.words else value
