"""Classes that the survey cannot measure, by their first type, and why."""

from __future__ import annotations

_IMAGES = "its forward has no text without an image, which it takes in a way of its own"
_ENCODER = "an encoder-decoder: its samples are pairs, which packing does not lay out"
_TIMM = "its vision tower needs timm"

UNBUILT: dict[str, str] = {
    "blip": _IMAGES,
    "blip-2": _IMAGES,
    "diffusion_gemma": "generates blocks by diffusion: its logits are not those of next tokens",
    "fast_vlm": _TIMM,
    "florence2": _ENCODER,
    "gemma3n": f"{_TIMM}; its language model is gemma3n_text",
    "gemma4_assistant": "drafts for another model, whose keys and values it takes",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it takes",
    "granite4_vision": "its vision tower needs a width of 64 and more per head",
    "idefics": _IMAGES,
    "inkling_mm_model": "its vision tower needs scipy; its language model is inkling_text",
    "instructblip": _IMAGES,
    "instructblipvideo": _IMAGES,
    "kosmos-2": _IMAGES,
    "musicgen": "predicts several audio codes per step, not one token",
    "musicgen_melody": "predicts several audio codes per step, not one token",
    "perception_lm": _TIMM,
    "pi0": "predicts actions of a robot, not tokens",
    "pix2struct": _ENCODER,
    "pp_formulanet": _ENCODER,
    "reformer": "refuses to compute gradients in evaluation mode, and hashes at random in training",
    "t5gemma2": _ENCODER,
    "udop": _ENCODER,
    "vision-encoder-decoder": _ENCODER,
}
