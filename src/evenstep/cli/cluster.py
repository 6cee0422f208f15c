"""Speed: the devices of `evenstep simulate`, from its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenstep.cli.job import Job
from evenstep.config import overridden, recipe_from
from evenstep.core.cost import Cost, Gpu
from evenstep.core.models import ModelSize, named_config
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError
from evenstep.report.numbers import times
from evenstep.report.simulation.cluster import Cluster
from evenstep.report.simulation.device import cluster_of, with_exchange
from evenstep.report.simulation.simulate import Simulation, refuse_second_work, simulate

_SHARE, _LINK = 0.4, 50e9


@dataclass(frozen=True, slots=True)
class Speed:
    """A GPU by name, or FLOPs per second; `size` is None without --model."""

    gpu: Gpu | None
    rate: float  # FLOPs per second that training reaches
    link: float | None
    overlap: bool
    size: ModelSize | None

    @classmethod
    def of(
        cls,
        gpu: str | None,
        flops: float | None,
        share: float | None,
        link: float | None,
        overlap: bool,
        model: str | None,
    ) -> Speed:
        """Check the options against each other."""
        if (gpu is None) == (flops is None):
            raise ConfigError(
                "simulate needs the speed of a device. Give either --gpu, such as h200, or --flops."
            )
        if gpu is not None and model is None:
            raise ConfigError("--gpu needs the shape of the model. Add --model, or use --flops.")
        if gpu is not None and share is not None:
            raise ConfigError("--share belongs to --flops. Remove --share or --gpu.")
        for name, value in (("flops", flops), ("share", share), ("link", link)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name} must be above 0, got {value:g}.")
        if share is not None and share > 1:
            raise ConfigError(f"--share must be at most 1, got {share:g}.")
        reached = share or (1.0 if flops == 1 else _SHARE)
        size = None if model is None else ModelSize.of(named_config(model))
        device = None if gpu is None else Gpu.named(gpu)
        return cls(device, (flops or 1.0) * reached, link, overlap, size)

    def check(self, recipe: Recipe) -> None:
        """Raise if the cost has no time, or a part of the work is not simulated."""
        if recipe.cost == Cost():
            raise ConfigError(
                "the cost counts tokens only, so steps have no time. Add --model, or set cost."
            )
        refuse_second_work(recipe)

    def cluster(self, recipe: Recipe) -> Cluster:
        """The cluster of a recipe's topology."""
        topology = recipe.topology
        if self.gpu is not None:
            assert self.size is not None
            gpu = self.gpu if self.link is None else replace(self.gpu, network=self.link)
            return replace(cluster_of(self.size, gpu, topology), overlap=self.overlap)
        cost, devices = recipe.cost, topology.cp * topology.tp
        per = 1 / (self.rate * devices)
        cluster = Cluster(
            cost=Cost(
                per_token=cost.per_token * per,
                per_pair=cost.per_pair * per,
                per_segment=cost.per_segment * per,
                per_micro_batch=cost.per_micro_batch * per,
            ),
            link=_LINK if self.link is None else self.link,
            parameters=0 if self.size is None else self.size.parameters,
            hidden=0 if self.size is None else self.size.hidden,
            overlap=self.overlap,
        )
        return cluster if self.size is None else with_exchange(cluster, self.size, topology)

    def simulated(
        self, job: Job, overrides: Sequence[str], progress: Callable[[int, int], None]
    ) -> Simulation:
        """Plan the job with these overrides and simulate the plan."""
        recipe = recipe_from(overridden(job.recipe.to_dict(), overrides))
        return simulate(job.plan(recipe, progress), self.cluster(recipe))

    def about(self, job: Job) -> str:
        """The cluster in one line."""
        topology = job.recipe.topology
        devices = topology.dp * topology.cp * topology.tp * topology.pp
        what = "device" if self.gpu is None else self.gpu.name.upper()
        axes = [f"{name} {getattr(topology, name)}" for name in ("dp", "cp", "tp", "pp", "vpp")]
        sync = "at every micro-batch" if job.recipe.sync_every == "micro_batch" else "once per step"
        sent = "" if self.size is not None else "; without --model, ranks and stages send nothing"
        return f"{times(devices, what)}: {', '.join(axes)}; ranks synchronise {sync}{sent}."
