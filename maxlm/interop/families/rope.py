"""Rotary positions in a config.json: the older `rope_scaling`, or `rope_parameters`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxlm.config.fields import LARGEST
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.rope import DynamicScaling, LinearScaling, RopeConfig, YarnScaling
from maxlm.interop.families.keys import Json, Keys, Row, Section

POSITIONS = "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # kinds of layers in `layer_types`


@dataclass(frozen=True)
class Rope(Row):
    """Rotary positions of all layers. `latent`: latent attention, where YaRN's `mscale_all_dim` also scales q k. `partial`: a part of each
    head may be rotated, by default `share`.
    """

    latent: bool = False
    partial: bool = False
    share: float = 1.0

    def read(self, keys: Keys, section: Section) -> None:
        older, newer = (self.parameters(keys, keys.section(name)) for name in ("rope_scaling", "rope_parameters"))
        # As the library does: the older key takes the place of the newer one.
        joined = {"rope_theta": keys.get("rope_theta", 10000.0), "partial_rotary_factor": keys.get("partial_rotary_factor")}
        section["rope"] = self.settings(joined | dict(older or newer), keys, older=bool(older))

    def write(self, config: ModelConfig) -> Json:
        partial = {"partial_rotary_factor": config.rope.share or 1.0} if self.partial else {}
        return {"rope_parameters": rope_values(config.rope) | partial}

    def parameters(self, keys: Keys, stated: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters as other families name them."""
        return stated

    def settings(self, values: Json, keys: Keys, *, older: bool) -> Section:
        """Return our `rope` section. `older`: `values` come from `rope_scaling`."""
        scaling = Keys(values, "config.json: " + ("rope_scaling" if older else "rope_parameters"))
        section: Section = {"theta": scaling.positive("rope_theta")}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        scaling.ignore("type")
        if not isinstance(kind, str) or kind not in _SCALINGS:
            scaling.refuse("rope_type", kind, f"is not supported: {', '.join(_SCALINGS)} are")
        if kind != "default":
            section["scaling"] = {"kind": kind, **_SCALINGS[kind](scaling, keys)}
            if kind == "yarn":
                section["scaling"] |= _yarn_gains(scaling, section["scaling"]["factor"], latent=self.latent)
        share = scaling.positive("partial_rotary_factor", self.share)
        if not self.partial and share != 1:
            scaling.refuse("partial_rotary_factor", share, "is not supported here: the library rotates whole heads in this family")
        if share != 1:
            section["share"] = share
        scaling.finish()
        return section


def rope_values(rope: RopeConfig) -> Json:
    """Return the `rope_parameters` that state a `rope` section."""
    scaling, values = rope.scaling, {"rope_theta": rope.theta, "rope_type": "default"}
    if scaling is None:
        return values
    stated = {name: value for name, value in scaling.model_dump(mode="json", exclude_none=True).items() if name != "original_seq_len"}
    values |= {"rope_type": stated.pop("kind")} | stated
    if not isinstance(scaling, LinearScaling | DynamicScaling):
        values[ORIGINAL] = scaling.original_seq_len
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is not None:
        values["mscale"] = scaling.mscale_all_dim
    return values


def positions(rope: RopeConfig, seq_len: int) -> int:
    """Return the context length in tokens: the length that RoPE is scaled to, or the length trained on here if it is larger."""
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        return scaling.original_seq_len  # from which the library computes
    return max(seq_len, round(scaling.factor * getattr(scaling, "original_seq_len", 0)) if scaling else 0)


def _original(keys: Keys, config: Keys) -> int:
    """Return the length of sequences before RoPE was scaled; as in the library the model's own, where it is not stated."""
    return keys.count(ORIGINAL, config.get(POSITIONS))


def _longrope(keys: Keys, config: Keys) -> Section:
    """The library reads `factor`, else the longest sequence over the original one (modeling_rope_utils.py)."""
    original = _original(keys, config)
    factor = keys.positive("factor") if keys.get("factor") is not None else config.count(POSITIONS) / original
    told = {} if keys.get("attention_factor") is None else {"attention_factor": keys.positive("attention_factor")}
    factors = {name: keys.get(name) for name in ("short_factor", "long_factor")}
    for name, values in factors.items():
        if not isinstance(values, list) or not all(type(n) in (int, float) and 0 < n < LARGEST for n in values):
            keys.refuse(name, values, "must be a list of numbers above 0")
    return {"factor": max(factor, 1.0), **factors, "original_seq_len": original, **told}


def _dynamic(keys: Keys, config: Keys) -> Section:
    """The library computes with the model's longest sequence, whatever else is stated."""
    keys.ignore(ORIGINAL)
    return {"factor": keys.positive("factor"), "original_seq_len": config.count(POSITIONS)}


def _llama3(keys: Keys, config: Keys) -> Section:
    factors = {name: keys.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return {**factors, "original_seq_len": _original(keys, config)}


def _yarn(keys: Keys, config: Keys) -> Section:
    factors = {"factor": keys.positive("factor"), "beta_fast": keys.number("beta_fast", 32), "beta_slow": keys.number("beta_slow", 1)}
    return {**factors, "original_seq_len": _original(keys, config), "truncate": keys.flag("truncate", True)}


def _yarn_gains(keys: Keys, factor: float, *, latent: bool) -> Section:
    """YaRN's attention temperature as the library reads it (modeling_rope_utils.py, and the attention of DeepSeek-V2 and V3).

    Rotated dims are multiplied by `attention_factor`, else by g(mscale) / g(mscale_all_dim) where both are set, else by g(1), with
    g(m) = 0.1 m ln(factor) + 1; with latent attention q k is also multiplied by g(mscale_all_dim)^2.
    """
    rotated, all_dims = keys.number("mscale", 0), keys.number("mscale_all_dim", 0)
    told = None if keys.get("attention_factor") is None else keys.positive("attention_factor")
    gain = (lambda m: 0.1 * m * math.log(factor) + 1) if factor > 1 else lambda m: 1.0
    if min(rotated, all_dims) < 0:
        keys.refuse("mscale", min(rotated, all_dims), "and mscale_all_dim must not be below 0")
    both = gain(rotated) / gain(all_dims) if rotated and all_dims else gain(1.0)
    usual = 1.0 if latent and all_dims else gain(1.0)  # the gain of our settings without attention_factor
    section = {"mscale_all_dim": all_dims} if latent and all_dims else {}
    read = both if told is None else told
    return section if read == usual else {**section, "attention_factor": read}


_SCALINGS: dict[str, Callable[[Keys, Keys], Section]] = {
    "default": lambda keys, config: {},
    "linear": lambda keys, config: {"factor": keys.positive("factor")},
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}
