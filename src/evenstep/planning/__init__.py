"""lengths -> **Plan**. Pure functions over integer arrays decide; nothing here reads a sample.

cut_samples -> deal_steps -> per step: units -> packs or cuts -> ranks -> assemble
"""

from evenstep.planning.balance.partition import partition
from evenstep.planning.packing.packers import pack
from evenstep.planning.planner import make_plan

__all__ = ["make_plan", "pack", "partition"]
