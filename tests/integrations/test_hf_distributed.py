"""Hugging Face models on two ranks, without a forward of one's own."""

from pathlib import Path

import pytest
import torch

from evenstep.train import compute_log_probs
from tests.integrations import hf_on_ranks
from tests.integrations.hf_on_ranks import LENGTHS, UNEVEN
from tests.integrations.hf_steps import furthest, gradient_alone
from tests.integrations.models import llama
from tests.tensors.batches import RECIPES, samples_of
from tests.train.processes import results_of

torch.set_num_threads(1)


@pytest.mark.slow
def test_every_framework_has_the_gradient_of_samples_one_at_a_time(tmp_path: Path) -> None:
    expected = gradient_alone(llama("sdpa"), LENGTHS)
    scores = compute_log_probs(llama("sdpa"), samples_of(LENGTHS), RECIPES["one by one"])
    for rank in results_of(2, hf_on_ranks.steps_and_scores, tmp_path):
        for name in ("plain", "ddp", "fsdp"):
            assert furthest(rank[name], expected) <= 1e-6, name
            for found, score in zip(rank[f"{name} scores"], scores, strict=True):
                assert found == pytest.approx(score.tolist(), abs=1e-5)


@pytest.mark.slow
def test_sharded_ranks_judge_a_model_together(tmp_path: Path) -> None:
    expected = gradient_alone(llama("sdpa"), UNEVEN)
    for found in results_of(2, hf_on_ranks.first_batch_packed_on_one_rank, tmp_path):
        assert furthest(found, expected) <= 1e-6
