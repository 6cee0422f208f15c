"""Gradients of a tiny model: packed and padded, compared with one sample at a time.

The reference runs `model(input_ids=...)` on each sample, with eager attention where the class has
it, and sums the loss over all labels. Two errors are measured, in single and in double precision:
`norm_error` over the whole gradient, and the stricter `error_of`, which decides whether a layout is
exact: the largest difference in the gradient of a parameter, divided by the largest entry of its
reference, or by `LEAST` of the largest entry of any parameter if that is more (gradients that are
zero but for rounding have no scale of their own); the largest of all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from evenstep import Packed, Padded, Plan, Recipe, make_plan
from evenstep.errors import ConfigError
from evenstep.integrations.hf_attention import register_attention
from evenstep.integrations.huggingface import hf_kwargs, supports_packing
from evenstep.tensors import Batch, Collator, Extra
from tests.slow.images import Image, NoImageError, image_of
from tests.slow.kinds import Kind
from tests.slow.sizes import WINDOW
from tests.slow.tiny_configs import TOKENS, tiny_config

LENGTHS = (5, 23, 12)
"""Beyond every window and chunk of a tiny config."""
LAYOUTS = ("packed", "packed with a tail", "padded")
LIMIT = 1e-6
LEAST = 0.1
MOST = 1e-4
"""Of rounding in single precision. What leaks moves gradients by 0.01 and more."""
IMPLEMENTATIONS = ("eager", "sdpa", "evenstep")

register_attention()

Gradients: TypeAlias = dict[str, Tensor]


def made(kind: Kind, implementation: str | None, dtype: torch.dtype, window: int = WINDOW) -> Any:
    """The model with random weights, the same for every implementation and dtype.

    All parameters are random, including those that models set to zero or one: a gate or a sink of
    zero would hide what passes through it.
    """
    model_class = kind.model_class
    torch.manual_seed(0)
    config = tiny_config(model_class.config_class, window)
    # The grouped matrix products of experts have no double precision.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = model_class._from_config(config, attn_implementation=implementation, **experts)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim < 2:
                parameter += 0.1 * noise
            else:
                inputs = math.prod(parameter.shape[1 if parameter.ndim > 3 else -1 :])
                parameter.copy_(noise / inputs**0.5)
    return model.eval().to(dtype).requires_grad_()


def samples_of(image: Image | None = None) -> list[dict[str, Tensor]]:
    """Samples of `LENGTHS` tokens; after the third token of all but the first, an image."""
    random = torch.Generator().manual_seed(2)
    found: list[dict[str, Tensor]] = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(TOKENS.start, TOKENS.stop, (length,), generator=random)
        if image is not None and number > 0:
            tokens = torch.cat([tokens[:3], torch.tensor(image.tokens), tokens[3:]])
        found.append({"input_ids": tokens})
        if image is not None:
            found[-1] |= {name: t if number else t[:0] for name, t in image.tensors.items()}
            found[-1] |= image.marks(tokens)
    return found


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss, summed over labels that count."""
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def gradients_of(model: Any, losses: Iterable[Tensor]) -> Gradients:
    """The gradient of the sum of these losses, each of which is computed after the one before."""
    model.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def reference(model: Any, image: Image | None) -> Gradients:
    """The gradient, one sample at a time."""

    def losses() -> Iterator[Tensor]:
        for sample in samples_of(image):
            tokens = sample["input_ids"]
            given = {n: t[None] if image and n in image.types else t for n, t in sample.items()}
            given = {n: _cast(t, model.dtype) for n, t in given.items() if len(t)}
            given |= {"input_ids": tokens[None], "use_cache": False}
            if image is not None:  # as processors give it; Qwen2.5-Omni needs it for its positions
                given["attention_mask"] = torch.ones_like(tokens[None])
            logits = model(**given).logits
            yield summed(logits[:, :-1], tokens[None, 1:])

    return gradients_of(model, losses())


def batches_of(layout: str, image: Image | None, dtype: torch.dtype) -> list[Batch]:
    """The micro-batches of the samples."""
    samples = samples_of(image)
    plan = plan_of(layout, tuple(len(sample["input_ids"]) for sample in samples))
    collate = collator_of(image, dtype)
    return [collate(micro, samples) for micro in plan[0, 0]]


def collator_of(image: Image | None, dtype: torch.dtype) -> Collator:
    """A collator for samples with such images."""
    if image is None:
        return Collator()
    ragged = {
        name: Extra(aligned="ragged", dtype=_cast(each, dtype).dtype, shape=tuple(each.shape[1:]))
        for name, each in image.tensors.items()
    }
    return Collator(
        extras=ragged | {name: Extra(aligned="token", dtype=torch.int64) for name in image.types}
    )


