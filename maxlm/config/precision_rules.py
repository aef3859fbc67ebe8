"""Rules of `precision.matmul`: with itself, with the model, and with the chip."""

from collections.abc import Iterator
from typing import NamedTuple

from maxlm.config.errors import ConfigError, Problem
from maxlm.config.precision import LARGEST_SCALE, MX_TILE, LossScaleConfig, QuantizedConfig
from maxlm.config.schema import Config, ModelConfig
from maxlm.hardware import topologies
from maxlm.hardware.chips import WORTH, MatmulFormat, chip_named

FIELD = "precision.matmul"
GRADIENTS = {"int8": ("int8", "bf16"), "int4": ("bf16",), "fp8": ("e5m2", "e4m3", "bf16"), "mxfp8": ("e4m3", "e5m2", "bf16")}


class Sizes(NamedTuple):
    """Numbers that the two sides of a matrix have, and the settings they come from."""

    inputs: int
    outputs: int
    source: str


def problems(config: Config) -> Iterator[Problem]:
    """Contradictions of the section, and of `precision.dispatch`."""
    quantized, dispatch = config.precision.matmul, config.precision.dispatch
    if dispatch is not None and config.model.moe is None:
        yield "precision.dispatch.format", dispatch.format, "the model has no experts (model.moe)", "remove precision.dispatch"
    if config.precision.scaling is not None:
        yield from _float16(config, config.precision.scaling)
    if quantized is not None:
        yield from (*_format(quantized), *_scales(config, quantized), *_rotation(config.model, quantized))
        yield from (*_skip(config, quantized), *_loss(quantized))


def _float16(config: Config, scale: LossScaleConfig) -> Iterator[Problem]:
    """Settings of the loss's scale, and what hands gradients on in float16 after they are divided by it."""
    for name in ("initial", "smallest"):
        value = getattr(scale, name)
        if value & (value - 1) or value > LARGEST_SCALE:
            rule = f"is no power of two up to {LARGEST_SCALE}, by which alone multiplying is exact"
            yield f"precision.loss_scale.{name}", value, rule, f"use {min(1 << (value.bit_length() - 1), LARGEST_SCALE)}"
            return
    if scale.smallest > scale.initial:
        rule = f"is above precision.loss_scale.initial = {scale.initial}"
        yield "precision.loss_scale.smallest", scale.smallest, rule, f"use {scale.initial} at most"
    vanish = ", and in float16 those that the loss's scale has been taken out of would vanish"
    refused = {
        "memory.offload_state": (config.memory.offload_state, f"hands gradients on in precision.compute{vanish}"),
        "compression": (config.compression, f"sums gradients in precision.compute while it warms up{vanish}"),
        "diloco": (config.diloco, "has workers meet after the last update, and in float16 an overflow of that one would skip the meeting"),
    }
    for field, (section, rule) in refused.items():
        if section is not None:
            yield field, "set", rule, "remove it, or use precision.compute=bfloat16 or float32"
    quantized = config.precision.matmul
    if quantized is not None and quantized.tile_size is not None:
        rule = "has tiles, which are emulated by powers of two that float16 does not hold"
        yield FIELD, "set", rule, f"use another {FIELD}.scaling, or precision.compute=bfloat16"


def check_chip(config: Config, chip: str, source: str = "") -> None:
    """Raise ConfigError for a format that is no faster than bfloat16 on the chip called `chip`, one of ours, unless it is forced; and for
    float16 on a TPU.
    """
    if config.precision.compute == "float16" and topologies.is_tpu(chip_named(chip)):
        raise ConfigError("precision.compute", "float16", f"is for GPUs without bfloat16, and {chip} multiplies in bfloat16", "remove it")
    quantized = config.precision.matmul
    if quantized is None or quantized.force or quantized.weights_only:
        return
    formats: dict[str, MatmulFormat] = {"int8": "int8", "fp8": "e4m3"}
    speeds = {name: chip_named(chip).matmul_speed(format) for name, format in formats.items()}
    faster = [name for name, speed in speeds.items() if speed >= WORTH]
    use = f"use {faster[0]}" if faster else "remove the section"
    fix = f"{use}, or set {FIELD}.force=true"
    if quantized.tile_size is not None:
        rule = f"has a scale for every {quantized.tile_size} numbers, which is emulated in {config.precision.compute}: no faster on {chip}"
        raise ConfigError(f"{FIELD}.{'format' if quantized.format == 'mxfp8' else 'scaling'}", _named(quantized), rule, fix, source)
    if speeds[quantized.format] < WORTH:
        rule = f"runs at {speeds[quantized.format]:.2f} times the speed of bfloat16 on {chip}"
        raise ConfigError(f"{FIELD}.format", quantized.format, rule, fix, source)


