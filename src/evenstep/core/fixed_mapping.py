"""FixedMapping: numbers by name that cannot change, as a field of a frozen dataclass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class FixedMapping(Mapping[str, int]):
    """Compares and prints as a dict does.

    >>> FixedMapping({"patches": 4096})
    {'patches': 4096}
    >>> FixedMapping({"patches": 4096}) == {"patches": 4096}
    True
    """

    __slots__ = ("_held",)

    def __init__(self, held: Mapping[str, int]) -> None:
        self._held = dict(held)

    def __getitem__(self, name: str) -> int:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        """As a dict."""
        return repr(self._held)

    def __reduce__(self) -> tuple[type[FixedMapping], tuple[dict[str, int]]]:
        return FixedMapping, (self._held,)

    def __deepcopy__(self, memo: object) -> dict[str, int]:
        """Plain data: `dataclasses.asdict` copies fields in this way."""
        return dict(self._held)
