"""Measure the runner on a GPU: speed, compilation, waiting, gradients' memory, budgets and costs.

python benchmarks/gpu_runner.py                        writes benchmarks/results
python benchmarks/gpu_runner.py --device cpu --quick   a small version, writes nothing
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from rich.console import Console

from benchmarks import tables
from benchmarks.tables import Section, Table, Target
from evenstep import Cost, Packed, PlannedStream, Recipe, Steps
from evenstep.data import InMemory
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import InputError
from evenstep.report import fit_cost
from evenstep.tensors import Collator, cross_entropy
from evenstep.train import Runner, compile_layers, find_budget
from evenstep.train.budget import CudaMemory, Probe, _tokens, expand_segments
from evenstep.train.framework import call as call_model
from evenstep.train.model_head import ModelHead
from evenstep.train.result import ComputeTime

ROOT = Path(__file__).resolve().parents[1]
BIG = {"hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "ffn": 8192, "vocab": 32_000}
MIDDLE = {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 32_000}
TINY = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 48, "vocab": 64}
QUICK = False
DEVICE = "cuda"


def decoder(sizes: dict[str, int]) -> Any:
    """A decoder in bfloat16 on the device."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Decoder(DecoderShape(**(TINY if QUICK else sizes))).to(torch.bfloat16)


def vocab(sizes: dict[str, int]) -> int:
    return (TINY if QUICK else sizes)["vocab"]


def lengths_of(count: int, longest: int, seed: int = 0) -> Any:
    """Log-normal lengths."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(6.6, 0.9, count)).astype(int).clip(16, longest)


def source(lengths: Any, words: int) -> InMemory:
    rng = np.random.default_rng(1)
    return InMemory([{"input_ids": rng.integers(0, words, n)} for n in lengths])


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def clear() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch._dynamo.reset()


# Speed ------------------------------------------------------------------------------------------


def speed() -> Section:
    """A step through the runner, compared with plain loops and with dense batches."""
    budget, longest, count = (256, 64, 12) if QUICK else (32_768, 8192, 256)
    lengths = lengths_of(count, longest)
    sizes: dict[str, Any] = TINY if QUICK else BIG
    cost = Cost.of_model(**sizes)
    rows = {f"dense rows of {budget // n:,}": budget // n for n in (32, 16, 8)}
    every = {name: np.full(int(lengths.sum()) // row, row) for name, row in rows.items()}
    every["packed"] = lengths
    recipe = Recipe(layout=Packed(max_tokens=budget))
    steps = {
        name: next(iter(PlannedStream(source(each, vocab(BIG)), recipe)))
        for name, each in every.items()
    }
    clear()
    seconds = timed(steps)
    table = Table("Compiled", {"": "", "model TFLOP/s": ".1f", "seconds": ".3f"})
    speeds = {}
    for name, each in seconds.items():
        flops = float(cost.of_lengths(every.get(name.removeprefix("runner, "), lengths)).sum())
        speeds[name] = flops / each / 1e12
        table.add(name, speeds[name], each)
    of_dense = {row: speeds["runner, packed"] / speeds[f"runner, {n}"] for n, row in rows.items()}
    of_loop = speeds["runner, packed"] / speeds["plain loop, packed"]
    shown = ", ".join(f"{share:.1%} ({row:,})" for row, share in of_dense.items())
    return Section(
        "Speed of the runner, 1B decoder, bfloat16",
        [
            f"{count} log-normal samples of {lengths.mean():,.0f} tokens on average, micro-batches "
            f"of {budget:,} slots, median of three steps in turn. Loops run over batches that are "
            f"on the GPU already, with the loss of the runner, which computes no logits."
        ],
        tables=[table],
        targets=[
            Target(
                "compiled, packed ≥ 96 % of dense rows of any length",
                shown, min(of_dense.values()) >= 0.96,
            ),
            Target("compiled, packed ≥ 99 % of a plain loop", f"{of_loop:.1%}", of_loop >= 0.99),
        ],
    )  # fmt: skip


def timed(steps: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step, in turn: plain loops over packed batches, and the runner."""
    model, loss = decoder(BIG), cross_entropy()
    compile_layers(model, backend="aot_eager" if QUICK else "inductor")
    runner = Runner(model=model, loss=loss, collate=Collator(pin_memory=DEVICE == "cuda"))
    batches = [Collator()(micro, samples).to(DEVICE) for micro, samples in steps["packed"]]
    labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    last = ModelHead.of(model, call_model)
    assert isinstance(last, ModelHead)

    def loss_of(batch: Any) -> Any:
        compute = lambda hidden, head: [loss(hidden, batch, head).loss]  # noqa: E731
        return last.run(call_model, model, batch, compute).results[0]

    def loop() -> None:
        for batch in batches:
            (loss_of(batch) / labels).backward()

    def loop_of_logits() -> None:
        for batch in batches:
            (loss(model(batch), batch).loss / labels).backward()

    calls: dict[str, Callable[[], Any]] = {
        "plain loop, packed": loop,
        "plain loop, packed, with logits": loop_of_logits,
        "runner, packed": lambda: runner.run(steps["packed"]),
    }
    for name, step in steps.items():
        if name != "packed":
            calls[f"runner, {name}"] = partial(runner.run, step)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(2 if QUICK else 4):
        for name, run in calls.items():
            model.zero_grad()
            wait()
            began = time.perf_counter()
            run()
            wait()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in times.items()}


