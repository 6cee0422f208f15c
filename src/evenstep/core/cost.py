"""Cost: the modelled work of segments and micro-batches. Gpu: the speed of a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.models import PRESETS, ModelSize, read_model_config, text_work, vision_work
from evenstep.core.ragged import FloatArray
from evenstep.core.text import (
    MOST,
    one_of,
    real_field,
    set_fields,
    short_repr,
    truth_value,
    whole_field,
    whole_number,
)
from evenstep.errors import ConfigError, InputError

Part: TypeAlias = Literal["text", "vision"]

_MOST = 1e100
_OF_SHARING = ("per_moved", "per_exchange")
# What models of 1.7B to 8B weights need at 50 GB/s and 0.6 to 2.5 ms per layer, in tokens' cost.
_MOVED, _EXCHANGE = 0.06, 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """`per_token * L + per_pair * L**2 + per_segment` per segment, plus `per_micro_batch`.

    per_token        cost of a token
    per_pair         cost of L² of a segment of L tokens: attention
    per_segment      cost of a segment
    per_micro_batch  cost of a micro-batch
    per_moved        cost of a token whose keys and values go to another rank (`Sharing`); by
                     default 0.06 of a token's
    per_exchange     cost of a wave in which ranks share sequences, for its exchange in every
                     layer; by default that of 900 tokens

    The unit is up to the user: tokens, FLOPs, seconds. Plans only compare costs. Numbers become
    plain floats: squares of integers may overflow 64 bits, and equal costs must be equal data.

    >>> Cost(per_token=3).per_token
    3.0
    >>> Cost(per_token=24576, per_pair=1).of_lengths(np.array([1, 1000])).tolist()
    [24577.0, 25576000.0]
    """

    per_token: float = 1.0
    per_pair: float = 0.0
    per_segment: float = 0.0
    per_micro_batch: float = 0.0
    per_moved: float | None = None
    per_exchange: float | None = None

    def __post_init__(self) -> None:
        names = ["per_token", "per_pair", "per_segment", "per_micro_batch"]
        names += [name for name in _OF_SHARING if getattr(self, name) is not None]
        for name in names:
            value = real_field(self, f"cost.{name}")
            if not 0 <= value <= _MOST:
                raise ConfigError(f"cost.{name} must be in [0, {_MOST:g}], got {value:g}.")
        if self.per_token == self.per_pair == self.per_segment == 0:
            raise ConfigError(
                "cost is 0 for every segment. Set cost.per_token, cost.per_pair or "
                "cost.per_segment above 0."
            )

    __setstate__ = set_fields

    @classmethod
    def tokens(cls) -> Cost:
        """One per token: the linear model that most systems use."""
        return cls()

    @classmethod
    def of_model(
        cls,
        *,
        layers: int,
        hidden: int,
        ffn: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        vocab: int = 0,
        gated: bool = True,
        causal: bool = True,
    ) -> Cost:
        """Training FLOPs of a decoder from its shape; backward counts as two forwards.

        `gated` counts three feed-forward matrices (SwiGLU) instead of two; `causal` counts half
        of the attention matrix. `head_dim` defaults to `hidden // heads`.

        >>> cost = Cost.of_model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8)
        >>> round(cost.per_token / cost.per_pair)  # the length at which attention doubles the cost
        53248
        """
        layers = whole_number("layers", layers)
        hidden = whole_number("hidden", hidden)
        ffn = whole_number("ffn", ffn)
        heads = whole_number("heads", heads)
        groups = heads if kv_heads is None else whole_number("kv_heads", kv_heads)
        vocab = whole_number("vocab", vocab, least=0)
        gated, causal = truth_value("gated", gated), truth_value("causal", causal)
        if head_dim is None and hidden < heads:
            raise ConfigError(
                f"hidden must be at least heads, {heads}, got {hidden}. Raise hidden, lower "
                f"heads, or set head_dim."
            )
        dim = hidden // heads if head_dim is None else whole_number("head_dim", head_dim)
        # Four projections (queries and outputs, keys and values) and the feed-forward matrices.
        queries, keys = heads * dim, groups * dim
        weights = hidden * (2 * queries + 2 * keys) + (3 if gated else 2) * hidden * ffn
        attention = 4 * queries / (2 if causal else 1)  # q·k and p·v, 2 FLOPs per multiply-add
        return cls(
            per_token=3.0 * (2 * layers * weights + 2 * hidden * vocab),
            per_pair=3.0 * layers * attention,
        )

    @classmethod
    def of_config(cls, config: object, *, part: Part = "text") -> Cost:
        """Training FLOPs of a model from its Hugging Face configuration.

        `config` is the path of a `config.json` or of its folder, a mapping, or an object such as
        `AutoConfig.from_pretrained` returns. Experts count as far as a token passes through them.
        A layer with a window of w tokens costs w pairs for every token, and a layer with a state
        costs the same for every token; neither adds to `per_pair`. `part="vision"` is the vision
        tower of a multimodal model, per patch.

        >>> shape = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
        >>> heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        >>> cost = Cost.of_config({"model_type": "llama", **shape, **heads})
        >>> round(cost.per_token / 6e9, 2)  # billions of weights
        7.5
        """
        one_of("part", part, Part)
        section = read_model_config(config).section(part)
        work = text_work(section) if part == "text" else vision_work(section)
        # Two FLOPs per multiply-add, in the forward pass and twice in the backward pass.
        return cls(per_token=6.0 * (work.weights + work.nearby), per_pair=6.0 * work.pairs)

    @classmethod
    def named(cls, name: str) -> Cost:
        """Training FLOPs of a well-known model, such as "llama-3-8b" or "deepseek-v3".

        A wrong name raises an error that lists the names.

        >>> cost = Cost.named("qwen3-30b-a3b")
        >>> round(cost.per_token / 6e9, 2)  # billions of weights that a token passes through
        3.04
        """
        one_of("model", name, PRESETS)
        return cls.of_config(PRESETS[name])

    @classmethod
    def fit(cls, measurements: Iterable[tuple[Sequence[int], float]]) -> Cost:
        """The non-negative cost that fits measured times of micro-batches best.

        Each measurement is (lengths of the segments in one micro-batch, its time). All four terms
        are fitted by least squares of the relative error, with no negative term. Raises if the
        times do not grow with the lengths.

        >>> seen = [([n] * m, 2.0 * n * m + 0.5 * n * n * m) for n in (1, 4, 9) for m in (1, 3)]
        >>> fitted = Cost.fit(seen)
        >>> round(fitted.per_token, 6), round(fitted.per_pair, 6)
        (2.0, 0.5)
        """
        rows: list[tuple[float, float, int]] = []
        times: list[float] = []
        for lengths, time in measurements:
            row = np.asarray(lengths, np.float64)
            if len(row) == 0:
                raise InputError(f"measurement {len(rows)} has no lengths. Leave it out.")
            wrong = row[~((row >= 1) & (row <= MOST))]
            if len(wrong):
                raise InputError(
                    f"measurement {len(rows)} has a segment of {wrong[0]:g} tokens; expected a "
                    f"length in [1, {MOST}]."
                )
            rows.append((row.sum(), (row**2).sum(), len(row)))
            times.append(float(time))
        return cls.fit_work(np.reshape(np.array(rows), (-1, 3)), np.array(times))

    @classmethod
    def fit_work(cls, work: FloatArray, times: FloatArray) -> Cost:
        """The same from sums: of each micro-batch its tokens, squared lengths and segments."""
        rows = np.column_stack((work, np.ones(len(work))))
        if not len(rows) or not all(0 < time < float("inf") for time in times):
            raise InputError(
                "expected at least one measurement; measured times must be finite and above 0."
            )
        # Dividing each row by its time makes the error relative: target 1 for every row.
        features = rows / times[:, None]
        scale = features.max(axis=0)
        # No term may be negative: of all subsets of terms whose solution has none, the best.
        best, best_error = np.zeros(4), np.inf
        for size in (4, 3, 2, 1):
            for terms in combinations(range(4), size):
                columns = features[:, terms] / scale[list(terms)]
                solution, *_ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)
                error = float(((columns @ solution - 1) ** 2).sum())
                if (solution >= 0).all() and error < best_error - 1e-12:
                    best, best_error = np.zeros(4), error
                    best[list(terms)] = solution / scale[list(terms)]
        token, pair, segment, micro_batch = (float(value) for value in best)
        by_length = features[:, :3] @ best[:3]  # the share of each time that depends on lengths
        if float(by_length.max()) < 1e-9:
            raise InputError(
                f"the {len(rows)} measured times do not grow with the lengths. Measure "
                f"micro-batches with more and longer segments."
            )
        return cls(per_token=token, per_pair=pair, per_segment=segment, per_micro_batch=micro_batch)

    def of_lengths(
        self, lengths: NDArray[np.integer], behind: NDArray[np.integer] | None = None
    ) -> FloatArray:
        """The cost of each segment of these lengths, without `per_micro_batch`.

        A segment behind p tokens, which it sees, costs what p + L tokens cost more than p.

        >>> Cost(per_token=2, per_pair=1).of_lengths(np.array([3]), behind=np.array([4])).tolist()
        [39.0]
        """
        length = lengths.astype(np.float64)
        seen = length if behind is None else length + 2.0 * behind
        return self.per_token * length + self.per_pair * length * seen + self.per_segment

    @property
    def moved(self) -> float:
        """`per_moved`, or its default."""
        return _MOVED * self.per_token if self.per_moved is None else self.per_moved

    @property
    def exchange(self) -> float:
        """`per_exchange`, or its default."""
        return _EXCHANGE * self.per_token if self.per_exchange is None else self.per_exchange

    def with_exchange(
        self,
        config: object,
        *,
        link: float = 50e9,
        per_layer: float = 0.0025,
        flops: float = 494.5e12,
    ) -> Cost:
        """This cost in FLOPs with `per_moved` and `per_exchange` of a model.

        `config` is as in `of_config`, or a name. Keys, values and their gradients move in bfloat16
        over a `link` of so many bytes per second; an exchange takes `per_layer` seconds in each
        layer; a device computes `flops` per second, by default half the peak of an H100.

        >>> cost = Cost.named("llama-3-8b").with_exchange("llama-3-8b")
        >>> round(cost.moved / cost.per_token, 3), round(cost.exchange / cost.per_token)
        (0.058, 879)
        """
        for name, value in (("link", link), ("flops", flops)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be finite and above 0, got {value:g}.")
        known = isinstance(config, str) and config in PRESETS
        model = read_model_config(PRESETS[str(config)] if known else config)
        size = ModelSize.of(model.section("text"))
        return replace(
            self,
            per_moved=4.0 * size.work.keys / link * flops,  # 2 bytes, forward and backward
            per_exchange=per_layer * size.layers * flops,
        )

    def to_dict(self) -> dict[str, float]:
        """Plain data for JSON, as in files of earlier versions where fields are at defaults."""
        data = asdict(self)
        return {k: v for k, v in data.items() if k not in _OF_SHARING or v is not None}

    @property
    def description(self) -> str:
        """The cost of L tokens in a few words, up to a factor: plans only compare costs.

        >>> Cost().description, Cost(per_token=12288, per_pair=0.5).description
        ('tokens only', '24576·L + L²')
        """
        if self.per_pair == self.per_segment == self.per_micro_batch == 0:
            return "tokens only"
        unit = self.per_pair or self.per_token or self.per_segment
        terms = [(self.per_token, "L"), (self.per_pair, "L²"), (self.per_segment, "")]
        text = " + ".join(_term(value / unit, power) for value, power in terms if value)
        if self.per_micro_batch:
            text += f", and {_term(self.per_micro_batch / unit, '')} per micro-batch"
        return text


def _term(factor: float, power: str) -> str:
    """(24576, "L") -> 24576·L, (1, "L²") -> L², (0.05, "") -> 0.05."""
    number = f"{factor:.0f}" if 100 <= factor < 1e9 else f"{factor:.3g}"
    if not power:
        return number
    return power if number == "1" else f"{number}·{power}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a device can do, as its vendor states it, and what connects it to others.

    flops      dense bfloat16 FLOPs per second
    memory     bytes
    bandwidth  bytes per second of its memory
    link       bytes per second to another device of its node, in one direction
    network    bytes per second to another node
    per_node   devices of a node

    >>> Gpu.named("h200").flops
    989000000000000.0
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_node: int = 8

    def __post_init__(self) -> None:
        for field in ("flops", "memory", "bandwidth", "link", "network"):
            if not 0 < real_field(self, f"gpu.{field}") < float("inf"):
                raise ConfigError(f"gpu.{field} must be finite and above 0.")
        whole_field(self, "gpu.per_node")

    @classmethod
    def named(cls, name: str) -> Gpu:
        """A well-known device; a wrong name raises an error that lists the names."""
        gpu = GPUS.get(str(name).lower())
        if gpu is None:
            raise ConfigError(
                f"unknown GPU {short_repr(name)}; expected one of: {', '.join(GPUS)}."
            )
        return gpu


# TFLOPs per second, MiB of memory as the driver reports it, its TB/s, GB/s of links and network.
GPUS: dict[str, Gpu] = {
    name: Gpu(
        name=name,
        flops=tflops * 1e12,
        memory=mebibytes * 2**20,
        bandwidth=bandwidth * 1e12,
        link=link * 1e9,
        network=network * 1e9,
    )
    for name, tflops, mebibytes, bandwidth, link, network in (
        ("b200", 2250, 183_359, 8.0, 900, 50),
        ("h200", 989, 143_771, 4.8, 450, 50),
        ("h100", 989, 81_559, 3.35, 450, 50),
        ("a100", 312, 81_920, 2.04, 300, 25),
        ("l40s", 362, 46_068, 0.864, 32, 12.5),
        ("a10g", 70, 23_028, 0.6, 32, 12.5),
    )
}
