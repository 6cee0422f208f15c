"""Arguments of a Hugging Face forward: what a model needs, and a batch as keyword arguments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from evenstep.core.plan import MicroBatch
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.mixers import KEYWORD, has_mixers
from evenstep.tensors.batch import Batch, BatchShard, RaggedTensor
from evenstep.tensors.collate import Collator
from evenstep.tensors.segment_attention import one_segment_per_row
from evenstep.train.framework import unwrapped


@dataclass(frozen=True, kw_only=True, slots=True)
class HfCollate:
    """What `model(**inputs)` takes to compute its loss: tokens, positions, boundaries or a mask,
    and labels shifted within segments. See `hf_kwargs`.

    The loss needs `num_items_in_batch` as well, which the Trainer and `accelerate_loader` add: the
    number of labels in the step, on all ranks.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from evenstep import Packed, Recipe, make_plan
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> samples = {0: {"input_ids": [5, 6]}, 1: {"input_ids": [7]}}
    >>> inputs = HfCollate(model=model)(plan[0, 0][0], samples)
    >>> inputs["shift_labels"].tolist(), inputs["position_ids"].tolist()
    ([[6, -100, -100]], [[0, 1, 0]])
    """

    model: Any
    collate: Collator = field(default_factory=Collator)

    def __call__(self, micro: MicroBatch, samples: Mapping[int, Any]) -> dict[str, Any]:
        """The arguments for one micro-batch."""
        inputs = hf_kwargs(self.collate(micro, samples), self.model, labels=True)
        return {name: value for name, value in inputs.items() if name != "num_items_in_batch"}


# Arguments that `hf_kwargs` sets itself, or that change what a model returns.
_SET_HERE = (
    "input_ids", "attention_mask", "position_ids", "labels", "past_key_values", "inputs_embeds",
)  # fmt: skip
_VISION = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")


def hf_kwargs(batch: Batch, model: Any = None, *, labels: bool = False) -> dict[str, Any]:
    """Keyword arguments for `model(**hf_kwargs(batch, model))`.

    Rows of several segments mark boundaries twice: `cu_seq_lens_q/k` and `max_length_q/k` for
    flash attention, and `position_ids` that restart at 0 for other implementations. They come
    without an attention mask and without a cache; otherwise transformers ignores the boundaries
    and segments attend to earlier ones. Rows of one segment have an attention mask instead.

    With `model`, the arguments also are what that model needs: extras of the batch that its
    forward takes (`pixel_values`, `image_grid_thw`, ...), positions of multimodal RoPE, positions
    that start at `padding_idx + 1` (RoBERTa), and a token in padding that is not the padding token,
    whose zero embedding gives Gemma-3n NaN gradients. Batches that its RoPE cannot run are refused.
    `hf_forward` passes the model.

    With `labels=True`, the model computes its own loss, as a sum over the labels
    (`num_items_in_batch` is 1): what `Runner` takes, and 0 for a micro-batch without labels. It
    needs `model`: one whose loss is not such a sum is refused, also for the load-balancing loss
    that `output_router_logits=True` adds to it.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> hf_kwargs(batch)["cu_seq_lens_q"].tolist()
    [0, 2, 3]
    """
    refuse_shard(batch)
    traits = traits_of(model)
    if traits.encodes_and_decodes:
        raise ConfigError(
            f"{type(model).__name__} has an encoder and a decoder, which take two sequences per "
            f"sample. Pass a forward that gives it both, over padded rows."
        )
    if batch.tree is not None or batch.exchange is not None:
        _check_seeing(batch, model, traits, labels)
    real, extras = batch.token_mask, _extras(batch, traits)
    # Ragged entries are end to end in the order of segments, which is that of tokens.
    ragged = {name: e.values for name, e in extras.items() if isinstance(e, RaggedTensor)}
    media = {name: values for name, values in ragged.items() if len(values)}  # towers need some
    plain = traits.plain_tokens(1)[0]
    if model is None:  # the first real token of the batch
        plain = batch.tokens.reshape(-1)[real.reshape(-1).to(torch.uint8).argmax()]
    kwargs: dict[str, Any] = {
        "input_ids": torch.where(real, batch.tokens, plain),
        "position_ids": _positions(batch, model, traits, extras),
        "use_cache": False,
        **{name: extra for name, extra in extras.items() if name not in ragged},
        **media,
    }
    one_per_row = one_segment_per_row(batch) and batch.exchange is None
    if one_per_row and (batch.rows > 1 or not batch.is_full):
        # A row of padding attends to itself: softmax over a fully masked row is NaN.
        kwargs["attention_mask"] = (real | ~real.any(1, keepdim=True)).long()
    elif not ((traits.has_tower and media) or (traits.stateful and one_per_row)):
        # Not with images: transformers passes these on to the vision tower, which has its own. Nor
        # for a single segment: reference kernels of linear attention refuse all boundaries.
        kwargs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens)
        kwargs |= dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
    if (keys := batch.keys) is not None:
        kwargs |= {"cu_seq_lens_k": keys.cu_seqlens, "max_length_k": keys.max_seqlen}
        kwargs["key_slots"] = keys.slots  # of evenstep's attention
    if batch.exchange is not None:
        kwargs["exchange"] = batch.exchange
    if labels:
        kwargs |= loss_inputs(batch, model)
        refuse_router_loss(
            model, "Use `hf_forward(model, outputs='router_logits')` with the loss load_balancing"
        )
    if model is not None and has_mixers(core_of(model)):
        tiles = batch.sample_ids >= 0
        begins = batch.cu_seqlens[:-1][tiles]
        kwargs[KEYWORD] = torch.stack((begins, batch.seqlens[tiles].to(begins.dtype)))
    return traits.accepted(kwargs)


def _check_seeing(batch: Batch, model: Any, traits: Traits, labels: bool) -> None:
    """Raise if the model cannot run segments that see others, by its arguments."""
    what, remedy = "samples cannot share prefixes", "plan without prefixes"
    if batch.exchange is not None:
        what, remedy = "ranks cannot share samples", "plan without sharing and context parallelism"
    taken = sorted(batch.unshared.extras.keys() & traits.parameters.keys() - {*_SET_HERE})
    config = None if model is None else text_config(core_of(model))
    why = None
    if getattr(config, "_attn_implementation", None) != "evenstep":
        raise ConfigError(
            f"only Evenstep's attention sees the tokens in front of a segment, but {traits.name} "
            f"has another implementation, so {what}. Call use_attention(model) of "
            f"evenstep.integrations.hf_attention and pass the model, or {remedy}."
        )
    if has_mixers(core_of(model)):
        why = "has layers that carry state from token to token, one state per segment"
    elif not traits.takes_any:
        why = "does not pass keyword arguments on to its attention"
    elif traits.padding is not None or traits.rope_indexer is not None:
        why = "computes positions from the tokens of a row"
    elif taken:
        why = f"takes the extra {taken[0]!r} of each sample"
    elif labels:
        why = "computes its own loss, which sees each slot once"
    limit = traits.rope_limit
    if (
        limit is not None
        and batch.exchange is not None
        and max(batch.exchange.lengths) >= limit.tokens
    ):
        why = f"changes its rotary frequencies at {limit.tokens} tokens, on each rank for itself"
    if why is not None:
        raise ConfigError(f"{traits.name} {why}, so {what}. {remedy.capitalize()}.")


def _extras(batch: Batch, traits: Traits) -> dict[str, Any]:
    """The extras that the model's forward takes, and the type of each token if it is derived."""
    vision = [name for name in _VISION if name in batch.extras] if traits is _NO_MODEL else None
    if vision:
        raise ConfigError(
            f"the batch has {vision[0]!r}, whose use depends on the model. Pass it: "
            f"hf_kwargs(batch, model)."
        )
    accepted, types = traits.parameters, ("mm_token_type_ids", "token_type_ids")
    batch_extras: Mapping[str, Any] = batch.extras
    extras = {
        name: extra.long() if name in types else extra
        for name, extra in batch_extras.items()
        if name in accepted and name not in _SET_HERE and batch.aligned.get(name) != "label"
    }
    ragged = [name for name, extra in extras.items() if isinstance(extra, RaggedTensor)]
    if ragged and (bool((batch.starts > 0).any()) or batch.continuation is not None):
        raise InputError(
            f"a sample with {ragged[0]!r} was split, and its parts cannot share it. Use another "
            f"overflow than 'split'."
        )
    if ragged and types[0] in accepted and types[0] not in extras:
        # 0 for text, 1 for image and 2 for video tokens, by the ids of those tokens
        extras[types[0]] = torch.zeros_like(batch.tokens)
        for kind, token in enumerate(traits.media, 1):
            if token is not None:
                extras[types[0]][batch.tokens == token] = kind
    return extras


