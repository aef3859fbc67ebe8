"""Section `precision.matmul`: number formats of the model's matmuls (docs/precision.md)."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from maxlm.config import paths
from maxlm.config.fields import Bool, Count, Positive, Section

# Of one operand. e4m3 and e5m2: 8-bit floating point (arXiv 2209.05433); int4 is emulated.
ElementFormat = Literal["int8", "int4", "e4m3", "e5m2"]
# Names as in the parameter tree; `experts`: the three matrices of every expert.
QuantizedMatrix = Literal["query", "key", "value", "out", "query_down", "kv_down", "kv", "gate", "up", "down", "experts"]
LARGEST_SCALE = 2**24  # of a loss: with it the smallest number of float16, 2^-24, is 2^-48 of a gradient
MX_TILE = 32  # numbers that share a scale in the MX formats (OCP Microscaling, arXiv 2310.10537)


class QuantizedConfig(Section):
    """Matmuls of layers with 8-bit operands, forward and in the gradient; sums are exact, or float32. Routers stay in float32."""

    # fp8: e4m3. mxfp8: e4m3 with a power of two for every 32 numbers. int4: of weights only.
    format: Literal["int8", "fp8", "mxfp8", "int4"]
    # Of gradients in their two matmuls; what they are multiplied by is in `format`. bf16: `precision.compute`, as is what they are
    # multiplied by. None: int8 for int8; e4m3 for mxfp8 and tiles of fp8; e5m2 for other fp8; bf16 where only weights are quantized.
    gradients: Literal["int8", "e4m3", "e5m2", "bf16"] | None = None
    # Numbers that share a scale. tensor: a whole operand; channel: a row or column, all that is summed; tile: `tile` of what is summed.
    scaling: Literal["tensor", "channel", "tile"] | None = None  # None: channel; of mxfp8 tile
    tile: Annotated[int, Strict(), Field(ge=16, le=4096)] | None = None  # None: 128 with scaling: tile, 32 for mxfp8
    weights_only: Bool = False  # quantization-aware training: weights are rounded to the format, matmuls are in `precision.compute`
    stochastic_rounding: Bool = False  # of gradients, up or down with probabilities that make their mean exact
    hadamard: Annotated[int, Strict(), Field(ge=2, le=1024)] | None = (
        None  # rotate operands by Hadamard matrices of this size, a power of two
    )
    skip: Annotated[tuple[QuantizedMatrix, ...], Field(max_length=11)] = ()  # matrices kept in `precision.compute`
    first_layers: Count = 0  # layers at the beginning whose matrices are all kept so, in whole periods of model.layer_pattern
    last_layers: Count = 0  # and at the end
    unembedding: Bool = False  # the matmuls of the loss as well; gradients of logits are rounded stochastically to integers
    force: Bool = False  # allow a format that the chip is no faster with

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


class DispatchConfig(Section):
    """Tokens on their way to experts of other devices and back (mesh.expert), in 8 bits with a scale a token. Sums are not quantized."""

    format: Literal["int8", "fp8"]  # of tokens that are sent or gathered; fp8: e4m3
    outputs: Literal["int8", "e4m3", "bf16"] | None = (
        None  # of experts' outputs that are sent back. None: as format. bf16: precision.compute
    )
    gradients: Literal["int8", "e4m3", "e5m2", "bf16"] | None = None  # of both; None: as format

    @property
    def element(self) -> ElementFormat:
        """Format of tokens."""
        return "int8" if self.format == "int8" else "e4m3"

    @property
    def output_element(self) -> ElementFormat | None:
        """Format of outputs; None: `precision.compute`."""
        return None if self.outputs == "bf16" else self.outputs or self.element

    @property
    def gradient_element(self) -> ElementFormat | None:
        """Format of gradients of tokens and of outputs; None: `precision.compute`."""
        return None if self.gradients == "bf16" else self.gradients or self.element


class LossScaleConfig(Section):
    """Dynamic loss scaling (Micikevicius 2018, arXiv 1710.03740, section 3.2): gradients are computed of the loss times a power of two, so
    that small ones are above the smallest number of float16, and divided by it in float32. An overflow halves it.
    """

    initial: Positive = 2**16
    grow_after: Positive = 2000  # updates without an overflow, after which it is doubled, up to 2^24
    smallest: Positive = 1  # it is not halved below; an overflow at it is a fault of the run


def _no_passes(value: Any) -> Any:
    """`precision.matmul` was the number of passes of a float32 matmul."""
    if value in ("default", "high", "highest"):
        fix = "remove it" if value == "default" else f"write precision.float32_matmul={value}"
        paths.refuse("be a section with a `format`: passes of a float32 matmul are now precision.float32_matmul", fix)
    return value


MatmulSection = Annotated[QuantizedConfig, BeforeValidator(_no_passes)]
