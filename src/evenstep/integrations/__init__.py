"""Streams and batches -> **what other systems take**. Everything here needs torch.

dataloader   a stream as a torch dataset, and a loader that knows its position
run_state    the state of a whole run, gathered from all ranks
sampler      a planned stream as a batch sampler, for DataLoader, accelerate and the HF Trainer
huggingface  keyword arguments for transformers models, and which models keep segments apart
megatron     the fields of Megatron's PackedSeqParams
"""

from evenstep.lazy import need

need("torch", extra="torch", package=__name__)
