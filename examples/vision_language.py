"""A vision-language batch: images and text packed, patches bounded and evened out over ranks.

    python examples/vision_language.py        10 seconds on two cores

Samples are text with images of several sizes, for a tiny Qwen2.5-VL with random weights. The
recipe bounds the tokens and the patches of a micro-batch, and `second_work` evens out the patches
that the vision tower of each rank sees. The gradient of the packed step is compared with that of
samples one by one, called as the model's own documentation says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from evenstep import Limits, Packed, PlannedStream, Recipe, SecondWork, Steps, Topology, make_plan
from evenstep.data import InMemory
from evenstep.tensors import Collator, Extra, cross_entropy
from evenstep.train import Runner

IMAGE, START, END, VOCAB = 500, 502, 503, 512
PATCH = 3 * 2 * 4 * 4  # values of a patch: colours, frames, height, width
COLLATE = Collator(
    extras={  # named as the model's forward names them
        "pixel_values": Extra(aligned="ragged", shape=(PATCH,)),
        "image_grid_thw": Extra(aligned="ragged", shape=(3,), dtype=torch.int64),
    }
)


def tiny_qwen() -> Any:
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "window_size": 16,
    }
    special = {"image_token_id": IMAGE, "video_token_id": 501}
    special |= {"vision_start_token_id": START, "vision_end_token_id": END}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    return Qwen2_5_VLForConditionalGeneration(config)


def made_sample(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Text, two thirds of it after an image of height x width patches, four to a token."""
    words = rng.integers(5, IMAGE, rng.integers(5, 60)).tolist()
    height, width = (2 * rng.integers(1, 9, 2)).tolist() if rng.random() < 0.67 else (0, 0)
    image = [START, *[IMAGE] * (height * width // 4), END] if height else []
    return {
        "input_ids": torch.tensor(image + words),
        "pixel_values": torch.from_numpy(rng.normal(size=(height * width, PATCH))).float(),
        "image_grid_thw": torch.tensor([[1, height, width]] if height else []).reshape(-1, 3),
    }


def one_by_one(model: Any, samples: list[dict[str, torch.Tensor]]) -> int:
    """Leave the gradient of the sum over labels in .grad; returns the number of labels."""
    for sample in samples:
        ids = sample["input_ids"][None]
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
        if len(sample["image_grid_thw"]):
            inputs |= {name: sample[name] for name in COLLATE.extras}
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
    return sum(len(sample["input_ids"]) - 1 for sample in samples)


def main() -> None:
    rng = np.random.default_rng(0)
    samples = [made_sample(rng) for _ in range(32)]
    lengths = [len(sample["input_ids"]) for sample in samples]
    patches = [len(sample["pixel_values"]) for sample in samples]

    plans = {}
    bounds: dict[str, Any] = {"layout": Packed(max_tokens=256), "topology": Topology(dp=4)}
    for name, recipe in {
        "tokens only": Recipe(**bounds),
        "tokens and patches": Recipe(
            **bounds,
            limits=Limits(columns={"patches": 256}),
            second_work=SecondWork(column="patches"),
        ),
    }.items():
        plans[name] = make_plan(lengths, recipe, columns=dict.fromkeys(recipe.columns, patches))
    print(f"{len(samples)} samples, 4 ranks        patches of each rank   most in a micro-batch")
    for name, plan in plans.items():
        held = [[sum(patches[s] for s in m.segments.sample) for m in rank] for rank in plan[0]]
        print(f"{name:22}  {[sum(rank) for rank in held]!s:>27}   {max(map(max, held)):22}")

    # On one rank, to compare the gradient.
    recipe = Recipe(
        layout=Packed(max_tokens=256),
        limits=Limits(columns={"patches": 256}),
        steps=Steps(samples=len(samples)),
    )
    stream = PlannedStream(InMemory(samples), recipe, columns={"patches": patches})
    model = tiny_qwen()
    result = Runner(model=model, loss=cross_entropy(), collate=COLLATE).run(next(iter(stream)))
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    labels = one_by_one(model, samples)
    alone = {name: p.grad / labels for name, p in model.named_parameters()}
    apart = max(float((packed[name] - alone[name]).abs().max()) for name in alone)
    largest = max(float(gradient.abs().max()) for gradient in alone.values())
    print(f"one packed step: {result}")
    print(f"{len(samples)} samples one by one: gradients differ by {apart:.1e}, of {largest:.1e}")


if __name__ == "__main__":
    main()