def _positions(batch: Batch, model: Any, traits: Traits, extras: Mapping[str, Any]) -> Tensor:
    """Positions that start at 0 in each segment, or count on behind what it sees in front.

    Those of padding stay below the longest sample: beyond it, longrope would change its frequencies
    and learned positions may not exist.
    """
    longest = torch.where(batch.token_mask, batch.position_ids, 0).max() + 1
    positions = batch.position_ids % longest
    if traits.rope_limit is not None:
        traits.rope_limit.check(batch.unshared)
    if traits.rope_indexer is not None:
        index = core_of(model).get_submodule(traits.rope_indexer).get_rope_index
        planes = _rope_planes(batch, index, traits.rope_axes, positions, extras)
        return torch.cat((positions[None], planes)) if traits.text_plane else planes
    if traits.padding is None:
        return positions
    # `padding` + 1 for the first token of a segment that is not the padding token, and so on;
    # `padding` for padding: what `create_position_ids_from_input_ids` gives a sample alone.
    counts = (batch.token_mask & (batch.tokens != traits.padding)).reshape(-1).long()
    done = counts.cumsum(0)
    before = (done - counts)[batch.cu_seqlens[:-1].long().clamp(max=len(done) - 1)]
    positions = (done - before[batch.segment_ids.reshape(-1)]) * counts + traits.padding
    return positions.view_as(batch.tokens)


