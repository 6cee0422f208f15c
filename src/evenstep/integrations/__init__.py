"""Streams and batches -> **what other systems take**. Everything here needs torch.

dataloader   a stream as a torch dataset, and a loader that knows its position
run_state    the state of a whole run, gathered from all ranks
sampler      a planned stream as a batch sampler, for DataLoader
trainer      the Hugging Face Trainer and TRL's SFTTrainer on planned steps
accelerate   a planned stream as a prepared dataloader; both in step_sampler, hf_collate
hf_attention attention within segments for transformers models: attn_implementation="evenstep"
huggingface  how transformers models are called, and which keep segments apart; in hf_forward,
             hf_kwargs, hf_model, padded_rows, rope; supports, packing_code, packing_probe
megatron     the fields of Megatron's PackedSeqParams
local        planned rollouts to the workers of an RL job in one process; results in gathered
ray          the same to Ray actors
"""

from evenstep.lazy import need

need("torch", extra="torch", package=__name__)
