"""lengths -> **Plan**. Pure functions over integer arrays; nothing here reads a sample.

planner    make_plan, from top to bottom:
units        samples -> segments -> units, which move as a whole
steps        samples -> steps
step         units -> packs -> waves and ranks, one step at a time:
               construct, exchange, partition   packs that are searched
               padded                           sorted rows that are cut
               policies                         what other systems do
packers      units -> packs of one capacity; best_fit, optimal, vector_packing
"""
