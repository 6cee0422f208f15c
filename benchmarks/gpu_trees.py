"""Measure steps in which the answers to one prompt share it, on a GPU.

    python benchmarks/gpu_trees.py                        writes benchmarks/results
    python benchmarks/gpu_trees.py --device cpu --quick   a small version, writes nothing

One rank's share of 64 groups on 8 ranks: 8 groups of 16 answers (log-normal, median 500, sigma
0.8) on a prompt of 2,000 tokens, at most 32,768 slots per micro-batch. The same answers run
packed whole and packed with shared prompts. A part that fails prints its traceback, and the others
run. Results are written after each part.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks import tables
from benchmarks.gradients import PER_PARAMETER, gradient_of, worst_parameter
from benchmarks.models import HALF, LLAMA_1B, TINY, Setup, build, first_line
from benchmarks.tables import Section, Table, Target
from evenstep import Cost, MicroBatch, Packed, Prefixes, Recipe, make_plan
from evenstep.core.ragged import Segments
from evenstep.demo.decoder import Decoder, DecoderShape
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_forward, hf_head
from evenstep.tensors.batch import Batch, Boundaries, Extra
from evenstep.tensors.collate import Collator
from evenstep.tensors.head import Head
from evenstep.tensors.losses import policy_gradient
from evenstep.tensors.segment_attention import attention, block_mask
from evenstep.train.normalization import SequenceMean, TokenMean
from evenstep.train.runner import Runner
from evenstep.train.scoring import compute_log_probs

ROOT = Path(__file__).resolve().parents[1]
LATEST = 200.0
"""Seconds since the beginning after which no further model is started."""
STEP, LOG_PROBS, WITHOUT = 2.6, 2.8, 1.02
"""Targets: times faster with shared prompts; attention of a batch without a tree over before."""
COLLATE = Collator(
    extras={
        "old_log_probs": Extra(aligned="token"),
        "advantages": Extra(aligned="sequence"),
    }
)

# Answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """Groups of answers, each to one prompt."""

    samples: list[dict[str, Any]]
    prefixes: Prefixes
    lengths: list[int]

    def batches(self, budget: int, shared: bool) -> list[Batch]:
        """The micro-batches of one rank."""
        prefixes = self.prefixes if shared else None
        plan = make_plan(self.lengths, recipe_of(budget), prefixes=prefixes)
        return [COLLATE(micro, self.samples) for micro in plan[0, 0]]


def recipe_of(budget: int) -> Recipe:
    return Recipe(layout=Packed(max_tokens=budget), cost=Cost.named("llama-3.2-1b"))


def draw(groups: int, each: int, prompt: int, median: float, vocab: int) -> Answers:
    """Random tokens: prompts of one length and answers of log-normal lengths."""
    rng = np.random.default_rng(0)
    samples: list[dict[str, Any]] = []
    for _ in range(groups):
        question = rng.integers(0, vocab, prompt)
        for _ in range(each):
            count = max(int(rng.lognormal(np.log(median), 0.8)), 1)
            tokens = np.concatenate((question, rng.integers(0, vocab, count)))
            samples.append(
                {
                    "input_ids": tokens,
                    "loss_mask": np.arange(len(tokens)) >= prompt,
                    "old_log_probs": rng.normal(-np.log(vocab), 0.1, len(tokens)).astype(
                        np.float32
                    ),
                    "advantages": float(rng.normal()),
                }
            )
    lengths = [len(sample["input_ids"]) for sample in samples]
    group = np.repeat(np.arange(groups), each)
    return Answers(samples, Prefixes.of_groups(group, np.full(len(lengths), prompt)), lengths)


# Models ---------------------------------------------------------------------------------------


class States(nn.Module):  # type: ignore[misc]
    """A decoder that returns hidden states, and its head."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.decoder = Decoder(shape)
        self.head = self.decoder.head
        self.decoder.head = nn.Identity()

    def forward(self, batch: Batch) -> Tensor:
        """(rows, width, hidden)."""
        states: Tensor = self.decoder(batch)
        return states