# Compilation and waiting ------------------------------------------------------------------------


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Copies and reads that wait for the device raise, up to the end of a step's micro-batches."""
    if DEVICE != "cuda":
        yield
        return
    compute_time: Any = ComputeTime
    kept = compute_time.busy

    def busy(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return kept(*arguments)

    compute_time.busy = busy  # where the numbers of a step begin to be read
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        compute_time.busy = kept


def llama() -> Any:
    import transformers

    from evenstep.integrations.hf_attention import use_attention

    sizes = TINY if QUICK else MIDDLE
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocab"], hidden_size=sizes["hidden"], intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"], max_position_embeddings=16_384,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
    use_attention(model)
    return model


MODELS: dict[str, Callable[[], Any]] = {"decoder": lambda: decoder(MIDDLE), "Llama": llama}


def compiling() -> Section:
    """50 steps of other lengths after 3; each is checked for waiting inside it, too."""
    table = Table(
        "50 steps after 3", {"model": "", "graphs": "d", "new graphs": "d", "graph breaks": "d",
                             "steps that wait": "d", "first reason": ""},
    )  # fmt: skip
    targets = []
    for name, make in MODELS.items():
        clear()
        model = make()
        compile_layers(model, backend="aot_eager" if QUICK else "inductor")
        runner = Runner(model=model, loss=cross_entropy(), device=DEVICE)
        steps = 9 if QUICK else 53
        recipe = Recipe(layout=Packed(max_tokens=256 if QUICK else 8192), steps=Steps(samples=12))
        data = source(lengths_of(12 * steps, 200 if QUICK else 4096), vocab(MIDDLE))
        graphs, new, breaks, waits, why = 0, 0, 0, 0, ""
        for number, step in enumerate(PlannedStream(data, recipe)):
            try:
                with waiting_is_an_error() if number >= 3 else nullcontext():
                    result = runner.run(step)
            except Exception as error:
                waits, why = waits + 1, why or f"{type(error).__name__}: {str(error)[:160]}"
                result = runner.run(step)
            graphs, breaks = graphs + result.compiled.graphs, breaks + result.compiled.graph_breaks
            if number >= 3:
                new += result.compiled.graphs
                why = why or " ".join(result.compiled.failed_guards)[:160]
            model.zero_grad()
        table.add(name, graphs, new, breaks, waits, why)
        targets += [
            Target(f"{name}: no new graph, no graph break", f"{new}, {breaks}", not new + breaks),
            Target(f"{name}: no step waits", str(waits), not waits),
        ]
    return Section("Compiled layers, waiting inside a step", tables=[table], targets=targets)


# Memory of gradients ----------------------------------------------------------------------------


def gradients() -> Section:
    """The peak of one rank of eight, whose collectives do nothing."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = 8
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sizes = TINY if QUICK else MIDDLE | {"layers": 24, "vocab": 4096}
    peaks, weights = {}, 0
    try:
        for every in ("step", "micro_batch"):
            clear()
            with torch.device(DEVICE):
                model = Decoder(DecoderShape(**sizes))
            weights = sum(parameter.numel() for parameter in model.parameters())
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (ranks,))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            runner = Runner(
                model=model, loss=cross_entropy(), collective=Fake(ranks), reduce_every=every,
                mode="deferred",
            )  # fmt: skip
            collate, data = Collator(), source([256] * 3, sizes["vocab"])
            batches = [
                collate(micro, samples)
                for micro, samples in next(
                    iter(PlannedStream(data, Recipe(layout=Packed(max_tokens=256))))
                )
            ]
            for turn in range(2):
                model.zero_grad()
                if DEVICE == "cuda" and turn:
                    torch.cuda.reset_peak_memory_stats()
                with suppress(InputError):  # no other rank answers at the end of the step
                    runner.run(batches)
            peaks[every] = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
            del model, runner
    finally:
        torch.distributed.destroy_process_group()
    layers = sizes["layers"]
    predicted = 4 * weights * (1 - 1 / ranks - 3 / layers)
    fall = peaks["step"] - peaks["micro_batch"]
    table = Table("GB", {"reduce_every": "", "peak": ".3f"})
    for every, peak in peaks.items():
        table.add(every, peak / 1e9)
    ratio = fall / predicted
    return Section(
        f"Gradients that stay sharded: {weights / 1e6:.0f}M weights, one rank of {ranks}",
        ["Three micro-batches of 256 tokens; the process group is fake, memory is not."],
        tables=[table],
        targets=[
            Target(
                "the peak falls as predicted, within 10 %",
                f"{fall / 1e9:.3f} of {predicted / 1e9:.3f} GB ({ratio:.1%})",
                abs(ratio - 1) <= 0.1,
            )
        ],
    )


class Fake:
    """A collective whose ranks are all alike."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce_sum(self, tensor: Any) -> Any:
        return tensor


