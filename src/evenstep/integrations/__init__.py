"""Streams and batches -> **what other systems take**. None is imported unless it is there.

dataloader   a stream as a torch dataset, and a loader that knows where it is
sampler      a planned stream as a batch sampler, for DataLoader, accelerate and the HF Trainer
huggingface  keyword arguments for transformers models, and which of them keep segments apart
megatron     the fields of Megatron's PackedSeqParams
"""
