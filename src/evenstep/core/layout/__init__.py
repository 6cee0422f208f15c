"""Layouts: how segments lie in the rows of a micro-batch, and all arithmetic that follows from it.

Padded    one segment per row        [a a a .]
                                     [b b . .]
Packed    segments end to end        [a a a b b c .]
"""

from __future__ import annotations

from typing import TypeAlias

from evenstep.core.layout.packed import PACKER_NAMES, Packed, Packer, PackerName
from evenstep.core.layout.padded import Cut, Padded

Layout: TypeAlias = Padded | Packed

LAYOUTS: dict[str, type[Padded] | type[Packed]] = {"padded": Padded, "packed": Packed}

__all__ = [
    "LAYOUTS",
    "PACKER_NAMES",
    "Cut",
    "Layout",
    "Packed",
    "Packer",
    "PackerName",
    "Padded",
]