@dataclass(frozen=True, slots=True)
class Model:
    """A module, how it runs a batch, and its head."""

    module: Any
    forward: Any
    head: Head


def decoder(setup: Setup) -> Model:
    """A decoder of 1.1B parameters."""
    torch.manual_seed(0)
    shape = DecoderShape(vocab=32_000, hidden=2048, layers=16, heads=16, kv_heads=8, ffn=8192)
    if setup.quick:
        shape = DecoderShape(vocab=101, hidden=32, layers=2, heads=2, kv_heads=1, ffn=32)
    with torch.device(setup.device):
        module = States(shape)
    module = module.to(setup.device, torch.float32 if setup.quick else HALF)
    return Model(module, lambda model, batch: model(batch), Head(module.head))


def llama(setup: Setup) -> Model:
    """A Llama of transformers with the sizes of Llama 3.2 1B and 32,000 tokens."""
    shape = TINY if setup.quick else LLAMA_1B | {"vocab_size": 32_000}
    module = build(shape, setup.device, torch.float32 if setup.quick else HALF)
    use_attention(module)
    return Model(module, hf_forward(module, outputs="hidden"), hf_head(module))


# Steps ----------------------------------------------------------------------------------------


def steps(setup: Setup, make: Callable[[Setup], Model], name: str) -> Section:
    """Steps, log-probs, memory and gradients of a model, with and without shared prompts."""
    sizes = (2, 4, 24, 8.0, 101) if setup.quick else (8, 16, 2000, 500.0, 32_000)
    answers, budget = draw(*sizes), 128 if setup.quick else 32_768
    model = make(setup)
    count = sum(each.numel() for each in model.module.parameters())
    section = Section(f"{name}, {count / 1e9:.2f}B parameters, {'' if setup.quick else 'bfloat16'}")
    loss = policy_gradient(head=model.head)
    runner = Runner(
        model=model.module, loss=loss, forward=model.forward, device=setup.device,
        normalization=TokenMean(),
    )  # fmt: skip
    table = Table(
        "One step of all answers",
        {
            "prompts": "", "micro-batches": ",", "tokens": ",", "step (s)": ".3f", "×": ".2f",
            "log-probs (s)": ".3f", "× ": ".2f", "peak (GB)": ".2f", "above weights (GB)": ".2f",
        },
    )  # fmt: skip
    section.tables.append(table)
    rows: dict[bool, list[Any]] = {}
    gradients: dict[Any, dict[str, Tensor]] = {}
    for shared in (False, True):
        rows[shared] = _row(setup, model, runner, answers, budget, shared)
        gradients[shared] = _kept(model.module)
    for shared, name in ((False, "repeated"), (True, "shared")):
        batches, tokens, step, log_probs, peak, above = rows[shared]
        gain, of_log_probs = rows[False][2] / step, rows[False][3] / log_probs
        table.add(name, batches, tokens, step, gain, log_probs, of_log_probs, peak, above)
    section.targets += [
        Target(f"steps at least {STEP}× faster", f"{gain:.2f}×", gain >= STEP),
        Target(
            f"log-probs at least {LOG_PROBS}× faster",
            f"{of_log_probs:.2f}×",
            of_log_probs >= LOG_PROBS,
        ),
        Target(
            "peak memory not above that of repeated prompts",
            f"{rows[True][4]:.2f} compared with {rows[False][4]:.2f} GB",
            rows[True][4] <= rows[False][4],
        ),
    ]
    # What rounding alone does: the same answers, whole, in other micro-batches.
    model.module.zero_grad()
    runner.run(answers.batches(budget * 3 // 4, False))
    rounding = worst_parameter(_kept(model.module), gradients[False])
    found = worst_parameter(gradients[True], gradients[False])
    section.notes.append(
        f"Gradients of shared and repeated prompts differ by {found:.1e}; those of repeated "
        f"prompts in micro-batches of {budget * 3 // 4:,} and {budget:,} slots by {rounding:.1e}. "
        f"{PER_PARAMETER}"
    )
    section.targets.append(
        Target(
            "gradients differ by at most twice what rounding does",
            f"{found:.1e} compared with {rounding:.1e}",
            found <= max(2 * rounding, 1e-5),
        )
    )
    return section


def _row(
    setup: Setup, model: Model, runner: Runner, answers: Answers, budget: int, shared: bool
) -> list[Any]:
    """Micro-batches, tokens, seconds of a step and of log-probs, GB at peak and above weights."""
    batches = answers.batches(budget, shared)
    runner.run(batches[:1])
    model.module.zero_grad()
    _free(setup)
    before, taken = _allocated(setup), []
    for _ in range(2):
        model.module.zero_grad()
        taken.append(_seconds(setup, lambda: runner.run(batches)))
    peak = setup.peak
    tokens = sum(int(batch.seqlens.sum()) for batch in batches)

    def score() -> list[Tensor]:
        return compute_log_probs(
            model.module,
            answers.samples,
            recipe_of(budget),
            forward=model.forward,
            head=model.head,
            share_prefixes=shared,
        )

    score()
    scored = [_seconds(setup, score) for _ in range(2)]
    return [len(batches), tokens, min(taken), min(scored), peak, peak - before]


def _kept(module: Any) -> dict[str, Tensor]:
    """The gradient of each parameter, on the host."""
    return {
        name: each.grad.to("cpu", torch.float32, copy=True)
        for name, each in module.named_parameters()
        if each.grad is not None
    }


def _seconds(setup: Setup, call: Callable[[], Any]) -> float:
    setup.wait()
    begin = time.perf_counter()
    call()
    setup.wait()
    return time.perf_counter() - begin


def _free(setup: Setup) -> None:
    gc.collect()
    setup.free()


def _allocated(setup: Setup) -> float:
    return torch.cuda.memory_allocated() / 1e9 if setup.device == "cuda" else 0.0


def decoder_steps(setup: Setup) -> Section:
    return steps(setup, decoder, "Decoder")


def llama_steps(setup: Setup) -> Section:
    return steps(setup, llama, "Llama of transformers")


# Gradients in float32 -------------------------------------------------------------------------


def gradients(setup: Setup) -> Section:
    """A small decoder in float32, compared with one sample at a time."""
    answers = draw(3, 5, 40, 12.0, 97)
    shape = DecoderShape(vocab=97, hidden=64, layers=2, heads=4, kv_heads=2, ffn=96)
    table = Table("Compared with one sample at a time", {"prompts": "", "relative error": ".1e"})
    errors = {}

    def gradient(batches: list[Batch]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Decoder(shape).to(setup.device)
        Runner(
            model=model, loss=policy_gradient(), normalization=SequenceMean(), device=setup.device
        ).run(batches)
        return gradient_of(model)

    single = [
        COLLATE(make_plan([length], Recipe(layout=Packed(max_tokens=length)))[0, 0][0], [sample])
        for length, sample in zip(answers.lengths, answers.samples, strict=True)
    ]
    expected = gradient(single)
    for shared, name in ((False, "repeated"), (True, "shared")):
        errors[shared] = worst_parameter(gradient(answers.batches(256, shared)), expected)
        table.add(name, errors[shared])
    return Section(
        "Gradients of a step, float32",
        [PER_PARAMETER],
        [table],
        [Target("at most 1e-6 with shared prompts", f"{errors[True]:.1e}", errors[True] <= 1e-6)],
    )


# Attention of one layer -----------------------------------------------------------------------


@torch.library.custom_op("benchmark::varlen", mutates_args=())  # type: ignore[untyped-decorator]
def plain(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The operator without an index of keys."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, 0.0, True, return_debug_mask=False, scale=scale,
        window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("benchmark::varlen_backward", mutates_args=())  # type: ignore[untyped-decorator]
def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Tensor,
    longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its gradients."""
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    found = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, ends, ends, longest, longest, 0.0, True, random,
        unused, scale=scale, window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    dq, dk, dv = (each.contiguous() for each in found)
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.mark_non_differentiable(output[1])
    ctx.how = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return *plain_backward(grad, *ctx.saved_tensors, *ctx.how), None, None, None


plain.register_autograd(_differentiate, setup_context=_keep)


def one_layer(setup: Setup) -> Section:
    """Forward and backward of the attention of one layer, 16 heads of 128."""
    section = Section("Attention of one layer, forward and backward, bfloat16, 16 heads of 128")
    table = Table(
        "Whole batches",
        {"answers": "", "repeated (ms)": ".2f", "shared (ms)": ".2f", "×": ".2f", "GB": ".2f",
         "GB shared": ".2f"},
    )  # fmt: skip
    section.tables.append(table)
    cases = [(3, 16, 2000), (8, 16, 2000), (3, 16, 8000), (16, 8, 500)]
    for groups, each, prompt in [(2, 4, 24)] if setup.quick else cases:
        answers = draw(groups, each, prompt, 8.0 if setup.quick else 500.0, 97)
        times, peaks = [], []
        for shared in (False, True):
            (batch,) = answers.batches(sum(answers.lengths), shared)
            call = _attending(setup, batch.to(setup.device))
            times.append(_fastest(setup, {"": call})[""])
            peaks.append(setup.peak)
            del call
            _free(setup)
        name = f"{groups} × {each} on {prompt:,}"
        table.add(name, *(1e3 * each for each in times), times[0] / times[1], *peaks)
    if setup.device == "cuda":
        (batch,) = draw(1, 12, 2000, 500.0, 97).batches(65_536, False)
        batch = batch.to("cuda")
        calls = {"today": _attending(setup, batch), "before": _attending(setup, batch, plain)}
        found = _fastest(setup, calls, rounds=12)
        ratio = found["today"] / found["before"]
        section.targets.append(
            Target(
                f"a batch without a tree at most {WITHOUT - 1:.0%} slower than without an index",
                f"{1e3 * found['today']:.3f} compared with {1e3 * found['before']:.3f} ms "
                f"({ratio - 1:+.1%})",
                ratio <= WITHOUT,
            )
        )
    return section


def _attending(setup: Setup, batch: Batch, operator: Any = None) -> Callable[[], None]:
    """One forward and backward of a layer's attention."""
    heads, dim = (2, 16) if setup.quick else (16, 128)
    dtype = torch.float32 if setup.quick else HALF
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, batch.width, heads, dim, device=setup.device, dtype=dtype).transpose(1, 2)
        for _ in range(4)
    )
    for each in (q, k, v):
        each.requires_grad_()

    def call() -> None:
        if operator is None:
            out = attention(q, k, v, batch)
        else:
            bounds = Boundaries.of(batch)
            flat = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
            out, _ = operator(*flat, bounds.cu_seqlens, bounds.max_seqlen, dim**-0.5)
            out = out.unflatten(0, (1, batch.width)).transpose(1, 2)
        torch.autograd.grad(out, (q, k, v), grad)

    return call


def _fastest(
    setup: Setup, calls: dict[str, Callable[[], Any]], rounds: int = 4, free: bool = True
) -> dict[str, float]:
    """Seconds of each call, the fastest of several rounds in which calls take turns."""
    seconds, repeats = dict.fromkeys(calls, float("inf")), 1 if setup.quick else 5
    for call in calls.values():
        call()
    if free:  # compiled kernels as well
        _free(setup)
    for _ in range(rounds):
        for name, call in calls.items():
            taken = _seconds(setup, lambda call=call: [call() for _ in range(repeats)])  # type: ignore[misc]
            seconds[name] = min(seconds[name], taken / repeats)
    return seconds


# FlexAttention --------------------------------------------------------------------------------

CASES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("float32", torch.float32, {}),
    ("soft cap, bfloat16", HALF, {"softcap": 30.0}),
    ("soft cap and window 1,000, bfloat16", HALF, {"softcap": 30.0, "window": 1000}),
]


def flex_layer(setup: Setup) -> Section:
    """What variable-length kernels do not take: float32 and soft caps."""
    section = Section(
        "FlexAttention of one layer, forward and backward, 16 heads of 64",
        ["16 answers to one prompt of 2,000 tokens. Errors are of dq, dk and dv, the worst, "
         "relative to the largest entry of the same in float32, one segment at a time. By these "
         "figures, `attention` runs shared prefixes in float32 one segment at a time, and with "
         "FlexAttention where a soft cap excludes variable-length kernels."],
    )  # fmt: skip
    table = Table(
        "Shared prompts",
        {"case": "", "one by one (ms)": ".1f", "flex (ms)": ".1f", "×": ".1f", "error": ".1e",
         "one by one, error": ".1e"},
    )  # fmt: skip
    section.tables.append(table)
    answers = draw(1, 4, 24, 8.0, 97) if setup.quick else draw(1, 16, 2000, 500.0, 97)
    shared, repeated = (_whole_batch(answers, each).to(setup.device) for each in (True, False))
    _mask_of_tiles(setup, repeated, section)
    for name, dtype, how in CASES:
        try:
            exact = _flex_gradients(setup, shared, torch.float32, "segments", how)()
            calls = {
                each: _flex_gradients(setup, shared, dtype, each, how)
                for each in ("segments", "flex")
            }
            apart = {each: _apart(call(), exact) for each, call in calls.items()}
            ms = {each: 1e3 * s for each, s in _fastest(setup, calls, 2, free=False).items()}
        except Exception as error:
            traceback.print_exc()
            section.notes.append(f"{name}: {first_line(error)}")
            continue
        table.add(
            name, ms["segments"], ms["flex"], ms["segments"] / ms["flex"], apart["flex"],
            apart["segments"],
        )  # fmt: skip
        print(f"{time.perf_counter() - setup.begin:.0f} s", *table.rows[-1], flush=True)
        errors = f"{apart['flex']:.1e} compared with {apart['segments']:.1e}"
        target = f"{name}: errors at most twice those of one by one"
        section.targets.append(Target(target, errors, apart["flex"] <= 2 * apart["segments"]))
    return section


def _whole_batch(answers: Answers, shared: bool) -> Batch:
    """All answers to one prompt in one micro-batch; made here, because planning would compile."""
    lengths, count = np.array(answers.lengths), len(answers.lengths)
    begin = int(answers.prefixes.shared.max()) - 1 if shared else 0
    sample, start, parent = np.arange(count), np.full(count, begin), np.full(count, -1)
    if shared:  # the prompt without its last token, and the answers behind it
        sample, start = np.insert(sample, 0, 0), np.insert(start, 0, 0)
        parent = np.append(-1, np.zeros(count, np.int64))
    ends = lengths[sample]
    ends[: len(sample) - count] = begin
    segments = Segments(sample, start, ends - start, parent if shared else None)
    rows = np.array([0, len(sample)])
    width = int(segments.length.sum())
    return COLLATE(MicroBatch(segments, rows, width, lengths[sample]), answers.samples)


def _flex_gradients(
    setup: Setup, batch: Batch, dtype: torch.dtype, backend: str, how: dict[str, Any]
) -> Callable[[], list[Tensor]]:
    heads, dim = (2, 16) if setup.quick else (16, 64)
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, heads, batch.width, dim, device=setup.device, dtype=HALF).to(dtype)
        for _ in range(4)
    )
    for each in (q, k, v):
        each.requires_grad_()
    backend = backend if setup.device == "cuda" else "segments"  # no gradients on the CPU

    def call() -> list[Tensor]:
        out = attention(q, k, v, batch, backend=backend, **how)
        return list(torch.autograd.grad(out, (q, k, v), grad))

    return call


