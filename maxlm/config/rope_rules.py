"""Rules of rotary position embeddings."""

from collections.abc import Iterator

from maxlm.config.errors import Problem
from maxlm.config.rope import DynamicScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from maxlm.config.schema import Config


def problems(config: Config) -> Iterator[Problem]:
    """Settings of `model.rope` and `model.rope_local`."""
    model = config.model
    for name in ("rope", "rope_local"):
        rope: RopeConfig | None = getattr(model, name)
        if rope is None or rope == RopeConfig():
            continue
        if model.learned_positions is not None:
            yield f"model.{name}", "set", "positions are learned, so nothing is rotated", "remove it, or model.learned_positions"
        if rope.share is not None and model.latent is not None:
            yield f"model.{name}.share", rope.share, "has no meaning with model.latent, whose rope_dim says what is turned", "remove it"
        elif rope.share is not None and (dims := rope.rotary_dims(model.head_dim)) % 2 + (dims == 0):
            rule = f"turns {dims} of model.head_dim = {model.head_dim} dims, and RoPE turns pairs"
            yield f"model.{name}.share", rope.share, rule, "use one that makes an even number, such as 0.5"
        scaling, dims = rope.scaling, rope.rotary_dims(model.latent.rope_dim if model.latent else model.head_dim)
        factors = {"short_factor": scaling.short_factor, "long_factor": scaling.long_factor} if isinstance(scaling, LongRopeScaling) else {}
        for field, values in factors.items():
            if len(values) != dims // 2:
                rule = f"must have a factor for each of the {dims // 2} pairs of rotary dims"
                yield f"model.{name}.scaling.{field}", f"{len(values)} factors", rule, f"give {dims // 2}"
        if isinstance(scaling, DynamicScaling) and dims < 4:
            yield f"model.{name}.scaling.kind", "dynamic", f"needs two pairs of rotary dims, and {dims} dims are rotated", "use linear"
        if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
            rule = f"must be above low_freq_factor = {scaling.low_freq_factor:g}, since the ramp lies between them"
            yield f"model.{name}.scaling.high_freq_factor", scaling.high_freq_factor, rule, "Llama 3 has 1 and 4"
        if isinstance(scaling, YarnScaling) and scaling.beta_fast < scaling.beta_slow:
            rule = f"must not be below beta_slow = {scaling.beta_slow:g}, since the ramp lies between them"
            yield f"model.{name}.scaling.beta_fast", scaling.beta_fast, rule, "the paper has 32 and 1"