@cache
def plan_of(layout: str, lengths: tuple[int, ...]) -> Plan:
    """One micro-batch of all samples."""
    widest = -(-max(lengths) // 8) * 8
    total = -(-sum(lengths) // 8) * 8 + 8
    recipes = {
        "packed": Recipe(layout=Packed(max_tokens=sum(lengths))),
        "packed with a tail": Recipe(layout=Packed(max_tokens=total, pad_to=total)),
        "padded": Recipe(layout=Padded(max_tokens=len(lengths) * widest, pad_to=widest)),
    }
    return make_plan(list(lengths), recipes[layout])


def laid_out(model: Any, layout: str, image: Image | None) -> Gradients:
    """The gradient of packed or padded samples."""
    batches = batches_of(layout, image, model.dtype)
    return gradients_of(
        model, (summed(model(**hf_kwargs(batch, model)).logits, batch.labels) for batch in batches)
    )


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if values.is_floating_point() else values


def error_of(found: Gradients, expected: Gradients) -> float:
    """The largest relative error of a parameter; infinite if anything is not finite."""
    least = LEAST * max(float(each.abs().max()) for each in expected.values() if each.numel())
    worst = 0.0
    for name, each in expected.items():
        if each.numel():
            off = float((found[name] - each).abs().max())
            if not math.isfinite(off):
                return math.inf
            worst = max(worst, off / max(float(each.abs().max()), least))
    return worst


def rounding_of(single: Gradients, double: Gradients) -> float:
    """The error of a gradient in single precision, given the same one in double precision."""
    return error_of(single, {name: each.float() for name, each in double.items()})


def norm_error(found: Gradients, expected: Gradients) -> float:
    """The norm of the difference over the norm; infinite if anything is not finite."""
    off = sum(float((found[n].double() - each).square().sum()) for n, each in expected.items())
    whole = sum(float(each.double().square().sum()) for each in expected.values())
    return math.sqrt(off / whole) if math.isfinite(off) else math.inf


def is_exact(errors: Mapping[str, Any], rounding: float = 0.0) -> bool:
    """Whether an error is that of rounding: at most `LIMIT` in single or double precision, or four
    times the error of the reference itself in single precision."""
    found = [errors[name] for name in ("single", "double") if name in errors]
    return bool(found) and min(found) <= max(LIMIT, 4 * min(rounding, MOST))


def measure(kind: Kind) -> dict[str, Any]:
    """Errors by implementation and layout in single and double precision, and what we promise."""
    found: dict[str, Any] = {"implementations": {}}
    rounded: Gradients = {}
    for dtype in (torch.float32, torch.float64):
        try:
            model, used = _reference_model(kind, dtype)
            image = image_for(model, found)
            expected = {image: reference(model, image)}
            expected |= {None: reference(model, None)} if image is not None else {}
        except Exception as error:
            if dtype == torch.float32:
                return {"unbuildable": _said(error)}
            found["double"] = _said(error)
            return found
        if dtype == torch.float32:
            found |= _facts(model) | {"reference": used}
            rounded = expected[image]
        else:
            found["rounding"] = rounding_of(rounded, expected[image])
        for implementation in IMPLEMENTATIONS:
            into = found["implementations"].setdefault(implementation, {})
            _measure_implementation(kind, implementation, dtype, expected, into)
    return found


def _reference_model(kind: Kind, dtype: torch.dtype) -> tuple[Any, str]:
    try:
        return made(kind, "eager", dtype), "eager"
    except ValueError:
        return made(kind, None, dtype), "its own"


def image_for(model: Any, found: dict[str, Any] | None = None) -> Image | None:
    """The image for the samples; `found["image"]` says how many tokens it has or why there is
    none."""
    found = {} if found is None else found
    if not hasattr(model.config, "vision_config"):
        return None
    try:
        image = image_of(model)
    except NoImageError as error:
        found["image"] = str(error)
        return None
    found["image"] = f"{image.count} tokens"
    return image


def _facts(model: Any) -> dict[str, Any]:
    config = model.config.get_text_config()
    layers = zip(
        *(
            value
            for name in ("layer_types", "mlp_layer_types")
            if isinstance(value := getattr(config, name, None), list)
        ),
        strict=False,
    )
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "layers": [" + ".join(each) for each in layers],
        "experts": any("expert" in name for name, _ in model.named_modules()),
    }


def _measure_implementation(
    kind: Kind,
    implementation: str,
    dtype: torch.dtype,
    expected: dict[Image | None, Gradients],
    into: dict[str, Any],
) -> None:
    """`expected` has the references with an image and without; refused images are left out."""
    try:
        model = made(kind, implementation, dtype)
    except Exception as error:
        into["unavailable"] = _said(error)
        return
    if dtype == torch.float32:
        # Also with windows that short samples of a probe do not fill.
        wide = made(kind, implementation, dtype, 4096)
        promises = [supports_packing(each) for each in (model, wide)]
        into |= {"safe": promises[0].safe, "why": promises[0].why}
        into |= {"safe if wide": promises[1].safe, "why if wide": promises[1].why}
    else:
        supports_packing(model)  # its mixers run on rows from now on
    for layout in LAYOUTS:
        errors = into.setdefault(layout, {})
        for image, reference_of in expected.items():
            try:
                found = laid_out(model, layout, image)
                errors |= _errors(found, reference_of, dtype)
                break
            except ConfigError as error:
                into["images refused" if image else "refused"] = _said(error)
            except Exception as error:
                errors["failed"] = _said(error)
                break


def _errors(found: Gradients, expected: Gradients, dtype: torch.dtype) -> dict[str, float]:
    precision = "double" if dtype == torch.float64 else "single"
    norm = norm_error(found, expected)
    return {precision: error_of(found, expected), f"{precision} norm": norm}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
