"""dtypes of the computation, of tokens on their way to experts, and the loss scale of float16."""

from collections.abc import Iterator
from typing import Literal

from maxlm.config.capability import Capability, Inert, Problems, excludes
from maxlm.config.fields import Positive, Section
from maxlm.config.sections.matmul import FIELD, ElementFormat, QuantizedConfig
from maxlm.hardware import topologies
from maxlm.hardware.chips import Chip

LARGEST_SCALE = 2**24  # of a loss: with it the smallest number of float16, 2^-24, is 2^-48 of a gradient


class DispatchConfig(Section):
    """Tokens on their way to experts of other devices and back (mesh.expert), in 8 bits with a scale a token. Sums are not quantized."""

    format: Literal["int8", "fp8"]
    """Number format of tokens on their way to experts of other devices. int8: 8-bit integers; fp8: e4m3."""
    outputs: Literal["int8", "e4m3", "bf16"] | None = None
    """Number format of the experts' outputs on their way back. bf16: precision.compute. null: as `format`."""
    gradients: Literal["int8", "e4m3", "e5m2", "bf16"] | None = None
    """Number format of the gradients of both on their way. bf16: precision.compute. null: as `format`."""

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
    """Scale of the loss in the first update, a power of two. Unit: factor."""
    grow_after: Positive = 2000
    """Updates without an overflow after which the scale is doubled, up to 2^24. Unit: updates."""
    smallest: Positive = 1
    """Scale below which it is not halved; an overflow at this scale counts as a fault of the run. Unit: factor."""


class PrecisionConfig(Section):
    """dtypes. Master weights, optimizer state, norms, softmax and loss are always float32."""

    compute: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of matmuls and activations. bfloat16: for TPUs and recent GPUs; float16: for GPUs without bfloat16, with a loss scale;
    float32: for CPUs and for comparisons.
    """
    float32_matmul: Literal["default", "high", "highest"] = "default"
    """Precision of float32 matmuls, with compute: float32. default: the fastest of the chip; high and highest: more passes, closer to
    float32.
    """
    matmul: QuantizedConfig | None = None
    """Matmuls of layers in 8 bits; null: their operands are in `compute`."""
    dispatch: DispatchConfig | None = None
    """Tokens on their way to experts in 8 bits; null: they are sent in `compute`."""
    loss_scale: LossScaleConfig | None = None
    """Dynamic scale of the loss, with compute: float16 (arXiv 1710.03740); null: with its defaults."""

    @property
    def scaling(self) -> LossScaleConfig | None:
        """Settings of the loss scale; None unless `compute` is float16."""
        return (self.loss_scale or LossScaleConfig()) if self.compute == "float16" else None


def _dispatch(precision: PrecisionConfig, model_moe: object) -> Problems:
    dispatch = precision.dispatch
    if dispatch is not None and model_moe is None:
        yield "precision.dispatch.format", dispatch.format, "the model has no experts (model.moe)", "remove precision.dispatch"


def _loss_scale(precision: PrecisionConfig) -> Problems:
    scale = precision.scaling
    if scale is None:
        return
    for name in ("initial", "smallest"):
        value = getattr(scale, name)
        if value & (value - 1) or value > LARGEST_SCALE:
            rule = f"is no power of two up to {LARGEST_SCALE}, by which alone multiplying is exact"
            yield f"precision.loss_scale.{name}", value, rule, f"use {min(1 << (value.bit_length() - 1), LARGEST_SCALE)}"
            return
    if scale.smallest > scale.initial:
        rule = f"is above precision.loss_scale.initial = {scale.initial}"
        yield "precision.loss_scale.smallest", scale.smallest, rule, f"use {scale.initial} at most"


VANISH = ", and in float16 those that the loss's scale has been taken out of would vanish"
EXCLUDED = {
    "memory.offload_state": f"hands gradients on in precision.compute{VANISH}",
    "compression": f"sums gradients in precision.compute while it warms up{VANISH}",
    "diloco": "has workers meet after the last update, and in float16 an overflow of that one would skip the meeting",
}
FIX = "remove it, or use precision.compute=bfloat16 or float32"
_float16 = excludes(EXCLUDED, fix=FIX, when=lambda precision: precision.scaling is not None)


def _tiles(precision: PrecisionConfig) -> Problems:
    quantized = precision.matmul
    if precision.scaling is not None and quantized is not None and quantized.tile_size is not None:
        rule = "has tiles, which are emulated by powers of two that float16 does not hold"
        yield FIELD, "set", rule, f"use another {FIELD}.scaling, or precision.compute=bfloat16"


def _on_chip(precision: PrecisionConfig, chip: Chip) -> Problems:
    if precision.compute == "float16" and topologies.is_tpu(chip):
        yield "precision.compute", "float16", f"is for GPUs without bfloat16, and {chip.name} multiplies in bfloat16", "remove it"


def _inert(precision: PrecisionConfig, mesh_expert: int, model_moe: object) -> Iterator[Inert]:
    compute = precision.compute
    if compute != "float32":
        yield Inert("precision.float32_matmul", f"it is for float32, and precision.compute = {compute}", "use precision.compute=float32")
    if compute != "float16":
        yield Inert("precision.loss_scale", f"it is for float16, and precision.compute = {compute}", "use precision.compute=float16")
    if mesh_expert == 1 and model_moe is not None:
        yield Inert("precision.dispatch", "mesh.expert = 1, so that no token travels", "raise mesh.expert")


CAPABILITY = Capability(
    key="precision",
    rules=(_dispatch, _loss_scale, _float16, _tiles),
    chip_rules=(_on_chip,),
    inert=_inert,
    identity=lambda one: {} if one.scaling is None else {"precision.compute": one.compute},  # the loss scale is part of the state
    transforms=("maxlm.training.loss_scale:LossScaling",),
    readers=("maxlm.training.loss_scale:Overflows",),
)
