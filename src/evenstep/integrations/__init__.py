"""Batch -> **what other systems take**. None of them is imported unless it is there.

huggingface  keyword arguments for transformers models, and which of them keep segments apart
megatron     the fields of Megatron's PackedSeqParams
"""
