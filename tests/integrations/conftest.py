"""Fixtures of tests of integrations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed as dist


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
