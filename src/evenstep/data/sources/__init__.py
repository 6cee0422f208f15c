"""Sources: where samples come from.

source                    the protocols of a source
as_source                 lists and datasets -> sources
memory, lengths           samples in memory; lengths alone
token_file, token_writer  tokens of many samples in one memory-mapped file
megatron                  the same in Megatron's files
jsonl, parquet, text      text files, read in any order
token_lists               lengths of columns of token lists
mapped, iterated          any dataset by index; any iterable
transform                 items -> samples, also with id, epoch and seed
files, lines, content     what the above share: paths, lines, digests
measure                   lengths of a dataset that does not give them
"""
