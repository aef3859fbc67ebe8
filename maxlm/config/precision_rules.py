"""Rules of `precision.matmul`: with itself, with the model, and with the chip."""

from collections.abc import Iterator
from typing import NamedTuple

from maxlm.config.errors import ConfigError, Problem
from maxlm.config.precision import MX_TILE, QuantizedConfig
from maxlm.config.schema import Config, ModelConfig
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
    if quantized is not None:
        yield from (*_format(quantized), *_scales(config, quantized), *_rotation(config.model, quantized), *_skip(config, quantized))


def check_chip(config: Config, chip: str, source: str = "") -> None:
    """Raise ConfigError for a format that is no faster than bfloat16 on the chip called `chip`, one of ours, unless it is forced."""
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
            yield field, value, rule, f"use another tile, or put {name} in {FIELD}.skip" if name != "tokens" else "use another tile"
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
            yield from ((name, Sizes(width, hidden, f"model.d_model x {source}")) for name in ("gate", "up")[model.activation == "gelu" :])
            yield "down", Sizes(hidden, width, f"model.{source} x d_model")
    if moe is not None:
        yield "experts", Sizes(width, moe.d_ff, "model.d_model x moe.d_ff")
        yield "experts", Sizes(moe.d_ff, width, "model.moe.d_ff x d_model")
