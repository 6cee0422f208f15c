"""lengths -> **Plan**. Pure functions over integer arrays; nothing here reads a sample.

planner    make_plan, from top to bottom:
overflow     samples -> segments
units        segments -> units, which move as a whole
steps        samples -> steps; sizing for steps of micro-batches
batching     sorted rows -> padded micro-batches
packers      units -> packs; best_fit, optimal, vector_packing
balance      packs -> ranks
assemble   decided steps -> the arrays of a Plan
"""