def _apart(tensors: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(tensors, exact, strict=True)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)


def _mask_of_tiles(setup: Setup, batch: Batch, section: Section) -> None:
    """A batch without a tree, with the mask function of before: equal numbers of tiles."""
    tiles, mask = batch.segment_ids, block_mask(batch)

    def before(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (tiles[row, query] == tiles[row, key]) & (key <= query)

    if setup.device != "cuda":
        return
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    old = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=128, mask_mod=before, seq_lengths=(batch.width, batch.width)
    )
    kernel = torch.compile(flex_attention)
    q, k, v, grad = (
        torch.randn(1, 16, batch.width, 64, device=setup.device, dtype=HALF, requires_grad=True)
        for _ in range(4)
    )

    def run(blocks: BlockMask) -> Callable[[], None]:
        return lambda: torch.autograd.grad(kernel(q, k, v, block_mask=blocks), (q, k, v), grad)

    times = _fastest(setup, {"before": run(old), "today": run(mask)}, 4, free=False)
    built = _fastest(setup, {"": lambda: block_mask(batch)}, 4, free=False)[""]
    ratio = times["today"] / times["before"]
    print(f"{time.perf_counter() - setup.begin:.0f} s", times, built, flush=True)
    section.notes.append(f"The mask of {batch.width:,} slots is built in {1e3 * built:.2f} ms.")
    section.targets.append(
        Target(
            f"a batch without a tree at most {WITHOUT - 1:.0%} slower than with a mask of tiles",
            f"{1e3 * times['today']:.3f} compared with {1e3 * times['before']:.3f} ms "
            f"({ratio - 1:+.1%})",
            ratio <= WITHOUT,
        )
    )


