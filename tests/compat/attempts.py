"""Calls that may fail, and flat lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def attempt(call: Callable[[], T], error: type[Exception]) -> tuple[T | None, str]:
    """(the result, "") or (None, what the error says)."""
    try:
        return call(), ""
    except error as raised:
        return None, str(raised)


def flat(lists: Iterable[Iterable[int]]) -> list[int]:
    """Lists end to end."""
    return list(chain.from_iterable(lists))
