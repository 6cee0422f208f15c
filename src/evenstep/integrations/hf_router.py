"""RouterLoss: the load-balancing loss of a step, inside the loss that a transformers model returns.

With output_router_logits=True, a mixture of experts adds `router_aux_loss_coef` times a product of
two means over the tokens of the micro-batch to its loss. Summed over micro-batches, empty ones too,
that depends on the plan. Here the choices of experts are counted over the whole step first, without
gradients. Then the loss is a sum over tokens (see `load_balancing`), and a hook puts this
micro-batch's part of the sum in place of the model's term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenstep.core.layout import Padded
from evenstep.core.plan import MicroBatch
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError
from evenstep.integrations.hf_collate import HfCollate
from evenstep.integrations.hf_kwargs import hf_kwargs, loss_inputs
from evenstep.integrations.hf_model import core_of, traits_of
from evenstep.integrations.packing_code import text_config
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch
from evenstep.tensors.collate import Collator
from evenstep.tensors.losses.load_balancing import load_balancing
from evenstep.train.all_tokens import AllTokens
from evenstep.train.collectives import Alone, Distributed
from evenstep.train.experts import expert_frequencies
from evenstep.train.normalization import weighted

BATCH = "evenstep_batch"
"""The key of the `Batch` in the inputs that `RouterCollate` makes."""


class RouterCollate(HfCollate):
    """The inputs of a micro-batch, with labels, and the batch that they were made of."""

    def __call__(self, micro: MicroBatch, samples: Mapping[int, Any]) -> dict[str, Any]:
        """The arguments for one micro-batch, and `BATCH`."""
        batch = self.collate(micro, samples)
        inputs = {**hf_kwargs(batch, self.model), **loss_inputs(batch, self.model), BATCH: batch}
        return {name: value for name, value in inputs.items() if name != "num_items_in_batch"}


@dataclass
class _Step:
    """What a micro-batch must know of its step."""

    frequencies: Tensor  # (layers, experts)
    tokens: float  # on all ranks
    micro_batches: int
    ranks: int


class RouterLoss:
    """Hugging Face's load-balancing loss over all real tokens of a step, on all ranks.

        router = RouterLoss(model)
        router.count(model, batches)  # of one step
        for batch in batches:
            with router.in_step(batch):
                model(**inputs, output_router_logits=True).loss

    The sum of the losses of the micro-batches holds `router_aux_loss_coef` times it once. The mean
    of `outputs.aux_loss` over micro-batches and ranks is its value: TRL adds that.
    """

    def __init__(self, model: Any, *, added_by_trainer: bool = False) -> None:
        self._core = core = core_of(model)
        self._added_by_trainer = added_by_trainer  # from `outputs.aux_loss`
        config = text_config(core)
        self._top_k = int(_setting(core, config, "num_experts_per_tok"))
        self._coefficient = float(_setting(core, config, "router_aux_loss_coef"))
        self._step: _Step | None = None
        self._check_definition()

    def count(self, model: Any, batches: list[Batch]) -> None:
        """Count which experts the step's tokens choose, in one forward pass per micro-batch.

        Random numbers, as of dropout, are the ones that the training passes draw next.
        """
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = Distributed() if several else Alone()
        device = next(self._core.parameters()).device
        batches = [batch.to(device) for batch in batches]
        model.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            frequencies = expert_frequencies(
                model, batches, top_k=self._top_k, forward=_router_logits, collective=ranks
            )
        amounts = torch.stack([AllTokens().amount(batch) for batch in batches])
        tokens = max(float(ranks.all_reduce_sum(amounts.sum())), 1.0)
        self._step = _Step(frequencies, tokens, len(batches), ranks.size)

    @contextmanager
    def in_step(self, batch: Batch) -> Iterator[None]:
        """Within it, the model's loss has this micro-batch's part of the step's load-balancing
        loss."""
        assert self._step is not None
        step, calls = self._step, 0
        router_logits: Any = None

        def keep(module: Any, arguments: Any, outputs: Any) -> None:
            nonlocal router_logits
            router_logits = outputs.router_logits

        def change(module: Any, arguments: Any, outputs: Any) -> Any:
            nonlocal calls
            calls += 1
            self._check_gradient(router_logits)
            part = self._part(router_logits, batch, step)
            if outputs.loss is None and not self._added_by_trainer:
                raise ConfigError(
                    "the load-balancing loss is a part of the loss that the model returns, but the "
                    "trainer computes another one. Set label_smoothing_factor=0.0 and pass no "
                    "compute_loss_func, or set model.config.output_router_logits=False to train "
                    "without it."
                )
            if outputs.loss is not None:
                excess = outputs.aux_loss.to(outputs.loss.device) - part.to(outputs.loss.device)
                outputs.loss = outputs.loss - self._coefficient * excess
            outputs.aux_loss = part * (step.micro_batches * step.ranks)
            return outputs

        # TRL's outputs have no router logits; those of the base model do.
        hooks = [
            self._core.base_model.register_forward_hook(keep),
            self._core.register_forward_hook(change),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if not calls:
            raise ConfigError(
                "the load-balancing loss of the step cannot be added to a compiled model. Set "
                "torch_compile=False, or model.config.output_router_logits=False."
            )

    def _check_gradient(self, logits: tuple[Tensor, ...]) -> None:
        """Raise if router logits have lost their gradient although what computes them trains."""
        trained = any(parameter.requires_grad for parameter in self._core.base_model.parameters())
        recorded = any(layer.requires_grad for layer in logits)
        if torch.is_grad_enabled() and trained and not recorded:
            raise ConfigError(
                "the load-balancing loss has no gradient, because reentrant gradient checkpointing "
                "does not record that of router logits. Set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or "
                "model.config.output_router_logits=False to train without it."
            )

    def _part(self, logits: tuple[Tensor, ...], batch: Batch, step: _Step) -> Tensor:
        """A sum over the batch's tokens, which over the step is Hugging Face's loss."""
        loss = load_balancing(
            top_k=self._top_k, over="step", frequencies=step.frequencies, layers="joint"
        )
        batch = weighted(batch.to(logits[0].device), AllTokens())
        return self._top_k * loss({"router_logits": logits}, batch).loss / step.tokens

    def _check_definition(self) -> None:
        """Compare with the model's own loss on a few tokens, because some define it otherwise."""
        core, traits = self._core, traits_of(self._core)
        tokens = [token for token in range(len(traits.special) + 8) if token not in traits.special]
        # Six tokens and two of padding, so that there is a mask.
        plan = make_plan([6], Recipe(layout=Padded(samples=1, pad_to=8)))
        batch = Collator()(plan[0, 0][0], [{"input_ids": tokens[:6]}])
        batch = batch.to(next(core.parameters()).device)
        training = core.training
        core.eval()
        try:
            with torch.no_grad():
                inputs = {**hf_kwargs(batch, core), **loss_inputs(batch, core)}
                outputs = core(**inputs, output_router_logits=True)
        finally:
            core.train(training)
        logits: Any = getattr(outputs, "router_logits", None)
        same = isinstance(logits, tuple) and isinstance(outputs.aux_loss, Tensor)
        same = same and all(layer.ndim == 2 and len(layer) == 8 for layer in logits)
        if same:
            frequencies = expert_frequencies(
                core, [batch], top_k=self._top_k, forward=lambda *_: {"router_logits": logits}
            )
            aux = self._part(logits, batch, _Step(frequencies, 6, 1, 1))
            nll = torch.nn.functional.cross_entropy(
                outputs.logits.float().flatten(0, 1), batch.labels.flatten(), reduction="sum"
            )
            same = _close(aux, outputs.aux_loss)
            same = same and _close(nll + self._coefficient * aux, outputs.loss)
        if not same:
            raise _other_definition(core)


def _router_logits(model: Any, batch: Batch) -> Any:
    few = {"logits_to_keep": 1} if "logits_to_keep" in traits_of(model).parameters else {}
    found = model(**hf_kwargs(batch, model), **few, output_router_logits=True)
    return {"router_logits": found.router_logits}


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return bool(torch.allclose(ours.float(), theirs.to(ours.device).float(), rtol=2e-2))


def _setting(core: Any, config: Any, name: str) -> Any:
    """An attribute of the model, else of its config."""
    value = getattr(core, name, getattr(config, name, None))
    if value is None:
        raise _other_definition(core)
    return value


def _other_definition(core: Any) -> ConfigError:
    return ConfigError(
        f"{type(core).__name__} does not define its load-balancing loss as Mixtral does, so that "
        f"of a step is not known. Set model.config.output_router_logits=False to train without it "
        f"(router_aux_loss_coef=0.0 in TRL's config)."
    )
