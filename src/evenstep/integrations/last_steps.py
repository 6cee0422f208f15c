"""LastSteps: how the ranks of a finite pooled stream end at the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from evenstep.core.recipe import Recipe
from evenstep.core.step import Cursor, Step
from evenstep.data.stream import empty_step
from evenstep.errors import ConfigError
from evenstep.integrations.run_state import Gather, all_gather

_NOWHERE = Cursor(belongs={}, step=0, place={})

Share = Callable[[list[Cursor]], Iterator[Step]]
"""From the cursors of all ranks to the steps of this rank, if what is left is shared anew."""


@dataclass(frozen=True)
class LastSteps:
    """Steps of this rank until all ranks have ended.

    When the first rank has no step left, what is left on the others is shared by all. This happens
    again until less than a step is left; then ranks without work get empty steps. A rank that
    shares drops the step that it has at hand, which has not run yet.

    anyone  `anyone(mine)` returns whether any rank has a step; default: torch.distributed
    gather  an all-gather of objects; default: torch.distributed, if `anyone` is not given
    """

    anyone: Callable[[bool], bool] | None
    gather: Gather | None
    recipe: Recipe
    share: Share | None
    """None if the source cannot be shared anew."""
    now: list[Cursor] = field(default_factory=list)
    """The cursor of this rank after its last step."""

    def until_all_end(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, then those of a share, or empty ones."""
        before: Step | None = None
        shared_at = -1
        while True:
            step = next(steps, None)
            some, every = self._ranks_with_steps(step is not None)
            if not some:
                return
            at = self.now[-1].step
            if not every and self._gather is not None and self.share and at != shared_at:
                shared_at = at
                states = self._gather(self.now[-1].to_dict())
                steps = self.share([Cursor.from_dict(state) for state in states])
                continue
            if step is None:  # the position is `now`, also after a share
                step = replace(empty_step(before, self.recipe), cursor=_NOWHERE)
            before = step
            yield step

    @property
    def _gather(self) -> Gather | None:
        return all_gather if self.gather is None and self.anyone is None else self.gather

    def _ranks_with_steps(self, mine: bool) -> tuple[bool, bool]:
        """Whether any rank has a step, and whether every rank has."""
        if self.anyone is not None:
            some = self.anyone(mine)
            return some, self.gather is None or not some or not self.anyone(not mine)
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                "ranks of a finite pooled stream must agree on its end, but there is no process "
                "group. Initialise torch.distributed, pass `anyone`, or set infinite_loop=True "
                "with max_num_steps."
            )
        count = torch.tensor([int(mine)])
        if distributed.get_backend() == "nccl":
            count = count.cuda()
        distributed.all_reduce(count)
        return bool(count > 0), int(count) == distributed.get_world_size()
