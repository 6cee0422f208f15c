"""The ranks of a dialect: data-parallel ranks from the GPUs and the other axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from evenstep.config.dialects.draft import Draft
from evenstep.config.dialects.reader import Reader


def set_topology(
    reader: Reader, draft: Draft, axes: Mapping[str, str], world: int | None, origin: str
) -> int:
    """Set the axes of the topology and return the number of data-parallel ranks.

    `axes` maps tp, cp, pp, vpp and sequence_parallel to keys. `world` is the number of GPUs and
    `origin` says where it comes from; without it, and without `--set topology.dp`, dp is 1.
    """
    for axis, name in axes.items():
        if axis == "sequence_parallel" and (reader[axes["tp"]] or 1) == 1:
            continue  # no effect, and allowed
        if reader[name] is True or (reader[name] or 1) > 1:
            reader.take(draft, f"topology.{axis}", name)
    sizes = [reader[name] or 1 for axis, name in axes.items() if axis in ("tp", "cp", "pp")]
    group = math.prod(sizes)
    if reader.ranks is not None:
        return reader.ranks
    if world is None:
        reader.note(
            "the file does not say how many ranks there are; topology.dp is 1. Set it with "
            "--set topology.dp=N."
        )
        return 1
    if world % group:
        reader.refuse(
            f"{origin}: {world} GPUs cannot be divided into groups of tp · cp · pp = {group}.",
            *axes.values(),
        )
        return 1
    formula = f"{world} GPUs ({origin})" + (f" / {group}" if group > 1 else "")
    draft.set("topology.dp", world // group, f"derived: {formula}")
    return world // group