def _named(quantized: QuantizedConfig) -> str:
    return quantized.format if quantized.format == "mxfp8" else "tile"


def _format(quantized: QuantizedConfig) -> Iterator[Problem]:
    name, gradients = quantized.format, quantized.gradients
    if name == "int4" and not quantized.weights_only:
        yield f"{FIELD}.format", name, "is for weights alone", f"set {FIELD}.weights_only=true, or use int8"
    if gradients is not None and gradients not in GRADIENTS[name]:
        yield f"{FIELD}.gradients", gradients, f"cannot be multiplied by {FIELD}.format = {name}", f"use {' or '.join(GRADIENTS[name])}"
    if quantized.weights_only and gradients not in (None, "bf16"):
        rule = f"contradicts {FIELD}.weights_only, whose matmuls are in precision.compute"
        yield f"{FIELD}.gradients", gradients, rule, "remove one of them"
    if quantized.stochastic_rounding and quantized.gradient_element is None:
        rule = "does nothing, since gradients are not quantized"
        yield f"{FIELD}.stochastic_rounding", True, rule, f"remove it, or set {FIELD}.gradients"


def _scales(config: Config, quantized: QuantizedConfig) -> Iterator[Problem]:
    scaling, tile = quantized.scaling, quantized.tile
    if quantized.format == "mxfp8":
        if scaling not in (None, "tile"):
            yield f"{FIELD}.scaling", scaling, f"mxfp8 has a scale for every {MX_TILE} numbers", "remove it, or use fp8"
        if tile not in (None, MX_TILE):
            yield f"{FIELD}.tile", tile, f"mxfp8 has a scale for every {MX_TILE} numbers", "remove it, or use fp8"
    elif tile is not None and scaling != "tile":
        yield f"{FIELD}.tile", tile, f"is read with {FIELD}.scaling = tile alone", "remove it, or set scaling: tile"
    size = quantized.tile_size
    if size is None:
        return
    field = f"{FIELD}.tile" if tile is not None else f"{FIELD}.{'format' if quantized.format == 'mxfp8' else 'scaling'}"
    value = tile if tile is not None else _named(quantized)
    tokens = [] if quantized.gradient_element is None else [("tokens", Sizes(config.data.seq_len, size, "data.seq_len"))]
    for name, (inputs, outputs, source) in (*quantized_matrices(config.model, quantized), *tokens):
        sides = (inputs,) if quantized.gradient_element is None else (inputs, outputs)
        if wrong := [side for side in sides if side % size]:
            rule = f"needs tiles of {size} that divide {wrong[0]}, a side of `{name}` ({source})"
            other = "fp8" if quantized.format == "mxfp8" else "another tile"
            yield field, value, rule, f"use {other}, or put {name} in {FIELD}.skip" if name != "tokens" else f"use {other}"
            return


def _rotation(model: ModelConfig, quantized: QuantizedConfig) -> Iterator[Problem]:
    size = quantized.hadamard
    if size is None:
        return
    if size & (size - 1):
        yield f"{FIELD}.hadamard", size, "is no power of two", f"use {1 << (size.bit_length() - 1)}"
        return
    for name, (inputs, _, source) in quantized_matrices(model, quantized):
        if inputs % size:
            largest = inputs & -inputs
            rule = f"does not divide the {inputs} inputs of `{name}` ({source})"
            fix = f"use {largest}, or put {name} in {FIELD}.skip" if largest > 1 else f"put {name} in {FIELD}.skip"
            yield f"{FIELD}.hadamard", size, rule, fix
            return


def _skip(config: Config, quantized: QuantizedConfig) -> Iterator[Problem]:
    model, skip = config.model, quantized.skip
    known = tuple(dict.fromkeys(name for name, _ in matrices(model)))
    if other := [name for name in skip if name not in known]:
        yield f"{FIELD}.skip", list(skip), f"this model has no `{other[0]}`", f"it has {', '.join(known)}"
    elif len(set(skip)) < len(skip):
        yield f"{FIELD}.skip", list(skip), "names a matrix twice", "name it once"
    elif not set(known) - set(skip):
        yield f"{FIELD}.skip", list(skip), "leaves no matrix to quantize", f"take one out, or remove {FIELD}"
    yield from _layers_kept(config, quantized)


