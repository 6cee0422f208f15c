"""What the processes of a survey share: imports and batches, before they are forked."""

import transformers.models.gemma3.modeling_gemma3
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

from tests.slow.measure import LAYOUTS, LENGTHS, plan_of

for layout in LAYOUTS:
    plan_of(layout, LENGTHS)
