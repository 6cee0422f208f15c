"""The work of a vision tower, per patch."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.core.glimpse import glimpse
from evenstep.core.model.config import ModelConfig
from evenstep.core.model.work import Work
from evenstep.core.validate import whole_number
from evenstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tower:
    """gated: three feed-forward matrices; merges: patches are merged before they leave."""

    gated: bool = False
    merges: bool = False


def _each(tower: _Tower, names: str) -> dict[str, _Tower]:
    return dict.fromkeys(names.split(), tower)


TOWERS: dict[str, _Tower] = {
    **_each(_Tower(), "clip_vision_model siglip_vision_model idefics3_vision smolvlm_vision"),
    **_each(_Tower(), "idefics3 smolvlm internvl_vision"),
    **_each(_Tower(gated=True), "pixtral"),
    **_each(_Tower(merges=True), "qwen2_vl qwen2_vl_vision qwen3_vl qwen3_vl_vision"),
    **_each(_Tower(merges=True), "qwen3_vl_moe qwen3_vl_moe_vision qwen3_omni_moe_vision_encoder"),
    **_each(_Tower(merges=True), "qwen3_5 qwen3_5_vision qwen3_5_moe qwen3_5_moe_vision"),
    **_each(_Tower(merges=True, gated=True), "qwen2_5_vl qwen2_5_vl_vision"),
    **_each(_Tower(merges=True, gated=True), "qwen2_5_omni_vision_encoder"),
}


def vision_work(config: ModelConfig) -> Work:
    """The work of the patch embedding, of all layers, and of a merger inside the tower.

    Patches attend to all patches of their image. A class token and a projector outside the tower
    are not counted.

    >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    >>> patches = {"num_attention_heads": 2, "patch_size": 2}
    >>> tower = {"model_type": "siglip_vision_model", **sizes, **patches}
    >>> vision_work(ModelConfig(tower, "a dict"))
    Work(weights=608, pairs=16, nearby=0)
    """
    if config.model_type not in TOWERS:
        raise ConfigError(
            f"the vision tower of model_type {glimpse(config.model_type)} is not known. Give its "
            f"shape to Cost.of_model with causal=False."
        )
    tower = TOWERS[config.model_type]
    layers = config.layers("num_hidden_layers", "depth")
    hidden = config.whole("embed_dim", "hidden_size")
    if config.has("intermediate_size"):
        width = config.whole("intermediate_size")
    else:
        width = hidden * config.whole("mlp_ratio")
    config.whole("num_attention_heads", "num_heads")
    matrices = 4 * hidden * hidden + (3 if tower.gated else 2) * hidden * width
    embedding = hidden * config.whole("num_channels", "in_channels", "in_chans", default=3)
    embedding *= _area(config) * config.whole("temporal_patch_size", default=1)
    weights = embedding + layers * matrices + (_mergers(config, hidden) if tower.merges else 0)
    everywhere, within = layers, 0
    if config.has("window_size"):
        everywhere = len(config.entries("fullatt_block_indexes"))
        within = (config.whole("window_size") // config.whole("patch_size")) ** 2
    pair = 2 * hidden
    return Work(
        weights=weights, pairs=everywhere * pair, nearby=(layers - everywhere) * pair * within
    )


def _area(config: ModelConfig) -> int:
    """The pixels of a patch; its size may be given as height and width."""
    size = config.fields.get("patch_size")
    if isinstance(size, list | tuple):
        sides = [whole_number(f"patch_size in {config.where}", side) for side in size]
        return sides[0] * sides[-1]
    return config.whole("patch_size") ** 2


def _mergers(config: ModelConfig, hidden: int) -> float:
    """Two matrices over 2 × 2 patches, as work per patch; deep features have mergers too."""
    patches = config.whole("spatial_merge_size") ** 2
    name = "hidden_size" if config.has("embed_dim") else "out_hidden_size"
    wide, out = hidden * patches, config.whole(name)
    mergers = 1 + len(config.entries("deepstack_visual_indexes"))
    return mergers * (wide * wide + wide * out) / patches
