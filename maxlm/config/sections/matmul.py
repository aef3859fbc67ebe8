"""Number formats of the model's matmuls (docs/explanation/precision.md): the section, and its rules with itself, the model and the chip."""

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, Strict

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Bool, Count, Section
from maxlm.config.sections.model import ModelConfig
from maxlm.hardware.chips import WORTH, Chip, MatmulFormat

# Of one operand. e4m3 and e5m2: 8-bit floating point (arXiv 2209.05433); int4 is emulated.
ElementFormat = Literal["int8", "int4", "e4m3", "e5m2"]
# Names as in the parameter tree; `experts`: the three matrices of every expert.
QuantizedMatrix = Literal["query", "key", "value", "out", "query_down", "kv_down", "kv", "gate", "up", "down", "experts"]
MX_TILE = 32  # numbers that share a scale in the MX formats (OCP Microscaling, arXiv 2310.10537)


class QuantizedConfig(Section):
    """Matmuls of layers with 8-bit operands, forward and in the gradient; sums are exact, or float32. Routers stay in float32."""

    format: Literal["int8", "fp8", "mxfp8", "int4"]
    """Number format of the operands of matmuls. int8: 8-bit integers; fp8: e4m3 (arXiv 2209.05433); mxfp8: e4m3 with a power of two for
    every 32 numbers (OCP Microscaling, arXiv 2310.10537); int4: 4-bit integers, for weights only.
    """
    gradients: Literal["int8", "e4m3", "e5m2", "bf16"] | None = None
    """Number format of gradients in their two matmuls; the other operands stay in `format`. bf16: these matmuls are computed in
    precision.compute. null: int8 for int8; e4m3 for mxfp8 and for fp8 in tiles; e5m2 for other fp8; bf16 where only weights are quantized.
    """
    scaling: Literal["tensor", "channel", "tile"] | None = None
    """Numbers that share a scale. tensor: a whole operand; channel: a row or column, which is all that a sum runs over; tile: `tile`
    numbers along the sum. null: channel, with mxfp8 tile.
    """
    tile: Annotated[int, Strict(), Field(ge=16, le=4096)] | None = None
    """Numbers along the sum that share a scale, with scaling: tile. null: 128, with mxfp8 32. Unit: numbers."""
    weights_only: Bool = False
    """Quantization-aware training: weights are rounded to the format, and matmuls are computed in precision.compute."""
    stochastic_rounding: Bool = False
    """Round gradients up or down at random, with probabilities that make their mean exact."""
    hadamard: Annotated[int, Strict(), Field(ge=2, le=1024)] | None = None
    """Size of the Hadamard matrices that rotate operands before they are rounded, a power of two, which spreads outliers (arXiv
    2404.00456). null: no rotation. Unit: dims.
    """
    skip: Annotated[tuple[QuantizedMatrix, ...], Field(max_length=11)] = ()
    """Matrices that are kept in precision.compute, by their names in the parameter tree; experts: the matrices of every expert."""
    first_layers: Count = 0
    """First layers with all matrices kept in precision.compute; must be whole periods of model.layer_pattern. Unit: layers."""
    last_layers: Count = 0
    """Last layers with all matrices kept in precision.compute; must be whole periods of model.layer_pattern. Unit: layers."""
    unembedding: Bool = False
    """Quantize the matmuls of the loss as well; gradients of the logits are rounded stochastically to integers."""
    force: Bool = False
    """Allow a format that is no faster than bfloat16 on the chip of the run."""

    @property
    def element(self) -> ElementFormat:
        """Format of both operands of a forward matmul; with `weights_only` of the weights alone."""
        return self.format if self.format in ("int8", "int4") else "e4m3"

    @property
    def gradient_element(self) -> ElementFormat | None:
        """Format of gradients; None: `precision.compute`."""
        if self.gradients is not None:
            return None if self.gradients == "bf16" else self.gradients
        if self.weights_only or self.format == "int4":
            return None
        return "e5m2" if self.format == "fp8" and self.tile_size is None else self.element

    @property
    def tile_size(self) -> int | None:
        """Numbers of the summed dim that share a scale; None: all of it."""
        if self.format == "mxfp8":
            return MX_TILE
        return (self.tile or 128) if self.scaling == "tile" else None