def _loss(quantized: QuantizedConfig) -> Iterator[Problem]:
    """The loss has a scale a row or column, and rounds as it must."""
    others = {
        "format": quantized.format in ("int4", "mxfp8"),
        "weights_only": quantized.weights_only,
        "gradients": quantized.gradient_element is None,
        "scaling": quantized.scaling not in (None, "channel"),
        "hadamard": quantized.hadamard is not None,
        "stochastic_rounding": quantized.stochastic_rounding,
    }
    if quantized.unembedding and (found := [name for name, other in others.items() if other]):
        rule = f"multiplies in int8 or fp8 with a scale for each row, and knows no {FIELD}.{found[0]} = {getattr(quantized, found[0])}"
        yield f"{FIELD}.unembedding", True, rule, "remove one of them"


def _layers_kept(config: Config, quantized: QuantizedConfig) -> Iterator[Problem]:
    model, period = config.model, len(config.model.layer_pattern)
    tail = (model.n_layers - model.n_dense) % period
    for name, count, apart, where in (
        ("first_layers", quantized.first_layers, model.n_dense, "dense layers at the beginning"),
        ("last_layers", quantized.last_layers, tail, "layers of the incomplete period at the end"),
    ):
        if count == 0:
            continue
        if config.mesh.stage != 1:
            yield f"{FIELD}.{name}", count, f"all stages of a pipeline run one program (mesh.stage = {config.mesh.stage})", "use 0"
        elif count < apart or (count - apart) % period:
            beside = f" beside the {apart} {where}" if apart else ""
            fix = f"use {apart + max(count - apart, 0) // period * period or period}"
            yield f"{FIELD}.{name}", count, f"is no whole number of periods of {period} layers{beside}", fix
    if quantized.first_layers + quantized.last_layers >= model.n_layers:
        rule = f"leaves none of model.n_layers = {model.n_layers} to quantize"
        field = "last_layers" if quantized.last_layers else "first_layers"
        yield f"{FIELD}.{field}", getattr(quantized, field), rule, "lower it"


def quantized_matrices(model: ModelConfig, quantized: QuantizedConfig) -> list[tuple[str, Sizes]]:
    """Matrices that are quantized."""
    return [(name, sizes) for name, sizes in matrices(model) if name not in quantized.skip]


def matrices(model: ModelConfig) -> Iterator[tuple[str, Sizes]]:
    """Matrices of attention and of feed-forward layers by their names in the parameter tree; `experts`: those of each expert."""
    width, heads, latent, moe = model.d_model, model.n_heads, model.latent, model.moe
    if latent is None:
        of_queries, of_keys = heads * model.head_dim, model.n_kv_heads * model.head_dim
        yield "query", Sizes(width, of_queries, "model.d_model x n_heads head_dim")
        yield "key", Sizes(width, of_keys, "model.d_model x n_kv_heads head_dim")
        yield "value", Sizes(width, of_keys, "model.d_model x n_kv_heads head_dim")
        yield "out", Sizes(of_queries, width, "model.n_heads head_dim x d_model")
    else:
        if latent.q_rank is not None:
            yield "query_down", Sizes(width, latent.q_rank, "model.d_model x latent.q_rank")
        yield "query", Sizes(latent.q_rank or width, heads * model.head_dim, "model.latent.q_rank or d_model x n_heads head_dim")
        yield "kv_down", Sizes(width, latent.kv_rank + latent.rope_dim, "model.d_model x latent.kv_rank + rope_dim")
        yield "kv", Sizes(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), "model.latent.kv_rank x heads")
        yield "out", Sizes(heads * latent.value_dim, width, "model.n_heads latent.value_dim x d_model")
    shared = 0 if moe is None else moe.n_shared * moe.d_ff
    for hidden, source in ((shared, "moe.n_shared moe.d_ff"), (model.d_ff if moe is None or moe.n_dense else 0, "d_ff")):
        if hidden:
            yield from ((name, Sizes(width, hidden, f"model.d_model x {source}")) for name in ("gate", "up")[not model.gated :])
            yield "down", Sizes(hidden, width, f"model.{source} x d_model")
    if moe is not None:
        yield "experts", Sizes(width, moe.d_ff, "model.d_model x moe.d_ff")
        yield "experts", Sizes(moe.d_ff, width, "model.moe.d_ff x d_model")
