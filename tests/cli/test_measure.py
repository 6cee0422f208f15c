"""`evenstep tune --measure`: prediction and measurement of a budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.cli import main
from tests.internals import ModelConfig, ModelSize, described_budget, measure_budget

TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


class Meter:
    """A device that counts the slots of the largest logits."""

    most = 0

    def total(self) -> float:
        return 1.6e6

    def restart(self) -> None:
        self.most = 0

    def peak(self) -> float:
        return 1e6 + 100.0 * self.most


@pytest.mark.parametrize("checkpointing", [False, True])
def test_prediction_and_measurement_are_told(
    monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    meter, forward = Meter(), transformers.LlamaForCausalLM.forward

    def counting(model: Any, **inputs: Any) -> Any:
        meter.most = max(meter.most, inputs["input_ids"].numel())
        return forward(model, **inputs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", counting)
    config = ModelConfig(TINY, "tiny")
    lengths = np.array([50, 7])
    found = measure_budget(config, lengths, checkpointing, device="cpu", meter=meter)
    assert found.max_tokens == int(0.96 * 6_000)
    assert not torch.distributed.is_initialized()
    text = described_budget(found, ModelSize.of(config), checkpointing)
    assert "measured 5,760 slots" in text
    assert "predicted" in text


def test_measuring_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "lengths.npy", np.full(20, 100))
    where = ["tune", str(tmp_path / "lengths.npy"), "--model", "qwen3-0.6b", "--gpu", "h200"]
    ranks = ["--ranks", "1", "--steps", "1", "--measure"]
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([*where, *ranks]) == 2
    assert "--measure needs a GPU, but torch finds none." in capsys.readouterr().err