# Budgets ----------------------------------------------------------------------------------------


def budgets() -> Section:
    """find_budget compared with bisection, and 20 further answers tried."""
    if DEVICE != "cuda":
        return Section("Budgets", ["needs a GPU"])
    whole = torch.cuda.mem_get_info()[1]
    columns = {
        "model": "", "GiB": ".1f", "find_budget": ",", "bisection": ",", "ratio": ".3f",
        "seconds": ".1f", "steps of 2 micro-batches": "", "planned steps": "",
    }  # fmt: skip
    table = Table("Slots", columns)
    targets, above, planned_above, trials = [], 0, 0, 0
    for name, make in MODELS.items():
        clear()
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        runner = Runner(model=model, loss=cross_entropy())
        ratios = []
        for trial in range(10):
            share = 0.08 + 0.005 * trial
            torch.cuda.set_per_process_memory_fraction(share)
            lengths = lengths_of(400, 4096, seed=trial)
            began = time.perf_counter()
            budget = find_budget(runner, optimizer, lengths).max_tokens
            seconds, limit = time.perf_counter() - began, 0
            fit = [judge(runner, optimizer, lengths, budget) for judge in (fits, planned)]
            trials += 1
            above += not fit[0]
            planned_above += not fit[1]
            if trial in (0, 9):
                limit = bisect(runner, optimizer, lengths, budget)
                ratios.append(budget / limit)
            verdicts = ["fit" if each else "out of memory" for each in fit]
            gib, ratio = share * whole / 2**30, budget / limit if limit else 0.0
            table.add(name, gib, budget, limit, ratio, seconds, *verdicts)
            print(name, trial, budget, limit, f"{ratio:.3f} {seconds:.1f} s", *verdicts)
        shown = ", ".join(f"{ratio:.1%}" for ratio in ratios)
        within = all(0.95 <= ratio <= 1 for ratio in ratios)
        targets.append(Target(f"{name}: within 5 % of bisection", shown, within))
        torch.cuda.set_per_process_memory_fraction(1.0)
        del model, optimizer, runner
    targets += [
        Target("never above the limit", f"{above} of {trials}", above == 0),
        Target("planned steps never run out", f"{planned_above} of {trials}", not planned_above),
    ]
    return Section(
        "Budgets from measurements",
        [
            "Ten trials for each model, each with other lengths and another share of the memory. "
            "The optimizer has no states when a trial or a check begins. Checks: four steps of two "
            "micro-batches of that many slots; three planned steps of about three micro-batches. "
            "Bisection, in the first and the last trial of a model, uses the first check."
        ],
        tables=[table],
        targets=targets,
    )


def in_memory(run: Callable[[], Any], optimizer: Any) -> bool:
    """Whether training runs from its beginning."""
    optimizer.zero_grad()
    optimizer.state.clear()
    clear()
    try:
        run()
    except Exception as error:
        if "out of memory" not in str(error):
            raise
        return False
    finally:
        optimizer.zero_grad()
        optimizer.state.clear()
        clear()
    return True


def fits(runner: Runner, optimizer: Any, lengths: Any, slots: int) -> bool:
    """Whether four steps of two micro-batches of so many slots run."""
    order = np.sort(lengths)[::-1]

    def run() -> None:
        probe = Probe(runner, optimizer, order, CudaMemory(torch.device("cuda")), _tokens)
        probe.peak(slots)
        probe.runner.run([probe._batch(slots), probe._batch(slots)])
        optimizer.step()

    return in_memory(run, optimizer)


