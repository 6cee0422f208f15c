"""Streams and batches -> **what other systems take**. Everything here needs torch.

dataloader   a stream as a torch dataset, and a loader that knows its position
run_state    the state of a whole run, gathered from all ranks
sampler      planned micro-batches as a batch sampler: of sample ids, and for trainers
accelerate   a planned stream as a prepared dataloader
trainer      the Hugging Face Trainer and TRL's SFTTrainer on planned steps
hf_arguments what a transformers model is called with: a batch as keyword arguments
huggingface  transformers models as forwards of batches, and which of them can be packed
probes       small forwards that show what a model does with packed segments
mixers       layers that carry state, run on rows of one segment each
hf_attention attention within segments for transformers models: attn_implementation="evenstep"
megatron     the fields of Megatron's PackedSeqParams
local        planned rollouts to the workers of an RL job in one process
ray          the same to Ray actors
"""

from evenstep.lazy import need

need("torch", extra="torch", package=__name__)
