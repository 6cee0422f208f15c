"""The weights of a Hugging Face model: all of them, or an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from evenstep import EvenstepError
from evenstep.config import ModelSettings
from evenstep.trainer import train
from tests.trainer.runs import losses, settings, texts

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def saved(folder: Path) -> LlamaForCausalLM:
    """A model whose first loss is not that of random weights."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=2, **SIZES))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return model


def to_bin(folder: Path, shards: int = 1) -> None:
    """Replace model.safetensors by what `torch.save` writes, in one file or several."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    names = list(weights)
    files = {name: f"pytorch_model-{at % shards:05d}.bin" for at, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: weights[name] for name in names if files[name] == file}
        torch.save(part, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def first_loss(tmp_path: Path, folder: Path, out: str) -> float:
    model = ModelSettings(path=str(folder))
    run = settings(tmp_path / out, texts(tmp_path), model=model, stream={"max_num_steps": 1})
    train(run)
    return float(losses(tmp_path / out)[0])


def test_weights_of_torch_are_those_of_safetensors(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    expected = first_loss(tmp_path, tmp_path / "model", "safetensors")
    for shards in (1, 2):
        saved(tmp_path / f"bin-{shards}")
        to_bin(tmp_path / f"bin-{shards}", shards)

        assert first_loss(tmp_path, tmp_path / f"bin-{shards}", f"run-{shards}") == expected


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return edit


def _as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Path("any object")}, folder / "pytorch_model.bin")


def _cut(name: str, share: float = 0.5) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        if name.endswith(".bin"):
            to_bin(folder)
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return cut


def _without_shard(folder: Path) -> None:
    to_bin(folder, shards=2)
    (folder / "pytorch_model-00001.bin").unlink()


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "config.json for random weights"),
        (_edit(lambda weights: weights.pop(NORM)), f"lack {NORM}"),
        (
            _edit(lambda weights: weights.update(extra=torch.ones(2))),
            "have extra, which LlamaForCausalLM does not have",
        ),
        (
            _edit(lambda weights: weights.update({HEAD: torch.ones(99, 32)})),
            r"lm_head.weight with shape \(99, 32\), expected \(256, 32\)",
        ),
        (
            _edit(lambda weights: [weights.pop(name) for name in list(weights) if "0" in name]),
            "and 6 more",
        ),
        (_as_pickle, "save it as safetensors"),
        (_cut("model.safetensors"), "cannot be read"),
        (_cut("pytorch_model.bin"), "cannot be read"),
        (_cut("pytorch_model.bin", 0.0), "the weights in .* cannot be read"),
        (_cut("pytorch_model.bin", 0.99), "the weights in .* cannot be read"),
        (_without_shard, "the weights in .* cannot be read .*pytorch_model-00001.bin"),
        (shutil.rmtree, "model does not exist"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(
    tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    saved(tmp_path / "model")
    change(tmp_path / "model")

    with pytest.raises(EvenstepError, match=says) as caught:
        first_loss(tmp_path, tmp_path / "model", "run")

    assert "\n" not in str(caught.value)


def test_constants_that_earlier_versions_stored_are_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    expected = first_loss(tmp_path, folder, "before")

    def add(weights: dict[str, Any]) -> None:
        for layer in ("transformer.h.0", "transformer.h.1"):
            weights[f"{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
            weights[f"{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    _edit(add)(folder)
    assert first_loss(tmp_path, folder, "after") == expected
    _edit(lambda weights: weights.update({"transformer.h.0.attn.gate": torch.ones(1)}))(folder)
    with pytest.raises(EvenstepError, match=r"have transformer.h.0.attn.gate, which GPT2LMHead"):
        first_loss(tmp_path, folder, "gate")


def test_a_config_alone_gives_random_weights(tmp_path: Path) -> None:
    saved(tmp_path / "model")

    loss = first_loss(tmp_path, tmp_path / "model" / "config.json", "run")

    assert abs(loss - torch.log(torch.tensor(256.0)).item()) < 0.1