def planned(runner: Runner, optimizer: Any, lengths: Any, slots: int) -> bool:
    """Whether three planned steps with this budget run."""
    samples = Steps(samples=int(3 * slots / lengths.mean()))
    recipe = Recipe(layout=Packed(max_tokens=slots), steps=samples)

    def run() -> None:
        for step, _ in zip(PlannedStream(source(lengths, 1000), recipe), range(3), strict=False):
            runner.run(step)
            optimizer.step()
            optimizer.zero_grad()

    return in_memory(run, optimizer)


def bisect(runner: Runner, optimizer: Any, lengths: Any, near: int) -> int:
    """The most slots that fit, to 0.5 %."""
    low, high = int(0.8 * near), int(1.3 * near)
    while high - low > 0.005 * near:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(runner, optimizer, lengths, middle) else (low, middle)
    return low


# Costs ------------------------------------------------------------------------------------------


def costs() -> Section:
    """The cost fitted to every other step predicts the time of the others."""
    clear()
    model = decoder(BIG)
    runner = Runner(model=model, loss=cross_entropy())
    steps = []
    for number in range(24 if QUICK else 14):
        budget = (128, 256)[number // 2 % 2] if QUICK else (4096, 8192, 16_384)[number % 3]
        lengths = lengths_of(6 if QUICK else 24, budget // 2 if QUICK else 4096, seed=number)
        data = source(np.minimum(lengths, budget), vocab(BIG))
        steps.append(next(iter(PlannedStream(data, Recipe(layout=Packed(max_tokens=budget))))))
    rounds: list[list[Any]] = []
    for _ in range(4):
        rounds.append([])
        for step in steps:
            rounds[-1].append(runner.run(step))
            model.zero_grad()
    # In the first round, the allocator and the libraries meet every shape for the first time.
    fitted = fit_cost(rounds[1][:1] + rounds[1][1::2])  # the first step is left out
    terms = (fitted.cost.per_token, fitted.cost.per_pair, fitted.cost.per_segment)
    columns = {"step": "d", "seconds": ".3f"} | {f"round {n}": "+.1%" for n in range(len(rounds))}
    table = Table("Error of the prediction for steps that were held out", columns)
    errors: list[list[float]] = []
    for number in range(2, len(steps), 2):
        work = np.array(rounds[0][number].work) @ np.array(terms) + fitted.cost.per_micro_batch
        seconds = [sum(each[number].busy) for each in rounds]
        errors.append([float(work.sum() / each - 1) for each in seconds])
        table.add(number, seconds[1], *errors[-1])
    same, other = (
        [abs(row[n]) for row in errors for n in which] for which in ([1], range(2, len(rounds)))
    )
    return Section(
        "Costs from measurements, 1B decoder",
        [
            f"All steps ran four times in turn. Fitted to {fitted.num_micro_batches} micro-batches "
            f"of every other step of round 1; `fit_cost` itself reports {fitted.error:.1%} for "
            f"micro-batches that it held out. Round 0 is the first time that the process sees "
            f"these shapes; it is shown and judges nothing."
        ],
        tables=[table],
        targets=[
            Target(
                f"held-out steps {rounds_named} within 5 % (median, worst)",
                f"{statistics.median(found):.1%}, {max(found):.1%}", max(found) <= 0.05,
            )
            for rounds_named, found in (("of round 1", same), ("of later rounds", other))
        ],
    )  # fmt: skip


SECTIONS = {
    "compiling": compiling, "gradients": gradients, "costs": costs, "speed": speed,
    "budgets": budgets,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the sections and write the results."""
    global QUICK, DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="run a small version; write nothing")
    parser.add_argument("--only", action="append", choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="folder for results (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    QUICK, DEVICE = options.quick, options.device
    if DEVICE == "cuda":
        expand_segments()  # as the trainer does
    if options.out is None and not options.quick:
        options.out = ROOT / "benchmarks" / "results"
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = {}
    for name in options.only or SECTIONS:
        start = time.perf_counter()
        try:
            found[name] = SECTIONS[name]()
            tables.show(found[name], console)
        except Exception:
            traceback.print_exc(limit=8)
            clear()
        console.print(f"{name}: {time.perf_counter() - start:.0f} s\n")
        if options.out:
            write(options.out, found)
    return 0


def write(folder: Path, found: dict[str, Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.machine(),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    data = {"machine": about, "sections": {name: s.to_dict() for name, s in found.items()}}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / "gpu_runner.json").write_text(text + "\n", encoding="utf-8")
    texts = [
        "# The runner on a GPU",
        "Written by `python benchmarks/gpu_runner.py`.",
        tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*about.items()])),
        *(tables.markdown(section) for section in found.values()),
    ]
    (folder / "gpu_runner.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
