"""(outputs, batch) -> **loss sums**: functions of one sequence, vectorised over a batch.

cross_entropy    negative log-likelihood of the labels
policy_gradient  PPO and GRPO
value_loss       the critic of PPO
dpo              DPO and other losses of chosen and rejected sequences
reward_model     Bradley-Terry on one score per sequence
distillation     divergence from a teacher's distribution
load_balancing   the auxiliary loss of mixture-of-experts routers
scores           log-probs, entropy and related numbers per label
head             the same from hidden states, without all logits in memory
pairs            chosen and rejected sequences of a batch
"""

from evenstep.tensors.losses.cross_entropy import cross_entropy
from evenstep.tensors.losses.distillation import distillation
from evenstep.tensors.losses.dpo import dpo
from evenstep.tensors.losses.head import Head
from evenstep.tensors.losses.load_balancing import count_experts, load_balancing
from evenstep.tensors.losses.policy_gradient import policy_gradient
from evenstep.tensors.losses.reward_model import reward_model
from evenstep.tensors.losses.scores import label_log_probs
from evenstep.tensors.losses.value_loss import value_loss

__all__ = [
    "Head",
    "count_experts",
    "cross_entropy",
    "distillation",
    "dpo",
    "label_log_probs",
    "load_balancing",
    "policy_gradient",
    "reward_model",
    "value_loss",
]
