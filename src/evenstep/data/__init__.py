"""Where samples come from and where we are: source -> **steps with a cursor**. No torch here.

source, lengths, memory, token_file, token_writer,
jsonl, parquet, text, mapped, iterated          samples by number, or one after the other
order, units, per_sample                        position in an epoch -> sample, without an array
planned, place, remainder                       known lengths -> steps
pool, shard, agenda, items, pooled              unknown lengths -> steps from a pool
stream, estimate, reading                       what both have in common
feed                                            samples that are still being made
"""
