"""Plan the same steps with two checkouts: modelled time and CPU time of planning.

`python benchmarks/house_planning.py BASE NOW --lengths FOLDER [--steps N] [--first SEED] [--out F]`

BASE and NOW are checkouts; each runs in its own process. FOLDER has `.npy` files of lengths, from
which samples are drawn. Every kind of step is planned for `--steps` seeds from `--first` on. Times
of planning are the better of two calls, in CPU milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SYNC: tuple[Any, ...] = ("micro_batch", "step")
Case = tuple[Any, Any, dict[str, Any]]
"""(lengths, recipe, further arguments of make_plan)."""


def draw(seed: int, folder: Path, least: int, most: int) -> tuple[Any, int, int, Any]:
    """(lengths, ranks, budget, random numbers) of a step with `least` to `most` samples."""
    rng = np.random.default_rng(seed)
    files = sorted(folder.glob("*.npy"))
    budget = int(rng.choice([4096, 8192, 16384, 32768]))
    count = int(np.exp(rng.uniform(np.log(least), np.log(most))))
    drawn = rng.choice(np.load(files[seed % len(files)]), count)
    return np.clip(drawn, 1, budget).astype(np.int64), int(rng.choice([2, 4, 8, 16])), budget, rng


def kinds() -> dict[str, Callable[[int, Path], Case]]:
    """The kinds of steps by name."""
    from evenstep import Cost, Limits, Packed, Padded, Recipe, SecondWork, Topology

    def cost(rng: Any) -> Cost:
        return Cost(per_token=24576.0, per_pair=float(rng.choice([0.0, 1.0, 4.0])))

    def plain(
        layout: str, sync: Any, least: int, most: int, **more: Any
    ) -> Callable[[int, Path], Case]:
        def case(seed: int, folder: Path) -> Case:
            lengths, ranks, budget, rng = draw(seed, folder, least, most)
            made = (Padded if layout == "padded" else Packed)(max_tokens=budget)
            recipe = Recipe(
                layout=made, topology=Topology(dp=ranks), cost=cost(rng), sync_every=sync, **more
            )
            return lengths, recipe, {}

        return case

    def static(seed: int, folder: Path) -> Case:
        lengths, ranks, budget, rng = draw(seed, folder, 64, 2048)
        rows = int(rng.choice([1, 2, 4]))
        layout = Packed(rows=rows, pad_to=budget)
        return lengths, Recipe(layout=layout, topology=Topology(dp=ranks), cost=cost(rng)), {}

    def one_width(seed: int, folder: Path) -> Case:
        lengths, ranks, budget, _ = draw(seed, folder, 64, 2048)
        topology = Topology(dp=ranks, pp=2)
        return lengths, Recipe(layout=Packed(max_tokens=budget), topology=topology), {}

    def limits(seed: int, folder: Path) -> Case:
        lengths, ranks, budget, rng = draw(seed, folder, 64, 2048)
        patches = rng.integers(0, 64, len(lengths))
        most = max(64, int(patches.sum() / max(lengths.sum() / budget, 1) * 1.1))
        recipe = Recipe(
            layout=Packed(max_tokens=budget),
            topology=Topology(dp=ranks),
            cost=cost(rng),
            limits=Limits(columns={"patches": most}),
            sync_every=SYNC[int(rng.integers(2))],
        )
        return lengths, recipe, {"columns": {"patches": patches}}

    def groups(seed: int, folder: Path) -> Case:
        lengths, ranks, budget, rng = draw(seed, folder, 64, 1024)
        size = int(rng.choice([2, 4]))
        lengths = np.minimum(lengths, budget // size)
        recipe = Recipe(
            layout=Packed(max_tokens=budget),
            topology=Topology(dp=ranks),
            cost=cost(rng),
            sync_every=SYNC[int(rng.integers(2))],
        )
        return lengths, recipe, {"groups": np.arange(len(lengths)) // size}

    def second(seed: int, folder: Path) -> Case:
        lengths, ranks, budget, rng = draw(seed, folder, 64, 1024)
        patches = rng.integers(1, 256, len(lengths)) * (rng.random(len(lengths)) < 0.4)
        recipe = Recipe(
            layout=Packed(max_tokens=budget),
            topology=Topology(dp=ranks),
            cost=cost(rng),
            second_work=SecondWork(column="patches"),
            sync_every=SYNC[int(rng.integers(2))],
        )
        return lengths, recipe, {"columns": {"patches": patches}}

    def one_wave(seed: int, folder: Path) -> Case:
        lengths, _, budget, rng = draw(seed, folder, 256, 8192)
        ranks = int(np.ceil(lengths.sum() / budget * rng.uniform(1.05, 1.5)))
        topology = Topology(dp=max(ranks, 2))
        return (
            lengths,
            Recipe(layout=Packed(max_tokens=budget), topology=topology, cost=cost(rng)),
            {},
        )

    def priced(layout: str) -> Callable[[int, Path], Case]:
        def case(seed: int, folder: Path) -> Case:
            lengths, ranks, budget, rng = draw(seed, folder, 64, 2048)
            made = (Padded if layout == "padded" else Packed)(max_tokens=budget)
            price = Cost(per_token=24576.0, per_pair=1.0, per_micro_batch=24576.0 * 500)
            sync = SYNC[int(rng.integers(2))]
            topology = Topology(dp=ranks)
            return lengths, Recipe(layout=made, topology=topology, cost=price, sync_every=sync), {}

        return case

    def ranks(count: int) -> Callable[[int, Path], Case]:
        def case(seed: int, folder: Path) -> Case:
            lengths, _, budget, _ = draw(seed, folder, 4096, 4097)
            topology = Topology(dp=count)
            return lengths, Recipe(layout=Packed(max_tokens=budget), topology=topology), {}

        return case

    return {
        "lock-step": plain("packed", "micro_batch", 24, 4096),
        "once per step": plain("packed", "step", 24, 4096),
        "padded, lock-step": plain("padded", "micro_batch", 24, 2048),
        "padded, once per step": plain("padded", "step", 24, 2048),
        "static rows": static,
        "one width": one_width,
        "limits": limits,
        "groups": groups,
        "second work": second,
        "6 to 22 samples": plain("packed", "micro_batch", 6, 23),
        "6 to 22, once per step": plain("packed", "step", 6, 23),
        "6 to 22, padded": plain("padded", "micro_batch", 6, 23),
        "6 to 22, padded, once per step": plain("padded", "step", 6, 23),
        "one wave": one_wave,
        "4,097 to 30,000 samples": plain("packed", "micro_batch", 4097, 30_000),
        "4,097 to 30,000, once per step": plain("packed", "step", 4097, 30_000),
        "cost per micro-batch": priced("packed"),
        "cost per micro-batch, padded": priced("padded"),
        "equal tokens": plain("packed", "micro_batch", 24, 2048, equal_tokens=True),
        "equal sizes": plain("packed", "step", 64, 1024, equal_sizes=True),
        "equal sizes, padded": plain("padded", "micro_batch", 24, 1024, equal_sizes=True),
        "equal sizes, padded, once per step": plain("padded", "step", 24, 1024, equal_sizes=True),
        "4,096 on 64 ranks": ranks(64),
        "4,096 on 2,048 ranks": ranks(2048),
    }


def work() -> None:
    """Plan one case per line of standard input."""
    from evenstep import make_plan
    from evenstep.core.measures import step_times

    gc.disable()
    cases = kinds()
    for line in sys.stdin:
        kind, seed, folder = json.loads(line)
        lengths, recipe, more = cases[kind](seed, Path(folder))
        best = np.inf
        for _ in range(2):
            start = time.process_time()
            plan = make_plan(lengths, recipe, **more)
            best = min(best, time.process_time() - start)
        waves = int(np.diff(plan.cell_offsets).max())
        print(json.dumps((best * 1e3, float(np.sum(step_times(plan))), waves)), flush=True)


class Checkout:
    """A process that plans with the code of one checkout."""

    def __init__(self, source: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env={**os.environ, "PYTHONPATH": str(Path(source).resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def plan(self, kind: str, seed: int, folder: Path) -> tuple[float, float, int]:
        """(CPU milliseconds of planning, modelled time, waves)."""
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(json.dumps((kind, seed, str(folder))) + "\n")
        questions.flush()
        milliseconds, modelled, waves = json.loads(answers.readline())
        return milliseconds, modelled, waves

    def close(self) -> None:
        """End the process."""
        self._process.kill()


def compare(base: Checkout, now: Checkout, options: argparse.Namespace) -> list[str]:
    """The rows of a table, one for each kind."""
    rows = [
        "| steps | mean, % | worst, % (seed) | best, % | before, ms | now, ms | ratio "
        "| most, ms before | most, ms now |",
        "| --- " * 9 + "|",
    ]
    for kind in kinds():
        if options.only and not any(part in kind for part in options.only.split(";")):
            continue
        changes, before, after, seeds = (
            [],
            [],
            [],
            range(options.first, options.first + options.steps),
        )
        for seed in seeds:
            old, new = (each.plan(kind, seed, options.lengths) for each in (base, now))
            changes.append((new[1] / old[1] - 1) * 100)
            before.append(old[0])
            after.append(new[0])
        worst = int(np.argmax(changes))
        rows.append(
            f"| {kind} | {np.mean(changes):+.4f} | {changes[worst]:+.3f} ({seeds[worst]}) "
            f"| {min(changes):+.3f} | {np.mean(before):.2f} | {np.mean(after):.2f} "
            f"| {np.mean(after) / np.mean(before):.2f} | {max(before):.1f} | {max(after):.1f} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("now", nargs="?", default=str(ROOT))
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", help="kinds whose name contains one of these, divided by ;")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkouts = Checkout(options.base), Checkout(options.now)
    text = "\n".join(compare(*checkouts, options)) + "\n"
    for checkout in checkouts:
        checkout.close()
    if options.out:
        head = "# Planning, two revisions\n\nModelled time and CPU time, now relative to before; "
        head += f"{options.steps} steps of each kind.\n\n"
        options.out.write_text(head + text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main()