# Running --------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Setup], Section]] = {
    "gradients": gradients,
    "one_layer": one_layer,
    "decoder": decoder_steps,
    "llama": llama_steps,
    "flex_layer": flex_layer,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="run a small version; write nothing")
    parser.add_argument("--only", action="append", choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="folder for results (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.out is None and not options.quick and not options.only:
        options.out = ROOT / "benchmarks" / "results"
    torch.backends.cuda.matmul.allow_tf32 = False
    setup = Setup(options.device, options.quick)
    console = Console(width=None if sys.stdout.isatty() else 140)
    sections: dict[str, Section] = {}
    failed = False
    for name in options.only or SECTIONS:
        start = time.perf_counter()
        try:
            if start - setup.begin > LATEST:
                raise TimeoutError(f"{name} was not started after {LATEST:.0f} seconds")
            sections[name] = SECTIONS[name](setup)
        except Exception as error:
            traceback.print_exc()
            sections[name] = Section(f"{name} failed", [first_line(error)])
            failed = True
        tables.show(sections[name], console)
        console.print(f"{name}: {time.perf_counter() - start:.0f} s\n")
        _free(setup)
        if options.out:
            _write(options.out, setup, sections)
    return int(failed)


def _write(folder: Path, setup: Setup, sections: dict[str, Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = setup.device == "cuda"
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "CUDA": str(torch.version.cuda) if on_gpu else "none",
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    data = {"machine": about, "sections": {name: s.to_dict() for name, s in sections.items()}}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / "gpu_trees.json").write_text(text + "\n", encoding="utf-8")
    texts = [
        "# Shared prompts on a GPU",
        "Written by `python benchmarks/gpu_trees.py`. One rank's share of 64 groups on 8 ranks: 8 "
        "groups of 16 answers (log-normal, median 500, sigma 0.8) on prompts of 2,000 tokens, at "
        "most 32,768 slots per micro-batch. Random weights, real shapes.",
        tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*about.items()])),
        *(tables.markdown(section) for section in sections.values()),
    ]
    (folder / "gpu_trees.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
