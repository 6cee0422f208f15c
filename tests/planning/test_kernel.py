"""Kernels are cached where that can be, and run where it cannot."""

import ast
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from numba import config
from numba.core import caching
from numba.core.dispatcher import Dispatcher

import evenstep
from tests.internals import EpochOrder, check_items
from tests.internals import kernel as kernels
from tests.internals import kernel_decorator as kernel

PACKAGE = Path(evenstep.__file__).parent

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")


def one_more(number: int) -> int:
    return number + 1


def taken_from_the_cache() -> bool:
    compiled: Any = kernel(one_more)
    assert compiled(3) == 4
    return bool(compiled.stats.cache_hits)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a kernel in its cache."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert [taken_from_the_cache(), taken_from_the_cache()] == [False, True]
    return tmp_path


def test_without_a_place_for_a_cache_kernels_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # A read-only install without a writable home: no locator finds a folder.
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert kernel(one_more)(3) == 4


def compiling(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a process logs that calls the same kernel for two types."""
    kernels._log.cache_clear()
    caplog.clear()
    with caplog.at_level("WARNING", "evenstep"):  # a script without logging shows it
        compiled: Any = kernel(one_more)
        assert [compiled(3), compiled(3.0), compiled(4)] == [4, 4.0, 5]
    return [record.message for record in caplog.records]


def test_compiling_is_logged_once_and_not_if_the_cache_has_the_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    (message,) = compiling(caplog)
    assert "once per machine" in message
    assert compiling(caplog) == []
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    (message,) = compiling(caplog)
    assert "again in every process" in message


FIRST_PLAN = """
import multiprocessing, sys
from evenstep import Packed, Recipe, make_plan

def plan():
    make_plan([5, 3], Recipe(layout=Packed(max_tokens=8, packer="concatenative")))

if __name__ == "__main__":
    plan()
    print("first planned", file=sys.stderr, flush=True)
    rank = multiprocessing.get_context("spawn").Process(target=plan)
    rank.start()
    rank.join()
    sys.exit(rank.exitcode)
"""


def test_a_script_says_that_it_compiles_and_its_ranks_find_the_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FIRST_PLAN)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    said, planned = done.stderr.splitlines()  # the spawned rank says nothing
    assert said.startswith("compiling planning kernels (once per machine")
    assert planned == "first planned"


def test_the_time_of_compiling_counts_once_and_loading_from_the_cache_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    inner = kernel(one_more)

    def two_more(number: int) -> int:
        return inner(inner(number))

    before, began = kernels.compile_seconds(), time.perf_counter()
    outer = kernel(two_more)
    assert outer(1) == 3
    spent, compiled = time.perf_counter() - began, kernels.compile_seconds() - before
    assert 0 < compiled <= spent
    assert outer(2) == 4
    assert kernels.compile_seconds() - before == compiled
    loaded = kernel(one_more)
    assert loaded(1) == 2
    assert kernels.compile_seconds() - before > compiled


@pytest.mark.usefixtures("cached")
def test_cached_code_is_valid_only_while_no_kernel_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    # A kernel of another file, which may be inside this one's code, has changed.
    monkeypatch.setattr(kernels, "_digest_of_kernels", lambda _: "another")
    assert [taken_from_the_cache(), taken_from_the_cache()] == [False, True]


def write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero_a_block(path: Path) -> None:
    """As after a power failure: the right size, but a part was never written."""
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = bytes(third)
    path.write_bytes(content)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-len(content) // 3] ^= 1
    path.write_bytes(content)


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_full_folder(path: Path) -> None:
    put_a_folder(path)
    (path / "file").touch()


def link_to_itself(path: Path) -> None:
    """Opening it is an OSError, as without permission, but for root too."""
    path.unlink()
    path.symlink_to(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": write(b""),
    "text": write(b"not a cache\n" * 99),
    "random bytes": write(bytes(range(256)) * 99),
    "zeros": write(bytes(999)),
    "another pickle": write(b"\x80\x04N."),
    "cut short": cut_short,
    "partly zeros": zero_a_block,
    "a flipped bit": flip_a_bit,
    "a folder": put_a_folder,
    "a link to itself": link_to_itself,
    "without permission": lambda path: path.chmod(0),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("files", ["*.nbi", "*.nbc", "*.nb?"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.filterwarnings("error")
def test_a_damaged_cache_is_compiled_anew_and_written_over(
    damage: str, files: str, cached: Path
) -> None:
    if damage == "without permission" and os.geteuid() == 0:
        pytest.skip("root may read every file")
    for path in list(cached.rglob(files)):
        DAMAGES[damage](path)
    taken_from_the_cache()  # whether it was depends on where a bit flipped
    assert taken_from_the_cache()


@pytest.mark.parametrize("files", ["*.nbi", "*.nbc"])
@pytest.mark.filterwarnings("error")
def test_where_no_cache_can_be_written_kernels_still_run(files: str, cached: Path) -> None:
    for path in list(cached.rglob(files)):
        put_a_full_folder(path)
    assert [taken_from_the_cache(), taken_from_the_cache()] == [False, False]
    assert [path.name for path in cached.rglob("file")] == ["file"]


@pytest.mark.filterwarnings("error")
def test_a_cache_folder_that_is_lost_is_no_error(cached: Path) -> None:
    compiled: Any = kernel(one_more)
    shutil.rmtree(cached)
    cached.write_text("a file")
    assert compiled(3) == 4


def test_an_entry_of_another_kernel_is_not_run(cached: Path) -> None:
    def two_more(number: int) -> int:
        return number + 2

    (data,) = cached.rglob("*.nbc")
    assert kernel(two_more)(3) == 5
    (other,) = set(cached.rglob("*.nbc")) - {data}
    shutil.copy(other, data)
    assert [taken_from_the_cache(), taken_from_the_cache()] == [False, True]


def run(code: str, package: Path, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("compiling planning")]
    assert (done.returncode, said) == (0, [])
    return done.stdout


@pytest.mark.parametrize(
    ("files", "damage"), [("*.nbi", "empty"), ("*.nbc", "empty"), ("*.nb?", "random bytes")]
)
def test_a_process_with_a_damaged_cache_compiles_again(
    files: str, damage: str, tmp_path: Path
) -> None:
    code = (
        "import numpy as np\n"
        f"from {check_items.__module__} import check_items\n"
        f"from {EpochOrder.__module__} import EpochOrder\n"
        "check_items(np.array([3, 4]), 8)\n"
        "print(EpochOrder(count=9, seed=0, epoch=0).samples(np.arange(9)).tolist())\n"
    )
    before = run(code, PACKAGE, tmp_path)
    damaged = list(tmp_path.rglob(files))
    for path in damaged:
        DAMAGES[damage](path)
    content = {path: path.read_bytes() for path in damaged}
    assert run(code, PACKAGE, tmp_path) == before
    assert all(path.read_bytes() != content[path] for path in damaged)


def test_a_change_of_a_kernel_in_any_folder_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "evenstep"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    inner = package / "planning" / "deep" / "inner.py"
    inner.parent.mkdir()
    inner.write_text(
        f"from {kernels.__name__} import kernel\n\n"
        "@kernel\ndef inner(x: int) -> int:\n    return x + 1\n"
    )
    (package / "data" / "outer.py").write_text(
        "from evenstep.planning.deep.inner import inner\n"
        f"from {kernels.__name__} import kernel\n\n"
        "@kernel\ndef outer(x: int) -> int:\n    return inner(x)\n"
    )
    code = (
        "from evenstep.data.outer import outer; print(outer(1), *outer.stats.cache_hits.values())"
    )
    cache = tmp_path / "cache"
    assert run(code, package, cache) == "2\n"
    assert run(code, package, cache) == "2 1\n"
    inner.write_text(inner.read_text().replace("x + 1", "x + 2"))
    assert run(code, package, cache) == "3\n"


def test_kernels_use_constants_of_their_own_file_alone() -> None:
    """A constant is compiled into a kernel, and only files with kernels date the cache."""
    for path in PACKAGE.rglob("*.py"):
        if f"from {kernels.__name__} import" not in path.read_text():
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = import_module(".".join(parts))
        imported = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("evenstep")
            for alias in node.names
        }
        for name, found in inspect.getmembers(module, lambda found: isinstance(found, Dispatcher)):
            used = imported.intersection(found.py_func.__code__.co_names)
            constants = [
                word
                for word in used
                if isinstance(getattr(module, word), int | float | str | tuple)
            ]
            assert not constants, f"{module.__name__}.{name} uses {constants}"
