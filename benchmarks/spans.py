"""Plans in which ranks share long sequences, compared with whole sequences and static cp.

`python benchmarks/spans.py` files benchmarks/results/spans.md. Lengths come from the folder in
`EVENSTEP_LENGTHS`, or ../shared/data/lengths.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evenstep import Cost, Packed, Plan, Recipe, Sharing, Topology, make_plan
from evenstep.core.measures import step_times

RESULTS = Path(__file__).parent / "results" / "spans.md"
LENGTHS = Path(os.environ.get("EVENSTEP_LENGTHS", "../shared/data/lengths"))
SEEDS, HELD_OUT = range(8), range(40, 56)
BAR = 1.015  # times over the ideal and one exchange that a priced plan may take
LLAMA, NORMAL = Cost.named("llama-3-8b"), Cost(per_token=24576, per_pair=1)
# Keys and values at 50 GB/s and 2.5 ms per exchange and layer; of the log-normal cost, in the same
# proportion to a token's cost.
PRICED = {
    LLAMA: LLAMA.with_exchange("llama-3-8b"),
    NORMAL: replace(NORMAL, per_moved=0.0576 * 24576, per_exchange=879 * 24576.0),
}


class Setting(NamedTuple):
    """Samples, ranks and budget; a file of lengths, or log-normal ones (median 3,000, sigma 1)."""

    name: str
    samples: int
    ranks: int
    budget: int
    file: str | None
    cost: Cost

    def lengths(self, seed: int) -> Any:
        """The lengths of one seed."""
        rng = np.random.default_rng(seed)
        if self.file is None:
            drawn = np.round(rng.lognormal(np.log(3000), 1, self.samples))
        else:
            drawn = rng.choice(np.load(LENGTHS / f"{self.file}.npy"), self.samples)
        return drawn.astype(np.int64).clip(1, self.budget)


AGENTS, DOCUMENTS = "agent_conversations", "prolong_documents"
SETTINGS = [
    Setting("agent conversations", 128, 8, 131_072, AGENTS, LLAMA),
    Setting("agent conversations", 512, 32, 131_072, AGENTS, LLAMA),
    Setting("long documents", 512, 32, 65_536, DOCUMENTS, LLAMA),
    Setting("long documents", 2048, 256, 131_072, DOCUMENTS, LLAMA),
    Setting("pre-training mix", 4096, 64, 32_768, "pretrain_mix", LLAMA),
    Setting("log-normal", 1024, 64, 32_768, None, NORMAL),
    Setting("log-normal", 8192, 64, 32_768, None, NORMAL),
    Setting("log-normal", 16384, 256, 65_536, None, NORMAL),
]


def rings(plan: Plan) -> float:
    """Tokens received over those of rings of the next power of two ranks: L (g - 1)."""
    parts = np.bincount(plan.segments.sample, minlength=len(plan.lengths))
    shared = parts > 1
    if not shared.any():
        return np.nan
    ring = plan.lengths[shared] * (2 ** np.ceil(np.log2(parts[shared])) - 1)
    return float(plan.exchanged[1].sum() / ring.sum())


def least_time(setting: Setting, lengths: Any) -> float:
    """A bound below the priced time of any plan that shares, over the ideal plus one exchange.

    Proof. Let a plan take X and one exchange, with the parts of a sample on different ranks. The
    part with k after it, from s to e, is sent to k others and receives s tokens, so its work and
    the price of the larger of k (e - s) and s are at most X. This grows with e and falls with s, so
    parts begin no earlier than if each cost exactly X so. A rank's price is at least that of what
    it receives, so X is at least f(X): the ideal and the price of all tokens received so, divided
    by the ranks. As f falls, an even number of its applications to the ideal stays below X.
    """
    cost, ranks = PRICED[setting.cost], setting.ranks
    ideal = least = float(cost.of_lengths(lengths).sum()) / ranks

    def start(work: Any, slope: float) -> Any:
        """Where tokens with this work end, if one costs `slope` and its pairs."""
        work = np.maximum(work, 0.0)
        return 2 * work / (slope + np.sqrt(slope**2 + 4 * cost.per_pair * work))

    for _ in range(30):
        end, received, parts = lengths.astype(np.float64), 0.0, 0
        while len(end):
            work = cost.per_token * end + cost.per_pair * end**2 - least
            sent = cost.moved * parts
            end = np.maximum(
                start(work, cost.per_token - cost.moved),
                start(work + sent * end, cost.per_token + sent),
            )
            end, parts = end[end > 0], parts + 1
            received += float(end.sum())
        least = ideal + cost.moved * received / ranks
    return (least + cost.exchange) / (ideal + cost.exchange)


def cpu_time(lengths: Any, recipe: Recipe) -> float:
    """CPU milliseconds of a plan, the median of three."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        make_plan(lengths, recipe)
        seconds.append(time.process_time() - began)
    return 1e3 * float(np.median(seconds))


