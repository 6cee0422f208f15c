"""What `supports_packing` says about every model class of transformers is what gradients say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.slow.kinds import Kind, kinds
from tests.slow.measure import is_exact
from tests.slow.survey import survey
from tests.slow.unbuilt import UNBUILT

pytestmark = pytest.mark.slow

PACKED = ("packed", "packed with a tail")


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_a_model_is_called_safe_if_and_only_if_packed_gradients_are_exact(kind: Kind) -> None:
    ((_, found),) = survey([kind], workers=1)
    if kind.types[0] in UNBUILT:
        assert "unbuildable" in found, "it can be measured now: remove it from UNBUILT"
        return

    assert "unbuildable" not in found, found["unbuildable"]
    assert not list(problems(found))


def problems(found: dict[str, Any]) -> Iterator[str]:
    """What a measurement has against our promises.

    A model that is called safe is exact, packed and padded. One that is exact with our attention is
    called safe. Both hold for windows of any width. Our attention is exact in padded rows if eager
    attention is, or raises.
    """
    rounding = found.get("rounding", 0.0)
    for name, measured in found["implementations"].items():
        if "unavailable" in measured:
            continue
        exact = all(is_exact(measured[layout], rounding) for layout in PACKED)
        # Text alone does not say that images are exact; None: the class takes none.
        image = found.get("image")
        runs_images = image is None or ("tokens" in image[:9] and "images refused" not in measured)
        for safe, why in (("safe", "why"), ("safe if wide", "why if wide")):
            if measured[safe] and not exact:
                yield f"{name} is called safe ({measured[why]}): {measured['packed']}"
            if name == "evenstep" and exact and runs_images and not measured[safe]:
                yield f"{name} is exact and refused: {measured[why]}"
        padded = measured["padded"]
        wrong = "single" in padded and not is_exact(padded, rounding)
        if wrong and (measured["safe"] or (name == "evenstep" and _eager_is_exact(found))):
            yield f"{name} is inexact when padded: {padded}"


def _eager_is_exact(found: dict[str, Any]) -> bool:
    eager = found["implementations"]["eager"]
    return is_exact(eager.get("padded", {}), found.get("rounding", 0.0))
