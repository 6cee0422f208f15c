"""Streams: samples -> steps with a cursor.

stream, estimate, lookup                  what all streams share
planned, position, step_remainder         known lengths: a plan for every step
order, epoch_units, per_sample            position in an epoch -> sample
pooled, pool, batcher, reader,
remaining, epoch_source                   unknown lengths: a pool on every rank
separate                                  micro-batches of short or long segments alone
feed                                      samples that are still being produced
"""
