"""Names inside packages that tests use: where each lives is said here alone.

Tests import public names from their packages and all others from this file, so that moving code
inside a package changes one line of the tests. A name is imported on first use.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.cli import strategies
    from evenstep.cli.job import Job
    from evenstep.cli.measure import described as described_budget
    from evenstep.cli.measure import measure as measure_budget
    from evenstep.cli.overrides import number_of, overrides_of, resolved
    from evenstep.cli.samples import Samples
    from evenstep.cli.sweep import Sweep
    from evenstep.cli.whole_report import of_run
    from evenstep.compat.filled import filled_packs
    from evenstep.compat.rank_packs import WORK
    from evenstep.compat.roll import sequence_packing
    from evenstep.compat.veomni import collator, loader
    from evenstep.config.dialects import DIALECTS
    from evenstep.config.dialects.dialect import Key
    from evenstep.config.document import read_document
    from evenstep.config.interpolate import Interpolated, UnresolvedError
    from evenstep.config.native import PARTS, SECTIONS
    from evenstep.config.nested import leaves, unflattened
    from evenstep.config.tree import read_tree
    from evenstep.core import measures as measures_module
    from evenstep.core import plan_file
    from evenstep.core.bounds import (
        Floor,
        StepFloor,
        bins_bound,
        cut_times,
        lock_steps,
        makespans,
        pack_bound,
        pack_bounds,
        packs_of_first,
    )
    from evenstep.core.checks import CHECKS, violations_by_check
    from evenstep.core.cost import GPUS, Gpu, Part
    from evenstep.core.layout import PACKER_NAMES, Layout
    from evenstep.core.layout import Cut as CutName
    from evenstep.core.measures import Floors, StepTable, TimeParts, step_times, time_parts
    from evenstep.core.models import (
        DEFAULTS,
        KINDS,
        PRESETS,
        ModelConfig,
        ModelSize,
        mixing_of,
        named_config,
        read_model_config,
        sparse_layers,
        text_work,
        vision_work,
    )
    from evenstep.core.plan import (
        join_plans,
        on_context_ranks,
        on_fewer_ranks,
        samples_by_step,
        step_plan,
    )
    from evenstep.core.ragged import (
        ELSEWHERE,
        FloatArray,
        IntArray,
        Segments,
        frozen,
        item_and_part,
        offsets_of,
        rounded_up,
        sample_number,
        sum_by,
    )
    from evenstep.core.recipe import Balance, Overflow, Scope, SyncEvery, uses_seed
    from evenstep.core.text import one_of, truth_value, whole_number
    from evenstep.data import corpus as corpus_module
    from evenstep.data import dataset as measure
    from evenstep.data import feed as feed_module
    from evenstep.data import feed as producers_module
    from evenstep.data import files as lines
    from evenstep.data import planned as planned_module
    from evenstep.data.corpus import default_workers, task_size
    from evenstep.data.dataset import as_measured
    from evenstep.data.files import (
        as_tokenize,
        files_digest,
        files_of,
        is_token_list,
        list_lengths,
    )
    from evenstep.data.order import (
        EpochOrder,
        ReaderState,
        RemainingEpoch,
        Unread,
        share_anew,
        shares_of,
    )
    from evenstep.data.planned import StreamPosition
    from evenstep.data.pool import OverflowPolicy
    from evenstep.data.reader import common_steps
    from evenstep.data.run_folder import read_run
    from evenstep.data.source import (
        LOSS_MASKS,
        ItemTransform,
        check_some_loss,
        loss_tokens_of,
        read_samples,
        samples_digest,
        spread,
    )
    from evenstep.data.stream import Stream
    from evenstep.data.token_file import CODES, HEADER_SIZE, Header
    from evenstep.demo import run
    from evenstep.demo.chats import QUESTIONS, chat, write_chats
    from evenstep.demo.decoder import Block, rotate, rotation
    from evenstep.integrations import hf_attention as hf_boundaries
    from evenstep.integrations import mixers, packed_kernels
    from evenstep.integrations.dataloader import SharedStep, _is_plain, register_shared_steps
    from evenstep.integrations.hf_attention import (
        Hints,
        _read,
        _traced,
        attention_function,
        rule_of,
    )
    from evenstep.integrations.mixers import row_groups
    from evenstep.integrations.ray import LARGE
    from evenstep.integrations.sampler import PartDataset
    from evenstep.integrations.trainer import RouterLoss
    from evenstep.planning import best_fit as best_fit_module
    from evenstep.planning import construct, vector_packing
    from evenstep.planning import kernels as kernel
    from evenstep.planning import step as step_module
    from evenstep.planning.best_fit import best_fit, best_fit_few, check_items
    from evenstep.planning.exchange import Shape, exchange, search_all
    from evenstep.planning.kernels import kernel as kernel_decorator
    from evenstep.planning.optimal import fill_exactly
    from evenstep.planning.packers import PACKERS, divide_bins, even_bins
    from evenstep.planning.padded import (
        Rows,
        block_cost,
        block_costs,
        block_start,
        cut_rows,
        deal_blocks,
        even_blocks,
        even_waves,
        feasible_starts,
        fewest_cuts,
        levels_of,
        lower_levels,
        optimal_cuts,
        problem_of,
        slowest_lowered,
        whole_prices,
    )
    from evenstep.planning.partition import DEALS, deal_packs, swap_kernel
    from evenstep.planning.planner import plan_step, step_size
    from evenstep.planning.policies import divide_cuts
    from evenstep.planning.pool import (
        PADDED,
        STRATEGIES,
        best_set,
        fill_window,
        search,
        select,
    )
    from evenstep.planning.pool import Room as PoolRoom
    from evenstep.planning.units import Problem, Units, segments_of, units_of
    from evenstep.planning.vector_packing import LimitedPacker, spread_over
    from evenstep.report.charts import Bins, Thinned, histogram
    from evenstep.report.charts import lines as line_chart
    from evenstep.report.comparison import HEADER, cells, closing, one_step_warning
    from evenstep.report.drawing import bars_of
    from evenstep.report.ink import SHADES, Shading
    from evenstep.report.markup import shortened
    from evenstep.report.numbers import factor, percent, seconds, times
    from evenstep.report.run_log import typical_error
    from evenstep.report.simulation.device import cluster_of
    from evenstep.report.simulation.memory import USABLE, Memory, memory_of
    from evenstep.report.simulation.pipeline import pipeline_times, run_order, stage_order
    from evenstep.report.simulation.simulate import PARTS as SIMULATED_PARTS
    from evenstep.report.simulation.simulate import Exchange
    from evenstep.report.suggestions import of_ranks
    from evenstep.report.tables import cost_line, step_table
    from evenstep.report.time_bars import shared_end, time_bars
    from evenstep.report.timeline import timelines
    from evenstep.screen import print_grid, progress
    from evenstep.tensors import batch as batch_module
    from evenstep.tensors import head as head_module
    from evenstep.tensors import segment_attention
    from evenstep.tensors.batch import (
        IGNORE_INDEX,
        BatchExchange,
        Boundaries,
        Sharding,
        labelled_slots,
        on_host,
    )
    from evenstep.tensors.collate import Columns
    from evenstep.tensors.head import Factors, Wanted, score
    from evenstep.tensors.losses import Outcome, merge
    from evenstep.tensors.restore import Key as OriginKey
    from evenstep.tensors.segment_attention import (
        BACKENDS,
        Call,
        attend,
        choose,
        refusal,
        varlen,
    )
    from evenstep.tensors.transport import exchange as exchange_rows
    from evenstep.tensors.transport import exchange_backward as exchange_rows_backward
    from evenstep.tensors.transport import name_of as name_of_ranks
    from evenstep.testing.content import content_of
    from evenstep.testing.gradients import errors_of_parameters
    from evenstep.testing.plans import shortest_first
    from evenstep.train import model_head
    from evenstep.train import prefetch as prefetch_module
    from evenstep.train import result as result_module
    from evenstep.train import runner as runner_module
    from evenstep.train.budget import CudaMemory, expand_segments
    from evenstep.train.collectives import Bundle
    from evenstep.train.compiling import layers_of
    from evenstep.train.framework import Framework, call, device_of, forward_of
    from evenstep.train.gradients import Gradients, set_aside, sum_gradients
    from evenstep.train.model_head import ModelHead
    from evenstep.train.normalization import weighted
    from evenstep.train.prefetch import Prefetch
    from evenstep.train.result import ComputeTime, Timings
    from evenstep.train.rollouts import array_of, tensor_of
    from evenstep.train.step_loss import LossFunction, LossValues, Mode, StepLoss, power_of_two
    from evenstep.train.watch import _is_consequence
    from evenstep.trainer import export as export_module
    from evenstep.trainer import run as run_module
    from evenstep.trainer.checkpoints import Checkpoints, Place, complete, read_place
    from evenstep.trainer.job import Job as TrainJob
    from evenstep.trainer.job import job_of
    from evenstep.trainer.logs import Log, RunProgress
    from evenstep.trainer.ranks import Ranks
    from evenstep.trainer.run import State, record, reduce_every
    from evenstep.trainer.samples import stored_samples


def _homes() -> dict[str, tuple[str, str]]:
    """Each name with its module and its name there, as the block above says."""
    block = next(
        node for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.If)
    )
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


if not TYPE_CHECKING:
    _HOMES = _homes()

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, there = _HOMES[name]
        home = import_module(module)
        value = getattr(home, there) if hasattr(home, there) else import_module(f"{module}.{there}")
        globals()[name] = value
        return value
