"""A small image for a vision-language model: what its forward takes, and its tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_COUNTS = re.compile(r"tokens?\D*(\d+)\D+features?\D*(\d+)", re.IGNORECASE)
MOST = 20
"""Placeholder tokens of an image, so that samples stay within learned positions."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One image: a placeholder token, how many of them, and its tensors, which have one entry each
    or one per patch."""

    token: int
    count: int
    tensors: dict[str, Tensor]
    types: tuple[str, ...]
    """Arguments that mark which tokens stand for an image."""
    around: tuple[int, ...] = ()
    """The tokens before and after an image, or none."""

    @property
    def tokens(self) -> list[int]:
        """The tokens in place of the image."""
        return [*self.around[:1], *[self.token] * self.count, *self.around[1:]]

    def marks(self, tokens: Tensor) -> dict[str, Tensor]:
        """Those arguments for these tokens."""
        return {name: (tokens == self.token).long() for name in self.types}


class NoImageError(Exception):
    """No image of this module fits the model."""


def image_of(model: Any) -> Image:
    """An image of 4 x 4 patches for this model: the first that it takes and that changes logits."""
    config = model.config
    taken = inspect.signature(model.forward).parameters
    names = ("image_token_id", "image_token_index", "image_patch_id")
    token = next((t for name in names if (t := getattr(config, name, None)) is not None), None)
    if token is None or "pixel_values" not in taken:
        raise NoImageError("it has no image token, or takes images in another way")
    types = tuple(name for name in ("mm_token_type_ids", "token_type_ids") if name in taken)
    ends = (getattr(config, f"vision_{end}_token_id", None) for end in ("start", "end"))
    around = tuple(each for each in ends if each is not None)
    why = ""
    for tensors in _candidates(getattr(config, "vision_config", config), taken):
        image = Image(token, 1, tensors, types, around)
        try:
            image = Image(token, _count(model, image), tensors, types, around)
            if image.count <= MOST and _changes(model, image):
                return image
        except Exception as error:
            why = " ".join(str(error).split())[:120]
    raise NoImageError(f"its images need its processor ({why})")


def _candidates(vision: Any, taken: Any) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    patch: int = getattr(vision, "patch_size", 4)
    channels: int = getattr(vision, "in_channels", 0) or getattr(vision, "num_channels", 3)
    sized = getattr(vision, "image_size", None) or 16
    size = tuple(sized) if isinstance(sized, (list, tuple)) else (sized, sized)
    if "image_grid_thw" in taken:
        grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
        frames: int = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        for shape in [(channels * frames * patch**2,), (channels, patch, patch)]:
            yield {"pixel_values": torch.randn(16, *shape, generator=random), **grid}
        return
    pixels = torch.randn(1, channels, *size, generator=random)
    yield {"pixel_values": pixels}
    if "image_sizes" in taken:
        yield {"pixel_values": pixels, "image_sizes": torch.tensor([size])}
        tiles = torch.randn(1, 2, channels, *size, generator=random)
        yield {"pixel_values": tiles, "image_sizes": torch.tensor([size])}


def _run(model: Any, image: Image, tensors: dict[str, Tensor]) -> Tensor:
    tokens = torch.tensor([[5, 6, *image.tokens, 7, 8]])
    given = {n: t.to(model.dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **given, **image.marks(tokens)).logits


def _count(model: Any, image: Image) -> int:
    """The number of placeholder tokens, which transformers names where one is wrong."""
    try:
        _run(model, image, image.tensors)
    except (ValueError, RuntimeError) as error:
        found = _COUNTS.findall(str(error))
        if not found:
            raise
        features = int(found[-1][1])  # or the number of their values
        width = model.config.get_text_config().hidden_size
        return features // width if features % width == 0 else features
    return 1


def _changes(model: Any, image: Image) -> bool:
    other = {n: t + 1 if t.is_floating_point() else t for n, t in image.tensors.items()}
    return not torch.allclose(_run(model, image, image.tensors), _run(model, image, other))
