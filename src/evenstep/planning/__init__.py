"""lengths -> **Plan**. Pure functions over integer arrays decide; nothing here reads a sample.

cut_samples -> deal_steps -> per step: units -> packs or cuts -> ranks -> assemble
"""

from evenstep.planning.balance import DEALS, partition
from evenstep.planning.pack import PACKERS, pack
from evenstep.planning.planner import make_plan

__all__ = ["DEALS", "PACKERS", "make_plan", "pack", "partition"]
