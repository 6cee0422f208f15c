"""Vision-language models: packed samples with images have the results of each sample alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep import Limits, Packed, Padded, Recipe, make_plan
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.huggingface import hf_forward, hf_kwargs, supports_packing
from evenstep.tensors import Batch, cross_entropy
from evenstep.testing import find_leaks
from evenstep.train import Runner
from tests.integrations.hf_steps import furthest
from tests.integrations.vision import (
    COLLATE,
    END,
    IMAGE,
    START,
    VIDEO,
    VISION,
    alone,
    patches_of,
    vision_model,
    vision_samples,
)
from tests.internals import Layout
from tests.slow.images import image_of
from tests.slow.kinds import kind_of
from tests.slow.measure import error_of, laid_out, made, reference
from tests.tensors.batches import by_sample, distance

torch.set_num_threads(1)

IMAGES = [[(4, 6)], [], [(2, 2), (8, 4)], [(6, 4)], [(4, 4)], []]
PACKED = Packed(max_tokens=48)
KINDS = sorted(VISION)


def planned(samples: list[dict[str, Tensor]], layout: Layout, most: int = 64) -> list[Batch]:
    """Batches of at most `most` patches."""
    recipe = Recipe(layout=layout, limits=Limits(columns={"patches": most}))
    lengths = [len(sample["input_ids"]) for sample in samples]
    plan = make_plan(lengths, recipe, columns={"patches": patches_of(samples)})
    return [COLLATE(micro, samples) for micro in plan[0, 0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_packed_and_padded_logits_are_those_of_each_sample_alone(
    kind: str, implementation: str
) -> None:
    model, samples = vision_model(kind, implementation), vision_samples(IMAGES)
    assert supports_packing(model).safe
    forward = hf_forward(model)
    for layout in (PACKED, Packed(max_tokens=64, pad_to=64), Padded(max_tokens=96)):
        batches = planned(samples, layout)
        assert any(len(batch.sample_ids) > 1 for batch in batches)
        for batch in batches:
            for sample, found in by_sample(batch, forward(model, batch)).items():
                assert distance(found, alone(model, samples[sample])) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_packed_step_is_that_of_samples_one_at_a_time(kind: str) -> None:
    model, samples = vision_model(kind), vision_samples(IMAGES)
    batches = planned(samples, PACKED, most=48)
    held = [len(batch.extras["pixel_values"].values) for batch in batches]
    assert max(held) <= 48
    assert len(batches) > 1
    result = Runner(model=model, loss=cross_entropy()).run(batches)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total = 0
    for sample in samples:
        logits, labels = alone(model, sample)[:-1], sample["input_ids"][1:]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        total += len(labels)
    assert result.numbers is not None
    assert result.numbers.denominators == {"loss_tokens": total}
    used = {name: p.grad / total for name, p in model.named_parameters() if p.grad is not None}
    assert used.keys() == found.keys()
    assert any("visual" in name for name in used)
    assert furthest(found, used) <= 1e-5


def test_planes_restart_with_each_segment_and_follow_its_images() -> None:
    model = vision_model("Qwen2_5_VL")
    samples = vision_samples([[(4, 4)], [], [(2, 4)]])
    (batch,) = planned(samples, Packed(max_tokens=64, pad_to=64))
    planes = hf_kwargs(batch, model)["position_ids"]
    assert planes.shape == (4, 1, 64)
    for sample, found in by_sample(batch, planes.permute(1, 2, 0)).items():
        tokens = samples[sample]["input_ids"]
        assert found[:, 0].tolist() == list(range(len(tokens)))
        grid = samples[sample]["image_grid_thw"]
        expected = torch.arange(len(tokens)).expand(3, -1)
        if len(grid):
            types = (tokens[None] == IMAGE).int()
            expected = model.model.get_rope_index(tokens[None], types, image_grid_thw=grid)[0][:, 0]
        assert torch.equal(found[:, 1:].T, expected)


def test_images_come_in_the_order_of_their_tokens_and_none_are_left_out() -> None:
    samples = vision_samples(IMAGES)
    model = vision_model("Qwen2_5_VL")
    for batch in planned(samples, PACKED):
        kwargs = hf_kwargs(batch, model)
        ids = [i for i in batch.sample_ids.tolist() if i >= 0]
        expected = torch.cat([samples[i]["pixel_values"] for i in ids])
        if not len(expected):
            assert "pixel_values" not in kwargs
            continue
        assert torch.equal(kwargs["pixel_values"], expected)
        assert "cu_seq_lens_q" not in kwargs  # the vision tower would take them for its own


def test_no_segment_affects_another_and_lengths_make_no_difference() -> None:
    model = vision_model("Qwen2_5_VL")
    (batch,) = planned(vision_samples([[(4, 4)], [], [(2, 4)]]), Packed(max_tokens=64))
    forward = hf_forward(model)
    media = (IMAGE, VIDEO, START, END)
    found = find_leaks(
        lambda batch: forward(model, batch), batch, module=model, keep_tokens=media, gradients=False
    )
    assert found == []


def test_two_dimensional_positions_leak_which_is_why_there_are_planes() -> None:
    model = vision_model("Qwen2_5_VL")
    (batch,) = planned(vision_samples([[], [], []]), Packed(max_tokens=64))

    def flat(batch: Batch) -> Tensor:
        kwargs: dict[str, Any] = hf_kwargs(batch, model)
        return model(**kwargs | {"position_ids": kwargs["position_ids"][0]}).logits

    assert find_leaks(flat, batch, module=model, gradients=False) != []


def test_vision_inputs_need_the_model_and_whole_samples() -> None:
    samples, model = vision_samples([[(4, 6)], []]), vision_model("Qwen2_5_VL")
    (batch,) = planned(samples, Packed(max_tokens=64))
    with pytest.raises(ConfigError, match=r"hf_kwargs\(batch, model\)"):
        hf_kwargs(batch)
    recipe = Recipe(layout=Packed(max_tokens=6), overflow="split")
    plan = make_plan([len(sample["input_ids"]) for sample in samples], recipe)
    with pytest.raises(InputError, match="was split"):
        hf_kwargs(COLLATE(plan[0, 0][0], samples), model)


@pytest.mark.parametrize("name", ["mistral3", "lighton_ocr"])
def test_towers_that_build_a_mask_of_patches_are_exact_or_refused(name: str) -> None:
    model = made(kind_of(name), "sdpa", torch.float64)
    image = image_of(model)
    assert error_of(laid_out(model, "packed", image), reference(model, image)) <= 1e-6
    ours = made(kind_of(name), "evenstep", torch.float64)
    assert error_of(laid_out(ours, "packed", None), reference(model, None)) <= 1e-6
    with pytest.raises(ConfigError, match="takes a 2-D padding mask or none, got Tensor of shape"):
        laid_out(ours, "packed", image)
