"""What a field may hold, said in one way: fault, consequence, remedy."""

from __future__ import annotations

from typing import Any, get_args

from evenstep.errors import ConfigError

MOST = 2**40  # beyond any budget; sums of as many still fit 64 bits
MOST_RANKS = 2**20


def whole_number(path: str, value: object, *, least: int = 1, most: int = MOST) -> None:
    """Refuse what is not a whole number between `least` and `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"{path} is {value!r}, which is not a whole number, so nothing could be planned by it. "
            f"Set it to an integer of {least} or more."
        )
    if not least <= value <= most:
        raise ConfigError(
            f"{path} is {value}, and with that nothing would fit or ever run. Set it between "
            f"{least} and {most}."
        )


def one_of(path: str, value: object, words: Any) -> None:
    """Refuse a word that is not among those of a `Literal`."""
    if value not in get_args(words):
        raise ConfigError(
            f"{path} is {value!r}, which does not exist, so it would have no effect. Use "
            f"{' or '.join(map(repr, get_args(words)))}."
        )
