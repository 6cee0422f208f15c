"""A local Ray cluster for the tests of a module."""

import secrets
from collections.abc import Iterator

import pytest
import ray

# A token of its own: Ray would write one to the home directory. Ray reads it once per process, so
# all modules that run in a process share it.
TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
        )
        yield
        ray.shutdown()
