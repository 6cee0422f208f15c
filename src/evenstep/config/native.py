"""The native schema: plain data <-> `Settings`.

layout: {kind: packed, max_tokens: 16384}   the keys of a recipe
log_probs: {layout: {max_tokens: 32768}}    what differs without gradients; {} if nothing does
stream: {pool: {samples: 64}, seed: 1}      how samples are read
data: {paths: texts/}                       the samples of a training run
model: {path: llama/}, optimizer: {lr: 1e-4}  what is trained, and how
trainer: {out: run/}                        how steps are run
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from evenstep.config.decode import DEFAULT_KIND, decode, decode_recipe
from evenstep.config.faults import FaultsError, not_a_mapping, unknown_key
from evenstep.config.nested import difference, merged
from evenstep.config.settings import Settings, StreamSettings, TrainerSettings
from evenstep.config.training import ModelSettings, OptimizerSettings
from evenstep.core.layout import LAYOUTS
from evenstep.core.recipe import Recipe
from evenstep.core.text import shorten
from evenstep.data.corpus import Corpus
from evenstep.data.pool import Pool
from evenstep.errors import ConfigError

PARTS = {
    "stream": StreamSettings,
    "model": ModelSettings,
    "data": Corpus,
    "optimizer": OptimizerSettings,
    "trainer": TrainerSettings,
}
"""The sections of a training run."""
SECTIONS = ("log_probs", *PARTS)


def settings_from(data: Mapping[str, Any], source: str = "") -> Settings:
    """Decode plain data into settings; one error reports all faults.

    >>> data = {"layout": {"max_tokens": 8192}, "log_probs": {"layout": {"max_tokens": 16384}}}
    >>> settings_from(data).log_probs.layout.max_tokens
    16384
    """
    settings, faults = decode_settings(data)
    if settings is None:
        raise FaultsError(faults, source)
    return settings


def decode_settings(data: Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
    """The settings, or None and all faults."""
    known = [*(field.name for field in dataclasses.fields(Recipe)), *SECTIONS]
    faults = [
        unknown_key(shorten(str(key)), "A configuration", known) for key in data if key not in known
    ]
    own = {key: value for key, value in data.items() if key in known and key not in SECTIONS}
    recipe, found = decode_recipe(own)
    log_probs, others = _log_probs(own, data.get("log_probs"), found)
    faults += found + others
    parts: dict[str, Any] = {}
    for name, kind in PARTS.items():
        if data.get(name) is not None:
            parts[name], found = _section(kind, data, name)
            faults += found
    stream = parts.get("stream")
    if not faults and stream is not None and stream.pool is not None:
        faults += _pool_faults(recipe, stream)
    if faults:
        return None, faults
    return Settings(recipe=recipe, log_probs=log_probs, **parts), []


def _log_probs(
    own: dict[str, Any], section: Any, known: list[str]
) -> tuple[Recipe | None, list[str]]:
    """The recipe for log-probabilities, and the faults that the training recipe does not have."""
    if section is None:
        return None, []
    if not isinstance(section, Mapping):
        return None, [not_a_mapping("log_probs", section)]
    recipe, faults = decode_recipe(inherited(own, section))
    return recipe, [f"log_probs: {fault}" for fault in faults if fault not in known]


def inherited(own: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe data of `log_probs`: that of training with what the section changes.

    Another kind of layout keeps the keys that both kinds have.

    >>> inherited({"layout": {"kind": "packed", "max_tokens": 8, "packer": "optimal"}},
    ...           {"layout": {"kind": "padded"}})
    {'layout': {'kind': 'padded', 'max_tokens': 8}}
    """
    base: dict[str, Any] = copy.copy(dict(own))
    layout, over = base.get("layout"), section.get("layout")
    if isinstance(layout, Mapping) and isinstance(over, Mapping):
        base["layout"] = _of_kind(layout, over.get("kind", layout.get("kind", DEFAULT_KIND)))
        if "packer" in over or "packer" not in base["layout"]:
            base.pop("seed", None)  # of the packer of training
    cost = section.get("cost")
    if isinstance(cost, Mapping) and "model" in cost:
        base.pop("cost", None)
    result: dict[str, Any] = merged(base, dict(section))
    return result


def _of_kind(layout: Mapping[str, Any], kind: object) -> dict[str, Any]:
    """The keys that a layout of another kind has too; all if the kind stays."""
    if layout.get("kind", DEFAULT_KIND) == kind or not isinstance(kind, str):
        return dict(layout)
    fields = dataclasses.fields(LAYOUTS[kind]) if kind in LAYOUTS else ()
    return {key: value for key, value in layout.items() if key in {f.name for f in fields}}


def _section(kind: type, data: Mapping[str, Any], name: str) -> tuple[Any, list[str]]:
    section = data[name]
    if not isinstance(section, Mapping):
        return None, [not_a_mapping(name, section)]
    return decode(kind, section, (name,))


def _pool_faults(recipe: Recipe, stream: StreamSettings) -> list[str]:
    """What a pool cannot do with this recipe."""
    from evenstep.data.reader import PoolBatcher  # imports the compiler

    assert stream.pool is not None
    columns = {name: len for name in recipe.limits.columns if name != "loss_tokens"}
    try:
        PoolBatcher(recipe, stream.pool, columns)
    except ConfigError as error:
        return [f"stream.pool: {error}"]
    return []


def native_data(settings: Settings) -> dict[str, Any]:
    """The shortest data that decodes into these settings; `layout.kind` is always there.

    >>> native_data(settings_from({"layout": {"max_tokens": 8192, "rows": 1}, "seed": 0}))
    {'layout': {'kind': 'packed', 'max_tokens': 8192}}
    """
    recipe = settings.recipe
    data = _without_defaults(recipe)
    if settings.log_probs is not None:
        data["log_probs"] = difference(recipe.to_dict(), settings.log_probs.to_dict())
    default, whole = Settings(recipe=recipe).to_dict(), settings.to_dict()
    for name in PARTS:
        given = difference(default[name] or {}, whole[name] or {})
        if name == "stream" and settings.stream.pool is not None:
            pool = whole["stream"]["pool"]
            given["pool"] = {
                "samples": pool["samples"],
                **difference(dataclasses.asdict(Pool()), pool),
            }
        if given:
            data[name] = {key: value for key, value in given.items() if value is not None}
    return data


def _without_defaults(recipe: Recipe) -> dict[str, Any]:
    whole = recipe.to_dict()
    kind = whole["layout"]["kind"]
    default = Recipe(layout=LAYOUTS[kind](max_tokens=1)).to_dict()
    default["layout"]["max_tokens"] = None
    given = difference(default, whole)
    given["layout"] = {"kind": kind, **given.get("layout", {})}
    for name in ("second_work", "sharing"):
        if whole.get(name) is not None:
            given[name] = {key: value for key, value in whole[name].items() if value is not None}
    return {"layout": given["layout"], **given}
