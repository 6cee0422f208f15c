"""Tiny vision-language models with random weights, and samples with images of several sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from evenstep.tensors import Collator, Extra

IMAGE, VIDEO, START, END = 57, 58, 59, 60
VOCAB = 61
PATCH = 4
CHANNELS = 3
DIM = CHANNELS * 2 * PATCH * PATCH  # two frames of one patch

EXTRAS = {
    "pixel_values": Extra(aligned="ragged", shape=(DIM,)),
    "image_grid_thw": Extra(aligned="ragged", dtype=torch.int64, shape=(3,)),
}
COLLATE = Collator(extras=EXTRAS)

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0},
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
VISION: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": PATCH,
        "window_size": 2 * 2 * PATCH,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.2,
    },
    "Qwen2VL": {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
    },
    "Glm4v": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": PATCH,
        "image_size": 16 * PATCH,
    },
}


def vision_model(kind: str, implementation: str = "sdpa") -> Any:
    """A vision-language model of transformers, ready to evaluate."""
    torch.manual_seed(0)
    text = dict(TEXT)
    if kind == "Glm4v":
        text["head_dim"] = 8
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=VISION[kind], **TOKENS
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")
    return model._from_config(config, attn_implementation=implementation).eval()


def vision_samples(images: list[list[tuple[int, int]]], seed: int = 0) -> list[dict[str, Tensor]]:
    """One sample per entry: text with images of (height, width) patches between."""
    random = torch.Generator().manual_seed(seed)
    return [_sample(sizes, random) for sizes in images]


def _sample(sizes: list[tuple[int, int]], random: torch.Generator) -> dict[str, Tensor]:
    def text() -> list[int]:
        count = int(torch.randint(1, 6, (), generator=random))
        return list(torch.randint(5, IMAGE, (count,), generator=random).tolist())

    tokens = text()
    for height, width in sizes:
        tokens += [START, *[IMAGE] * (height * width // 4), END, *text()]
    patches = sum(height * width for height, width in sizes)
    return {
        "input_ids": torch.tensor(tokens),
        "pixel_values": torch.randn(patches, DIM, generator=random),
        "image_grid_thw": torch.tensor([(1, h, w) for h, w in sizes]).reshape(-1, 3),
    }


def patches_of(samples: list[dict[str, Tensor]]) -> list[int]:
    return [len(sample["pixel_values"]) for sample in samples]


def alone(model: Any, sample: dict[str, Tensor]) -> Tensor:
    """The logits of one sample, called as the model's documentation says."""
    tokens = sample["input_ids"][None]
    kwargs: dict[str, Any] = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int()}
    if len(sample["image_grid_thw"]):
        kwargs |= {name: sample[name] for name in EXTRAS}
    logits: Tensor = model(**kwargs, use_cache=False).logits[0]
    return logits
