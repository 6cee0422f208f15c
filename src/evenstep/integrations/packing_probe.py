"""The probe: a few small forwards that compare packed samples with each sample alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from evenstep.core.layout import Packed
from evenstep.core.recipe import Recipe
from evenstep.errors import EvenstepError
from evenstep.integrations.hf_kwargs import hf_kwargs
from evenstep.integrations.hf_model import core_of, traits_of
from evenstep.integrations.packing_code import implementation_of
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch
from evenstep.tensors.collate import Collator

_LENGTHS = (5, 9, 4)
_TAIL = 3
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def can_probe(model: Any) -> bool:
    """Whether small forwards can run: parameters exist, and where flash attention can be used."""
    devices = {parameter.device.type for parameter in model.parameters()}
    flash = "flash" in implementation_of(model)
    return bool(devices) and "meta" not in devices and not (flash and devices == {"cpu"})


def probe_packing(model: Any) -> str | None:
    """Why packed outputs of the model depend on neighbours or differ from each sample alone; None
    if they do not.

    Runs the model in evaluation mode, without gradients, on a few short samples; random numbers,
    training mode and gradients are as before. With fully_shard, call it on all ranks.
    """
    with _undisturbed(model):
        try:
            return _Probe(model).reason()
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            return f"a small packed forward raised {type(error).__name__}: {first}"


class _Probe:
    def __init__(self, model: Any) -> None:
        self.model, self.traits = model, traits_of(model)
        core = core_of(model)
        parameter = next(model.parameters())
        self.device = parameter.device
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        self.half = half = half or torch.is_autocast_enabled(self.device.type)
        # Of the largest output. Neighbours of the same lengths leave the shapes of all operations
        # as they are, so nothing is rounded differently.
        self.exact = 1e-2 if half else 1e-5
        self.close = 6e-2 if half else 1e-3 if self.device.type == "cuda" else 1e-4
        vocab = core.get_input_embeddings().weight.shape[0]
        plain = (token for token in range(vocab) if token not in self.traits.special)
        self.tokens = torch.tensor(list(islice(plain, 1, 62)))
        longest = max(_LENGTHS) if self.traits.rope_limit is None else self.traits.rope_limit.tokens
        self.lengths = [max(1, min(length, longest - 1)) for length in _LENGTHS]
        self.random = torch.Generator().manual_seed(0)

    def reason(self) -> str | None:
        samples = [self._sample(length) for length in self.lengths]
        # Images come without `cu_seq_lens`; see `hf_kwargs`.
        for with_boundaries in (True, False) if self.traits.has_tower else (True,):
            base = self._packed(samples, with_boundaries)
            found = self._neighbours(samples, base, with_boundaries)
            found = found or self._compare_alone(samples, base)
            if found is not None:
                return found
        if self.traits.rope_indexer is not None:
            found = self._still_positions(samples)
            if found is not None:
                return found
        return self._both_ways() if self.traits.has_tower or any(self.traits.media) else None

    def _neighbours(
        self, samples: list[Tensor], base: list[Tensor], with_boundaries: bool
    ) -> str | None:
        """Change the tokens of one sample, then of the other two."""
        for changed in ((1,), (0, 2)):
            others = [self._sample(len(s)) if k in changed else s for k, s in enumerate(samples)]
            found = self._packed(others, with_boundaries)
            kept = [k for k in range(len(samples)) if k not in changed]
            moved = self._distance([found[k] for k in kept], [base[k] for k in kept])
            if not moved <= self.exact:
                return f"packed segments affect each other (outputs moved by {moved:.1e})"
        return None

    def _compare_alone(self, samples: list[Tensor], base: list[Tensor]) -> str | None:
        alone = [self._run({"input_ids": s[None].to(self.device)})[0] for s in samples]
        moved = self._distance(base, alone)
        if not moved <= self.close:
            return f"packed outputs differ from those of each sample alone (by {moved:.1e})"
        return None

    def _still_positions(self, samples: list[Tensor]) -> str | None:
        """Positions that stand still, as in an image, must not be taken for boundaries."""
        lengths = [len(sample) for sample in samples]
        planes = hf_kwargs(_row(samples).to(self.device), self.model)["position_ids"].clone()
        first, text = lengths[0], int(self.traits.text_plane)
        planes[text:, :, first + 1 : first + 4] = 1
        base = self._packed(samples, False, planes)
        alone = []
        for tokens, at in zip(samples, planes.split([*lengths, _TAIL], -1), strict=False):
            inputs = tokens[None].to(self.device)
            mask = torch.ones_like(inputs)  # which switches the search for boundaries off
            given = {"input_ids": inputs, "position_ids": at, "attention_mask": mask}
            alone.append(self._run(given)[0])
        moved = self._distance(base, alone)
        if not moved <= self.close:
            return f"it takes the positions of images for boundaries (outputs moved by {moved:.1e})"
        return None

    def _distance(self, found: list[Tensor], expected: list[Tensor]) -> float:
        """The largest difference, relative to the largest value. In half precision the largest
        median of a sample: rounding may send single tokens to other experts."""
        scale = max(float(e.abs().max()) for e in expected) or 1.0
        differences = [(f - e).abs().amax(-1) for f, e in zip(found, expected, strict=True)]
        return max(float(d.median() if self.half else d.max()) for d in differences) / scale

    def _both_ways(self) -> str | None:
        """Whether a token sees later ones of its own kind, as in an image or a prefix."""
        first = self._sample(6)
        last = first.clone()
        last[-1] = self.tokens[(self.tokens == first[-1]).nonzero()[0, 0] - 1]
        for name in ("token_type_ids", "mm_token_type_ids"):
            for kind in (0, 1) if name in self.traits.parameters else ():
                types = {name: torch.full((1, 6), kind, device=self.device)}
                try:
                    before, after = (
                        self._run({"input_ids": tokens[None].to(self.device), **types})[0, :-1]
                        for tokens in (first, last)
                    )
                except EvenstepError as error:  # our attention, which is causal
                    return str(error).partition(". ")[0]
                except Exception:  # the model refuses such tokens without an image
                    continue
                if not self._distance([after], [before]) <= self.exact:
                    return f"tokens with {name}={kind} see each other both ways"
        return None

    # Running -----------------------------------------------------------------------------------

    def _sample(self, length: int) -> Tensor:
        return self.tokens[torch.randint(len(self.tokens), (length,), generator=self.random)]

    def _packed(
        self, samples: Sequence[Tensor], with_boundaries: bool, positions: Tensor | None = None
    ) -> list[Tensor]:
        """The outputs of each sample in one packed row."""
        batch = _row(samples).to(self.device)
        kwargs = hf_kwargs(batch, self.model)
        if positions is not None:
            kwargs["position_ids"] = positions
        if not with_boundaries:
            kwargs = {name: value for name, value in kwargs.items() if name not in _BOUNDARIES}
        outputs = self._run(kwargs)
        if tuple(outputs.shape[:2]) != (batch.rows, batch.width):
            raise ValueError(f"outputs of shape {tuple(outputs.shape)}, not one per slot")
        if not bool(outputs.isfinite().all()):
            raise ValueError("outputs that are not finite")
        return list(outputs[0].split([*map(len, samples), _TAIL])[:-1])

    def _run(self, kwargs: dict[str, Any]) -> Tensor:
        outputs = self.model(**self.traits.accepted({"use_cache": False, **kwargs}))
        found = getattr(outputs, "logits", None)
        found = getattr(outputs, "last_hidden_state", None) if found is None else found
        if found is None:
            raise ValueError("outputs without logits or last_hidden_state")
        return found


def _row(samples: Sequence[Tensor]) -> Batch:
    lengths = [len(sample) for sample in samples]
    width = sum(lengths) + _TAIL
    recipe = Recipe(layout=Packed(max_tokens=width, pad_to=width), balance="none")
    (micro,) = make_plan(lengths, recipe)[0, 0]
    return Collator()(micro, [{"input_ids": sample} for sample in samples])


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients, compilation and warnings; everything as before after."""
    training = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device.index for device in devices]),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        torch.clear_autocast_cache()  # casts without a gradient