def static(setting: Setting, lengths: Any, cp: int) -> float:
    """The time with context parallelism for all samples: each rank is cp devices.

    Every device receives what the others of its group hold: (cp - 1) / cp of all tokens.
    """
    cost, topology = PRICED[setting.cost], Topology(dp=setting.ranks // cp, cp=cp)
    layout = Packed(max_tokens=setting.budget * cp)
    plan = make_plan(lengths, Recipe(layout=layout, topology=topology, cost=setting.cost))
    moved = plan.costs / cp + cost.moved * plan.slots * (cp - 1) / cp + cost.exchange
    return float(moved.reshape(topology.dp, -1).max(axis=0).sum())


def measure(setting: Setting, seed: int) -> dict[str, float]:
    """The figures of one seed, times over the ideal."""
    lengths, ranks = setting.lengths(seed), setting.ranks
    alone = Recipe(
        layout=Packed(max_tokens=setting.budget), topology=Topology(dp=ranks), cost=setting.cost
    )
    free = replace(setting.cost, per_moved=0.0, per_exchange=0.0)
    whole = make_plan(lengths, alone)
    even = make_plan(lengths, replace(alone, cost=free, sharing=Sharing()))
    priced = replace(alone, cost=PRICED[setting.cost], sharing=Sharing())
    plan = make_plan(lengths, priced)
    ideal = float(setting.cost.of_lengths(lengths).sum()) / ranks
    before, after = float(step_times(whole)[0]), float(step_times(plan)[0])
    shares = bool(plan.segments.is_shared.any())
    return {
        "whole": before / ideal,
        "lock": float(step_times(even)[0]) / ideal,
        "sum": float(step_times(even, "step")[0]) / ideal,
        "more": (even.num_micro_batches - whole.num_micro_batches) / ranks,
        "over": after / (ideal + priced.cost.exchange) if shares else np.nan,
        "least": least_time(setting, lengths) if shares else np.nan,
        "gain": 1 - after / before,
        "rings": rings(plan),
        "ms": cpu_time(lengths, priced),
        "times": cpu_time(lengths, priced) / cpu_time(lengths, alone),
        **{f"cp {cp}": static(setting, lengths, cp) / ideal for cp in (2, 4, 8)},
        "priced": after / ideal,
    }


HEADER = [
    "| setting | whole | shared, free | rank sum | more waves | priced / (ideal + exchange) | "
    "least possible | gain, mean (least) | received / rings | ms | × unshared |",
    "| --- " * 11 + "|",
]


def row_of(setting: Setting, rows: list[dict[str, float]]) -> tuple[str, str]:
    """(the line of a setting, that of its comparison with static context parallelism)."""
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def both(name: str, digits: int = 4) -> str:
        values = column[name][~np.isnan(column[name])]
        return f"{values.mean():.{digits}f} ({values.max():.{digits}f})" if len(values) else "–"

    name = f"{setting.name}, {setting.samples:,} on {setting.ranks}, {setting.budget:,}"
    gain = column["gain"]
    line = (
        f"| {name} | {both('whole', 2)} | {both('lock')} | {both('sum')} | "
        f"{int(column['more'].max())} | {both('over')} | {both('least')} | "
        f"{100 * gain.mean():.1f} % ({100 * gain.min():.1f} %) | {both('rings', 2)} | "
        f"{both('ms', 1)} | {both('times', 1)} |"
    )
    means = (f"{column[each].mean():.3f}" for each in ("whole", "priced", "cp 2", "cp 4", "cp 8"))
    return line, f"| {name} | {' | '.join(means)} |"


def main() -> None:
    """Measure all settings and file the results."""
    lines = [
        "# Plans in which ranks share sequences",
        "",
        f"{len(SEEDS)} seeds each; mean (worst). Times are modelled, over the ideal (all work "
        "divided by the ranks). Without communication: lock-step, rank sum, and waves more than "
        "whole sequences. Priced: 50 GB/s and 2.5 ms per exchange and layer, over the ideal plus "
        "one fixed exchange where a plan shares, and a bound that no plan that shares is below "
        "(`least_time`); gain over whole sequences; tokens received over rings of the next power "
        "of two ranks. Constants of the search were tuned on these seeds; the second table has "
        "others, of which few choices know (how far the rest is searched). In rings, a sequence "
        "has the ranks of its plan, rounded up to a power of two; with ranks by cost instead, "
        "ratios were up to 1.8 priced. Milliseconds are CPU time. "
        "`python benchmarks/spans.py` makes this page.",
        "",
        *HEADER,
    ]
    table = ["", "| setting | whole | shared | cp 2 | cp 4 | cp 8 |", "| --- " * 6 + "|"]
    impossible: list[str] = []
    held_out = ["", f"Seeds {HELD_OUT.start} to {HELD_OUT.stop - 1}:", "", *HEADER]
    for setting in SETTINGS:
        rows = {seed: measure(setting, seed) for seed in (*SEEDS, *HELD_OUT)}
        line, means = row_of(setting, [rows[seed] for seed in SEEDS])
        lines.append(line)
        table.append(means)
        held_out.append(row_of(setting, [rows[seed] for seed in HELD_OUT])[0])
        impossible += [
            f"{setting.name}, {setting.samples:,} on {setting.ranks}, seed {seed}: at least "
            f"{row['least']:.4f}, planned {row['over']:.4f}."
            for seed, row in rows.items()
            if row["least"] > BAR
        ]
        print(line, held_out[-1], means, sep="\n", flush=True)
    lines += held_out
    proof = " ".join(str(least_time.__doc__).split())
    lines += ["", f"Where no plan that shares takes at most {BAR}, priced:", ""]
    lines += [*(f"- {each}" for each in impossible), "", proof]
    text = (
        "\n\nStatic context parallelism for all samples, on the same devices and links, priced:\n"
    )
    RESULTS.write_text("\n".join(lines) + text + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