def loss_inputs(batch: Batch, model: Any) -> dict[str, Any]:
    """Labels, and what makes the model's loss a sum. `shift_labels` also has the labels of a split
    sample that are in its next segment."""
    if model is None:
        raise ConfigError(
            "labels=True needs the model, because not every model's loss is a sum over labels. "
            "Pass hf_kwargs(batch, model, labels=True), HfCollate(model=model) or "
            "accelerate_loader(..., model=model)."
        )
    if not traits_of(model).sums_loss:
        raise ConfigError(
            f"{traits_of(model).name} computes a mean over the labels of a micro-batch, which is "
            f"NaN without labels and not the loss of a step. Use its logits with cross_entropy()."
        )
    labels = {"labels": batch.unshifted_labels, "shift_labels": batch.labels}
    return {**labels, "num_items_in_batch": 1}


def refuse_shard(batch: Any) -> None:
    """Raise if `batch` is a shard: a transformers model attends within its own tokens."""
    if isinstance(batch, BatchShard):
        raise InputError(
            "a Hugging Face model cannot run a batch shard, because its attention sees only the "
            "tokens of one rank. Leave out Runner(shard=...): after use_attention(model), the "
            "runner divides samples itself."
        )


# What the code and the configs of a model say about its inputs ------------------------------------


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model needs to be called with. Holds no reference to the model."""

    name: str = "a model"
    parameters: Mapping[str, inspect.Parameter] = field(default_factory=dict)  # of its forward
    takes_any: bool = True  # any keyword argument
    sums_loss: bool = False  # whether its own loss is a sum, given `num_items_in_batch`
    special: frozenset[int] = frozenset()  # ids of tokens such as padding and images
    media: tuple[int | None, ...] = ()  # ids of image and video tokens
    padding: int | None = None  # `padding_idx` that positions count from (RoBERTa)
    rope_limit: RopeLimit | None = None
    rope_indexer: str | None = None  # the module with the `get_rope_index` of multimodal positions
    rope_axes: int = 3  # of time, height and width, or more
    text_plane: bool = False  # whether multimodal positions begin with those of text
    has_tower: bool = False  # an encoder of images or sound, with attention of its own
    encodes_and_decodes: bool = False  # takes two sequences per sample
    stateful: bool = False  # has layers with a recurrent state

    def plain_tokens(self, number: int) -> list[int]:
        """The smallest token ids without a special meaning."""
        return [t for t in range(len(self.special) + number) if t not in self.special][:number]

    def accepted(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Without arguments that the forward would raise a TypeError for."""
        if self.takes_any:
            return kwargs
        names = {*self.parameters, KEYWORD}
        return {name: value for name, value in kwargs.items() if name in names}


_TRAITS: WeakKeyDictionary[Any, Traits] = WeakKeyDictionary()
_NO_MODEL = Traits()