FIELD = "precision.matmul"
GRADIENTS = {"int8": ("int8", "bf16"), "int4": ("bf16",), "fp8": ("e5m2", "e4m3", "bf16"), "mxfp8": ("e4m3", "e5m2", "bf16")}


class Sides(NamedTuple):
    """Numbers that the two sides of a matrix have, and the settings they come from."""

    inputs: int
    outputs: int
    source: str


def _on_chip(quantized: QuantizedConfig, chip: Chip, precision_compute: str) -> Problems:
    """A format that is no faster than bfloat16 on this chip, unless it is forced."""
    if quantized.force or quantized.weights_only:
        return
    formats: dict[str, MatmulFormat] = {"int8": "int8", "fp8": "e4m3"}
    speeds = {name: chip.matmul_speed(format) for name, format in formats.items()}
    faster = [name for name, speed in speeds.items() if speed >= WORTH]
    use = f"use {faster[0]}" if faster else "remove the section"
    fix = f"{use}, or set {FIELD}.force=true"
    if quantized.tile_size is not None:
        rule = f"has a scale for every {quantized.tile_size} numbers, which is emulated in {precision_compute}"
        rule += f": no faster on {chip.name}"
        yield f"{FIELD}.{'format' if quantized.format == 'mxfp8' else 'scaling'}", _named(quantized), rule, fix
    elif speeds[quantized.format] < WORTH:
        rule = f"runs at {speeds[quantized.format]:.2f} times the speed of bfloat16 on {chip.name}"
        yield f"{FIELD}.format", quantized.format, rule, fix


def _named(quantized: QuantizedConfig) -> str:
    return quantized.format if quantized.format == "mxfp8" else "tile"


def _format(quantized: QuantizedConfig) -> Problems:
    name, gradients = quantized.format, quantized.gradients
    if name == "int4" and not quantized.weights_only:
        yield f"{FIELD}.format", name, "is for weights alone", f"set {FIELD}.weights_only=true, or use int8"
    if gradients is not None and gradients not in GRADIENTS[name]:
        yield f"{FIELD}.gradients", gradients, f"cannot be multiplied by {FIELD}.format = {name}", f"use {' or '.join(GRADIENTS[name])}"
    if quantized.weights_only and gradients not in (None, "bf16"):
        rule = f"contradicts {FIELD}.weights_only, which leaves matmuls in precision.compute"
        yield f"{FIELD}.gradients", gradients, rule, "remove one of them"
    if quantized.stochastic_rounding and quantized.gradient_element is None:
        rule = "does nothing, since gradients are not quantized"
        yield f"{FIELD}.stochastic_rounding", True, rule, f"remove it, or set {FIELD}.gradients"


def _scales(quantized: QuantizedConfig, model: ModelConfig, data_seq_len: int) -> Problems:
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
    tokens = [] if quantized.gradient_element is None else [("tokens", Sides(data_seq_len, size, "data.seq_len"))]
    for name, (inputs, outputs, source) in (*quantized_matrices(model, quantized), *tokens):
        sides = (inputs,) if quantized.gradient_element is None else (inputs, outputs)
        if wrong := [side for side in sides if side % size]:
            rule = f"needs tiles of {size} that divide {wrong[0]}, a side of `{name}` ({source})"
            other = "fp8" if quantized.format == "mxfp8" else "another tile"
            yield field, value, rule, f"use {other}, or put {name} in {FIELD}.skip" if name != "tokens" else f"use {other}"
            return


def _rotation(quantized: QuantizedConfig, model: ModelConfig) -> Problems:
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


