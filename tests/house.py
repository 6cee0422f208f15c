"""How large the source is: modules, lines, import cycles, and what four walks pass through.

`make house` prints the tree and compares every figure with the filed one (`tests/house.json`);
`python -m tests.house --check` fails where a figure grew, `--file` files today's. A walk is counted
with a profiler over functions of `src/evenstep`, each once, after a first run of the same code;
comprehensions belong to their functions.
"""

import argparse
import ast
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "evenstep"
FILED = Path(__file__).with_suffix(".json")
LONG = 60  # lines of a function outside kernels
LENGTHS = [5, 3, 4, 2, 7, 6, 1, 8]


def main() -> int:
    """Print the tree and the figures; 1 with `--check` if one of them grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a figure grew")
    parser.add_argument("--file", action="store_true", help="file today's figures")
    arguments = parser.parse_args()
    figures = all_figures()
    if arguments.file:
        FILED.write_text(json.dumps(figures, indent=2) + "\n")
    filed = json.loads(FILED.read_text()) if FILED.exists() else {}
    if not arguments.check:
        print(tree())
    grown = []
    for name, value in figures.items():
        before = filed.get(name, value)
        print(f"{name:48}{value:>9,}{f'  filed {before:,}' if before != value else ''}")
        if value > before:
            grown.append(f"{name} grew from {before:,} to {value:,}")
    if arguments.check and grown:
        print("\n".join(grown), file=sys.stderr)
        print(
            "Look for what the change makes superfluous; python -m tests.house --file files what "
            "is left.",
            file=sys.stderr,
        )
        return 1
    return 0


def all_figures() -> dict[str, int]:
    """Every figure by its name; smaller is better."""
    modules = list(SOURCE.rglob("*.py"))
    figures = {"modules": len(modules), "lines": sum(map(lines_of, modules))}
    for package in packages():
        inside = list(package.rglob("*.py"))
        figures[f"{package.name}: modules"] = len(inside)
        figures[f"{package.name}: lines"] = sum(map(lines_of, inside))
    figures["modules in import cycles"] = len(modules_in_cycles())
    figures[f"functions over {LONG} lines outside kernels"] = len(list(long_functions()))
    for name, walk in WALKS.items():
        functions, files, depth = passed_through(walk)
        figures |= {f"{name}: functions": functions, f"{name}: files": files}
        figures[f"{name}: depth"] = depth
    return figures


def packages() -> list[Path]:
    """The packages directly below `evenstep`."""
    return sorted(path.parent for path in SOURCE.glob("*/__init__.py"))


def lines_of(path: Path) -> int:
    """Lines of a file, blank ones and comments included."""
    return path.read_text("utf-8").count("\n")


def tree() -> str:
    """Packages and modules with their lines."""
    lines = []
    for package in packages():
        total = sum(map(lines_of, package.rglob("*.py")))
        lines.append(f"{package.name + '/':40}{total:>7,}")
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package).as_posix()
            lines.append(f"  {name:38}{lines_of(path):>7,}")
    return "\n".join(lines)


def imports_of(path: Path) -> set[str]:
    """The modules of evenstep that a file imports when it is imported."""
    imported = set()
    body = [n for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.ImportFrom)]
    for node in body:
        module = node.module or ""
        for alias in node.names:
            inner = SOURCE.parent / f"{module}.{alias.name}".replace(".", "/")
            is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
            imported.add(f"{module}.{alias.name}" if is_module else module)
    return {module for module in imported if module.startswith("evenstep.")}


def modules_in_cycles() -> set[str]:
    """Modules that import each other, directly or over others."""
    graph = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".")
        graph[name.removesuffix(".__init__")] = imports_of(path)
    while True:  # drop what imports nothing left, then what nothing left imports
        leaves = {name for name, imported in graph.items() if not imported & graph.keys()}
        used = set().union(*graph.values())
        leaves |= graph.keys() - used
        if not leaves:
            return set(graph)
        graph = {name: imported for name, imported in graph.items() if name not in leaves}


def long_functions() -> Iterator[str]:
    """Functions over 60 lines that are not compiled."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            compiled = any("kernel" in ast.unparse(each) for each in node.decorator_list)
            if not compiled and (node.end_lineno or 0) - node.lineno >= LONG:
                yield f"{path.relative_to(SOURCE)}: {node.name}"


def passed_through(walk: Callable[[], object]) -> tuple[int, int, int]:
    """(functions, files, depth) of src/evenstep that one call passes through."""
    walk()  # imports, compiled kernels and caches
    seen: Counter[CodeType] = Counter()
    depth = deepest = 0
    inside = str(SOURCE)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(inside):
            return
        if event == "return":
            depth -= 1
            return
        depth += 1
        deepest = max(deepest, depth)
        if not frame.f_code.co_name.startswith("<"):  # a comprehension is part of its function
            seen[frame.f_code] += 1

    sys.setprofile(profile)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return len(seen), len({code.co_filename for code in seen}), deepest


def _plan(padded: bool) -> Callable[[], object]:
    from evenstep import Cost, Packed, Padded, Recipe, Topology, make_plan

    layout = Padded(max_tokens=16) if padded else Packed(max_tokens=16)
    recipe = Recipe(layout=layout, topology=Topology(dp=2), cost=Cost(per_pair=0.1))
    return lambda: make_plan(LENGTHS, recipe)


def _runner() -> Any:
    from evenstep.demo import Decoder, DecoderShape
    from evenstep.tensors import cross_entropy
    from evenstep.train import Runner

    model = Decoder(DecoderShape(vocab=64))
    return Runner(model=model, loss=cross_entropy(), prefetch=0)


def _file_to_gradient() -> Callable[[], object]:
    from evenstep import Packed, PlannedStream, Recipe, Steps
    from evenstep.data import TokenFile, write_token_file

    folder = Path(tempfile.mkdtemp())
    documents = (np.arange(length) % 64 for length in LENGTHS)
    write_token_file(folder / "corpus.tokens", documents, dtype=np.uint16)
    runner = _runner()

    def walk() -> None:
        source = TokenFile(folder / "corpus.tokens")
        recipe = Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=8))
        runner.run(next(iter(PlannedStream(source, recipe, seed=0))))

    return walk


def _micro_batch() -> Callable[[], object]:
    from evenstep import Packed, PlannedStream, Recipe, Steps
    from evenstep.data import InMemory
    from evenstep.tensors import Collator

    samples = InMemory([{"input_ids": [1] * length} for length in LENGTHS])
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(samples=8))
    (step,) = islice(PlannedStream(samples, recipe), 1)
    collated, runner = step.collated(Collator()), _runner()
    return lambda: runner.run(collated)


WALKS: dict[str, Callable[[], object]] = {}


def _register() -> None:
    WALKS["make_plan of 8 samples, packed"] = _plan(padded=False)
    WALKS["make_plan of 8 samples, padded"] = _plan(padded=True)
    WALKS["a micro-batch of Runner.run"] = _micro_batch()
    WALKS["a step from file to gradient"] = _file_to_gradient()


if __name__ == "__main__":
    _register()
    sys.exit(main())