def core_of(model: Any) -> Any:
    """The transformers model inside DDP, torch.compile and peft."""
    model = unwrapped(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def traits_of(model: Any) -> Traits:
    """The traits of a model, read once."""
    if model is None:
        return _NO_MODEL
    core = core_of(model)
    if core not in _TRAITS:
        _TRAITS[core] = _read_traits(core)
    return _TRAITS[core]


def text_config(model: Any) -> Any:
    """The config of the language model inside a model; None if it has none."""
    configs = (module.config for module in model.modules() if hasattr(module, "config"))
    config: Any = next(configs, None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def adds_router_loss(model: Any) -> bool:
    """Whether the config asks for the load-balancing loss of a mixture of experts, which the model
    adds to its own loss, with a coefficient other than 0."""
    core = core_of(model)
    config, name = text_config(core), "router_aux_loss_coef"
    coefficient = getattr(core, name, getattr(config, name, None))
    return bool(getattr(config, "output_router_logits", False)) and coefficient != 0


def refuse_router_loss(model: Any, remedy: str) -> None:
    """Raise if `adds_router_loss`: a product of means over a micro-batch depends on the plan."""
    if adds_router_loss(model):
        raise ConfigError(
            f"the config of {type(core_of(model)).__name__} has output_router_logits=True, but its "
            f"load-balancing loss of a micro-batch is not a part of that of the step. {remedy}, or "
            f"set model.config.output_router_logits=False to train without it."
        )


def _read_traits(core: Any) -> Traits:
    parameters = inspect.signature(core.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    config, modules = getattr(core, "config", None), list(core.modules())
    special = [getattr(module, "padding_idx", None) for module in modules]
    for each in configs_in(config):
        for name, value in vars(each).items():
            if "_token_id" in name or "_token_index" in name:
                special += value if isinstance(value, (list, tuple)) else [value]
    rope = (getattr(getattr(module, "config", None), "rope_parameters", None) for module in modules)
    sections = [part.get("mrope_section") for part in rope if isinstance(part, Mapping)]
    indexers = [name for name, part in core.named_modules() if hasattr(part, "get_rope_index")]
    # Models that take the positions of text as a plane before the rotary axes, from which
    # transformers reads the boundaries of segments, take four planes and remove the first.
    homes = {type(module).__module__ for module in modules}
    homes = {home for home in homes if home.startswith("transformers.models.")}
    return Traits(
        name=type(core).__name__,
        parameters=parameters,
        takes_any=takes_any,
        sums_loss=takes_any and getattr(core, "accepts_loss_kwargs", None) is not False,
        special=frozenset(value for value in special if isinstance(value, int)),
        media=tuple(
            getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))
            for kind in ("image", "video")
        ),
        padding=_padding(modules),
        rope_limit=rope_limit(core),
        rope_indexer=indexers[0] if indexers else None,
        rope_axes=next((max(3, len(section)) for section in sections if section), 3),
        text_plane=bool(indexers)
        and any("shape[0] == 4" in inspect.getsource(sys.modules[home]) for home in homes),
        has_tower=any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")),
        encodes_and_decodes=bool(getattr(config, "is_encoder_decoder", False)),
        stateful=any(getattr(module, "_is_stateful", False) for module in modules),
    )


def configs_in(config: Any) -> Iterator[Any]:
    """A config, and those of the models inside its model."""
    if hasattr(config, "model_type"):
        yield config
        for value in list(vars(config).values()):
            yield from configs_in(value)


def _padding(modules: list[Any]) -> int | None:
    name = "create_position_ids_from_input_ids"
    for module in modules:
        kind, index = type(module), getattr(module, "padding_idx", None)
        by_function = hasattr(sys.modules.get(kind.__module__), name)
        by_function = by_function and hasattr(module, "position_embeddings")
        if index is not None and (by_function or hasattr(kind, name)):
            return int(index)
    return None


# Rotary positions that depend on neighbours ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RopeLimit:
    """Up to which length the rotary positions of a model are independent of other samples.

    longrope  segments of up to `tokens` tokens and longer ones need different frequencies, and a
              micro-batch gets those of its longest segment: it must keep to one side
    dynamic   a segment of `tokens` tokens or more changes the frequencies of its micro-batch and
              of later ones: there must be none

    >>> RopeLimit("longrope", 4096).tokens
    4096
    """

    kind: Literal["longrope", "dynamic"]
    tokens: int

    @property
    def why(self) -> str:
        """What is wrong with other lengths, and the remedy."""
        if self.kind == "longrope":
            return (
                f"its longrope frequencies depend on whether the longest segment of a micro-batch "
                f"has more than {self.tokens} tokens. Keep micro-batches to one side with "
                f"separate_lengths(step, {self.tokens}) of evenstep.data"
            )
        return (
            f"its dynamic RoPE depends on every batch with {self.tokens} tokens or more that ran "
            f"before. Keep samples below {self.tokens} tokens, or use another rope_type"
        )

    def allows(self, lengths: Tensor) -> bool:
        """Whether segments of these lengths can share a micro-batch."""
        if not len(lengths):
            return True
        least, most = torch.aminmax(lengths)
        if self.kind == "dynamic":
            return bool(most < self.tokens)
        return bool((least > self.tokens) | (most <= self.tokens))

    def check(self, batch: Batch) -> None:
        """Raise if the segments of a batch cannot share a micro-batch, packed or padded."""
        lengths = batch.seqlens[batch.sample_ids >= 0]
        if not self.allows(lengths):
            raise InputError(
                f"a micro-batch holds segments of {int(lengths.min())} to {int(lengths.max())} "
                f"tokens, but for this model {self.why}."
            )


def rope_limit(model: Any) -> RopeLimit | None:
    """The limit of a transformers model whose rotary positions depend on lengths, else None.

    `separate_lengths(step, rope_limit(model).tokens)` of `evenstep.data` keeps to a longrope limit.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    >>> config = LlamaConfig(vocab_size=9, rope_parameters=rope, **sizes)
    >>> rope_limit(LlamaForCausalLM(config))
    RopeLimit(kind='dynamic', tokens=2048)
    """
    limits = [limit for module in model.modules() for limit in _limits(module)]
    dynamic = [limit for limit in limits if limit.kind == "dynamic"]
    return min(dynamic or limits, key=lambda limit: limit.tokens, default=None)


def _limits(module: Any) -> Iterator[RopeLimit]:
    """The limits of a rotary module; its own `rope_type` counts more than the config's."""
    config: Any = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if "rotary" not in type(module).__name__.lower() or not isinstance(rope, Mapping):
        return
    types = getattr(module, "rope_type", None)
    by_layer = {name: part for name, part in rope.items() if isinstance(part, Mapping)}
    for name, parameters in (by_layer or {"": rope}).items():
        module_type = types.get(name) if isinstance(types, Mapping) else types
        kind = str(
            module_type or parameters.get("rope_type") or parameters.get("type") or "default"
        )
        if "dynamic" in kind:
            yield RopeLimit("dynamic", int(config.max_position_embeddings))
        elif kind == "longrope" or "long_mscale" in parameters:
            both = (parameters, vars(config))
            key = "original_max_position_embeddings"
            most = next((part[key] for part in both if part.get(key)), None)
            yield RopeLimit("longrope", int(most or config.max_position_embeddings))


def _rope_planes(
    batch: Batch,
    index: Callable[..., tuple[Tensor, Any]],
    num_axes: int,
    positions: Tensor,
    inputs: Mapping[str, Any],
) -> Tensor:
    """(axes, rows, width): the axes of each sample's own rotary index.

    `index` is the model's own `get_rope_index`, which runs on one sample at a time: on a packed
    row, it would count on from the sample before. `inputs` are the batch's extras for the model.
    """
    accepted = inspect.signature(index).parameters
    inputs = {
        name: value.to("cpu") if isinstance(value, (Tensor, RaggedTensor)) else value
        for name, value in inputs.items()
        if name in accepted
    }
    ragged = [name for name, value in inputs.items() if isinstance(value, RaggedTensor)]
    tokens, plain = batch.tokens.cpu().reshape(-1), positions.cpu().reshape(-1)
    planes = plain.expand(num_axes, -1).clone()
    begins, lengths = batch.cu_seqlens.tolist(), batch.seqlens.tolist()
    tiles = (batch.sample_ids >= 0).nonzero()[:, 0].tolist()
    for segment, tile in enumerate(tiles):
        slots = slice(begins[tile], begins[tile] + lengths[tile])
        sample = {name: _of_segment(value, slots, segment) for name, value in inputs.items()}
        if any(sample[name] is not None for name in ragged):  # text alone has plain positions
            if "attention_mask" in accepted:
                sample["attention_mask"] = torch.ones(1, lengths[tile], dtype=torch.int64)
            planes[:, slots] = index(input_ids=tokens[None, slots], **sample)[0][:, 0]
    return planes.view(num_axes, *positions.shape).to(positions.device)


def _of_segment(value: Any, slots: slice, segment: int) -> Any:
    """What belongs to one segment: (1, length) of a token-aligned tensor, its entries of a ragged
    one (None if it has none), its entry of one per sequence."""
    if isinstance(value, RaggedTensor):
        first, last = value.offsets[segment : segment + 2].tolist()
        return value.values[first:last] if last > first else None
    if isinstance(value, Tensor) and value.ndim >= 2:
        return value.flatten(0, 1)[None, slots]
    return value[segment : segment + 1] if isinstance(value, Tensor) else value
