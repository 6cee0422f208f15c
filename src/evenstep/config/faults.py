"""Faults of a configuration: all of them in one error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from evenstep.core.text import short_repr
from evenstep.errors import ConfigError

_MOST_FAULTS = 100


class FaultsError(ConfigError):
    """A configuration with faults; `faults` has one sentence for each. Several are a line each.

    >>> print(FaultsError(["seed must be in [0, 2**63), got -1."], "a.yaml"))
    a.yaml: seed must be in [0, 2**63), got -1.
    """

    def __init__(self, faults: Sequence[str], source: str = "") -> None:
        self.faults = tuple(faults)
        if len(self.faults) == 1:
            super().__init__(f"{source}: {faults[0]}" if source else faults[0])
            return
        lines = [f"{source or 'the recipe'} has {len(faults)} faults:"]
        for number, fault in enumerate(faults[:_MOST_FAULTS], 1):
            lines.append(f"  ({number}) {' '.join(fault.split())}")
        if len(faults) > _MOST_FAULTS:
            lines.append(f"  and {len(faults) - _MOST_FAULTS} more.")
        super().__init__("\n".join(lines))


def near(word: object, known: Iterable[str]) -> str:
    """The known word that is most like this one; empty if none is.

    >>> near("topolgy", ["layout", "topology"])
    'topology'
    """
    found = difflib.get_close_matches(str(word)[:80], list(known), n=1)
    return found[0] if found else ""


def misspelt(word: str, known: Iterable[str]) -> str:
    """The known word that this one misspells: one edit apart, or two if it is long; else empty.

    >>> misspelt("dyn_bzs_size", ["dyn_bsz_size"]), misspelt("eval_batch", ["train_batch"])
    ('dyn_bsz_size', '')
    """
    most = 1 if len(word) < 8 else 2
    close = (other for other in known if abs(len(other) - len(word)) <= most)
    return next((other for other in close if 0 < _edits(word, other) <= most), "")


def _edits(one: str, other: str) -> int:
    """How many characters to add, drop, replace, or swap with their neighbour."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, char in enumerate(one, 1):
        last, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (char != wanted))
            if i > 1 and j > 1 and char == other[j - 2] and one[i - 2] == wanted:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]


def unknown_key(path: str, owner: str, known: Sequence[str]) -> str:
    """The sentence for a key that is not known, with the nearest known one."""
    guess = near(path.rpartition(".")[2], known)
    hint = f"Did you mean {guess}? " if guess else ""
    return f"{path} is not a known key. {hint}{owner} has {', '.join(known)}."


def unknown_word(path: str, value: object, words: Iterable[str]) -> str:
    """The sentence for a value that is not one of the words, with the nearest of them."""
    words = list(words)
    guess = near(value, words)
    hint = f" Did you mean {guess}?" if guess else ""
    return f"unknown {path} {short_repr(value)}; expected one of: {', '.join(words)}.{hint}"


def not_a_mapping(path: str, value: object) -> str:
    """The sentence for a value where keys are expected."""
    return f"{path} must hold keys, got {short_repr(value)}. Write it as {path}.KEY=VALUE."
