"""The cases that revisions are compared on: recipes in the names of version 0.1.0, and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

COST = {"per_token": 24576.0, "per_pair": 1.0}
SAMPLES = {"samples": 512}


def _case(layout: dict[str, Any], dp: int, count: int, **more: Any) -> dict[str, Any]:
    usual = {
        "layout": layout,
        "topology": {"dp": dp, **more.pop("topology", {})},
        "steps": {},
        "cost": COST,
        "balance": "refined",
        "clock": "micro_batch",
        "groups": "micro_batch",
        "overflow": "truncate",
    }
    return {"recipe": {**usual, **more}, "count": count}


PACKED = {"kind": "packed", "max_tokens": 32768}
PADDED = {"kind": "padded", "max_tokens": 32768}
STATIC = {"kind": "packed_static", "rows": 4, "width": 8192}
FIXED = {"kind": "fixed", "samples": 4}

CASES: dict[str, dict[str, Any]] = {
    "packed, 20 steps of 512 on 64": _case(PACKED, 64, 10_240, steps=SAMPLES),
    "packed, 8,192 on 64": _case(PACKED, 64, 8_192),
    "packed, 100 steps of 512 on 8": _case(PACKED, 8, 51_200, steps=SAMPLES),
    "packed, sync_every=step": _case(PACKED, 8, 10_240, steps=SAMPLES, clock="step"),
    "packed, lpt": _case(PACKED, 8, 10_240, steps=SAMPLES, balance="lpt"),
    "packed, Karmarkar-Karp": _case(PACKED, 8, 10_240, steps=SAMPLES, balance="karmarkar_karp"),
    "packed, split": _case(
        {"kind": "packed", "max_tokens": 4096}, 8, 10_240, steps=SAMPLES, overflow="split"
    ),
    "packed, groups of 4": _case(PACKED, 8, 10_240, steps=SAMPLES) | {"groups": 4},
    "packed, a limited column": _case(
        PACKED, 8, 4_096, steps=SAMPLES, limits={"columns": {"patches": 4000}}
    ),
    "packed, at most 7 samples": _case(PACKED, 8, 4_096, steps=SAMPLES, limits={"segments": 7}),
    "packed, pipeline": _case(PACKED, 8, 10_240, steps=SAMPLES, topology={"pp": 4, "vpp": 2}),
    "packed, context parallel": _case(PACKED, 8, 10_240, steps=SAMPLES, topology={"cp": 2}),
    "packed, equal sizes": _case(PACKED, 8, 10_240, steps=SAMPLES, equal_sizes=True),
    "four static rows": _case(STATIC, 8, 10_240, steps=SAMPLES),
    "four samples per micro-batch": _case(FIXED, 8, 10_240, steps=SAMPLES),
    "padded": _case(PADDED, 8, 10_240, steps=SAMPLES),
    "padded, greedy": _case({**PADDED, "cut": "greedy"}, 8, 10_240, steps=SAMPLES),
    "padded, pipeline": _case(PADDED, 8, 10_240, steps=SAMPLES, topology={"pp": 4}),
    "8 micro-batches on 64": _case(PACKED, 64, 20_000, steps={"micro_batches": 8}),
    "4 micro-batches on 8": _case(PACKED, 8, 20_000, steps={"micro_batches": 4}),
    "4 padded micro-batches on 8": _case(PADDED, 8, 20_000, steps={"micro_batches": 4}),
    "4 static micro-batches on 8": _case(STATIC, 8, 20_000, steps={"micro_batches": 4}),
    "a planned stream of micro-batches": _case(PACKED, 64, 20_000, steps={"micro_batches": 8})
    | {"stream": "planned"},
    "a planned stream of samples": _case(PACKED, 8, 10_240, steps=SAMPLES) | {"stream": "planned"},
    "a pool, packed": _case(PACKED, 1, 6_000) | {"stream": "pooled"},
    "a pool, padded": _case(PADDED, 1, 6_000) | {"stream": "pooled"},
    "a pool, four static rows": _case(STATIC, 1, 6_000) | {"stream": "pooled"},
    "stats": _case(PACKED, 8, 51_200, steps=SAMPLES) | {"stats": True},
    "checks": _case(PACKED, 8, 51_200, steps=SAMPLES) | {"checks": True},
}


def lengths_of(case: dict[str, Any]) -> NDArray[np.int64]:
    """Log-normal lengths, the same in every revision."""
    drawn = np.random.default_rng(0).lognormal(np.log(1500), 1.0, case["count"])
    return np.asarray(np.clip(drawn, 1, 30_000), np.int64)
