"""Kernels are cached where that can be, and run where it cannot."""

from pathlib import Path
from typing import Any

import pytest
from numba import config
from numba.core import caching

from evenstep.planning import kernel as kernels
from evenstep.planning.kernel import kernel


def one_more(number: int) -> int:
    return number + 1


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
def test_without_a_place_for_a_cache_kernels_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # A read-only install without a writable home: no locator finds a folder.
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert kernel(one_more)(3) == 4


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
def test_cached_code_is_valid_only_while_no_kernel_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def taken_from_the_cache() -> bool:
        compiled: Any = kernel(one_more)
        assert compiled(3) == 4
        return bool(compiled.stats.cache_hits)

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert [taken_from_the_cache(), taken_from_the_cache()] == [False, True]
    # A kernel of another file, which may be inside this one's code, has changed.
    monkeypatch.setattr(kernels, "_digest_of_kernels", lambda: "another")
    assert [taken_from_the_cache(), taken_from_the_cache()] == [False, True]