def _skip(quantized: QuantizedConfig, model: ModelConfig) -> Problems:
    skip = quantized.skip
    known = tuple(dict.fromkeys(name for name, _ in matrices(model)))
    if other := [name for name in skip if name not in known]:
        yield f"{FIELD}.skip", list(skip), f"this model has no `{other[0]}`", f"it has {', '.join(known)}"
    elif len(set(skip)) < len(skip):
        yield f"{FIELD}.skip", list(skip), "names a matrix twice", "name it once"
    elif not set(known) - set(skip):
        yield f"{FIELD}.skip", list(skip), "leaves no matrix to quantize", f"take one out, or remove {FIELD}"


def _loss(quantized: QuantizedConfig) -> Problems:
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


def _layers_kept(quantized: QuantizedConfig, model: ModelConfig, mesh_stage: int) -> Problems:
    period = len(model.layer_pattern)
    tail = (model.n_layers - model.n_dense) % period
    for name, count, apart, where in (
        ("first_layers", quantized.first_layers, model.n_dense, "dense layers at the beginning"),
        ("last_layers", quantized.last_layers, tail, "layers of the incomplete period at the end"),
    ):
        if count == 0:
            continue
        if mesh_stage != 1:
            yield f"{FIELD}.{name}", count, f"all stages of a pipeline run one program (mesh.stage = {mesh_stage})", "use 0"
        elif count < apart or (count - apart) % period:
            other = f" next to the {apart} {where}" if apart else ""
            fix = f"use {apart + max(count - apart, 0) // period * period or period}"
            yield f"{FIELD}.{name}", count, f"is no whole number of periods of {period} layers{other}", fix
    if quantized.first_layers + quantized.last_layers >= model.n_layers:
        rule = f"leaves none of model.n_layers = {model.n_layers} to quantize"
        field = "last_layers" if quantized.last_layers else "first_layers"
        yield f"{FIELD}.{field}", getattr(quantized, field), rule, "lower it"


def quantized_matrices(model: ModelConfig, quantized: QuantizedConfig) -> list[tuple[str, Sides]]:
    """Matrices that are quantized."""
    return [(name, sizes) for name, sizes in matrices(model) if name not in quantized.skip]


def matrices(model: ModelConfig) -> Iterator[tuple[str, Sides]]:
    """Matrices of attention and of feed-forward layers by their names in the parameter tree; `experts`: the matrices of each expert."""
    width, heads, latent, moe = model.d_model, model.n_heads, model.latent, model.moe
    if latent is None:
        of_queries, of_keys = heads * model.head_dim, model.n_kv_heads * model.head_dim
        yield "query", Sides(width, of_queries, "model.d_model x n_heads head_dim")
        yield "key", Sides(width, of_keys, "model.d_model x n_kv_heads head_dim")
        yield "value", Sides(width, of_keys, "model.d_model x n_kv_heads head_dim")
        yield "out", Sides(of_queries, width, "model.n_heads head_dim x d_model")
    else:
        if latent.q_rank is not None:
            yield "query_down", Sides(width, latent.q_rank, "model.d_model x latent.q_rank")
        yield "query", Sides(latent.q_rank or width, heads * model.head_dim, "model.latent.q_rank or d_model x n_heads head_dim")
        yield "kv_down", Sides(width, latent.kv_rank + latent.rope_dim, "model.d_model x latent.kv_rank + rope_dim")
        yield "kv", Sides(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), "model.latent.kv_rank x heads")
        yield "out", Sides(heads * latent.value_dim, width, "model.n_heads latent.value_dim x d_model")
    shared = 0 if moe is None else moe.n_shared * moe.d_ff
    for hidden, source in ((shared, "moe.n_shared moe.d_ff"), (model.d_ff if moe is None or moe.n_dense else 0, "d_ff")):
        if hidden:
            yield from ((name, Sides(width, hidden, f"model.d_model x {source}")) for name in ("gate", "up")[not model.gated :])
            yield "down", Sides(hidden, width, f"model.{source} x d_model")
    if moe is not None:
        yield "experts", Sides(width, moe.d_ff, "model.d_model x moe.d_ff")
        yield "experts", Sides(moe.d_ff, width, "model.moe.d_ff x d_model")


CAPABILITY = Capability(key="precision.matmul", rules=(_format, _scales, _rotation, _skip, _layers_kept, _loss), chip_rules=(_on_chip,))
