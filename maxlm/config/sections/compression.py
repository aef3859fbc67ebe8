"""Compression of gradients where they cross slow links: between slices, or between workers of local updates."""

from typing import Annotated, Any, Literal

from pydantic import Field

from maxlm.config.capability import FLOAT32, Capability, Problems, Sizes, excludes
from maxlm.config.fields import Count, Float, Positive, Section
from maxlm.config.sections.mesh import MeshConfig
from maxlm.config.sections.optimizer import OptimizerConfig


class Int8Compression(Section):
    """8 bits a number, with a scale for every 256, and feedback of the errors (arXiv 1809.07599): half the bytes of bfloat16, a quarter of
    float32's. The optimizer stays as it is.
    """

    kind: Literal["int8"]
    warmup_steps: Count = 0
    """First updates, with gradients that are summed without compression. Unit: updates."""

    @property
    def wire_bits(self) -> float:
        """Bits a number that a stage sends, scales included; as a sum without compression, a compressed one has two stages."""
        return 8 + 32 / 256


class SignCompression(Section):
    """One bit a number of Adam's momentum, with a scale for every 1024 (1-bit Adam, arXiv 2102.02888). After the warm-up, which is Adam as
    ever, its second moments stay as they are then.
    """

    kind: Literal["sign"]
    warmup_steps: Positive
    """First updates, with gradients summed without compression and second moments that still move; the paper takes a seventh to a fifth of
    the run. Unit: updates.
    """

    @property
    def wire_bits(self) -> float:
        """As of `Int8Compression`."""
        return 1 + 32 / 1024


class TopKCompression(Section):
    """The largest of every 4096 accumulated changes, with momentum (Deep Gradient Compression, arXiv 1712.01887): 4 bytes for each that is
    sent. After the warm-up Adam's second moments stay as they are then, as in 1-bit Adam.
    """

    kind: Literal["top_k"]
    warmup_steps: Positive
    """First updates, with gradients summed without compression. Unit: updates."""
    density: Annotated[Float, Field(ge=2**-12, le=2**-4)] = 2**-6
    """Share of the numbers that are sent, after the ramp. Unit: share."""
    ramp_steps: Count = 0
    """Updates after the warm-up in which the density falls from 1/4 to `density`, by a factor of 4 at a time; 0: it falls at once. Unit:
    updates.
    """

    @property
    def wire_bits(self) -> float:
        """As of `Int8Compression`, between two devices; between n it is n / 2 times that, since each sends to all."""
        return 32 * self.density


CompressionConfig = Annotated[Int8Compression | SignCompression | TopKCompression, Field(discriminator="kind")]


def _links(settings: CompressionConfig, mesh: MeshConfig, diloco: object) -> Problems:
    """Links that are slow enough to compress what crosses them."""
    if diloco is None and mesh.slices == 1:
        rule = "is for links between slices or between workers of local updates, and here are neither (mesh.slices = 1, no diloco)"
        yield "compression", "set", rule, "remove it, or set mesh.slices or diloco"
    elif diloco is None and mesh.across_slices != "data":
        rule = "sends more than gradients between slices, and compression is of gradients"
        yield "mesh.across_slices", mesh.across_slices, rule, "use data, or remove compression"


EXCLUDED = {
    "model.lora": "trains adapters, and their gradients are small",
    "elastic": "changes the number of devices along mesh.data, each of which has feedback of its own",
}


def _moments(settings: CompressionConfig, health_layers: str | None, diloco: object, optimizer: OptimizerConfig) -> Problems:
    """Gradients of layers, and second moments that stay as they are after the warm-up."""
    if health_layers is not None:
        rule = "compares the gradients of layers, which are not summed before they are compressed"
        yield "health.layers", health_layers, rule, "remove it, or compression"
    frozen = settings.kind != "int8" and diloco is None
    if frozen and not optimizer.facts.freezes:
        rule = f"has no second moments that compression.kind = {settings.kind} could keep as they are after its warm-up"
        yield "optimizer.name", optimizer.name, rule, "use adamw, or compression.kind=int8"
    formats = {} if optimizer.state is None else {"moments": optimizer.state.moments, "second_moment": optimizer.state.second}
    for name, value in formats.items():
        if frozen and value != "float32":
            rule = f"is not float32, in which compression.kind = {settings.kind} reads and keeps the moments of Adam"
            yield f"optimizer.state.{name}", value, rule, "remove it, or use compression.kind=int8"


def _phases(settings: CompressionConfig, diloco: object, total_steps: int, warmup_steps: int) -> Problems:
    """Warm-up and ramp, with Adam's second moments as they are after the warm-up."""
    frozen = settings.kind != "int8" and diloco is None
    field, steps = "compression.warmup_steps", settings.warmup_steps
    if steps >= total_steps:
        yield field, steps, f"leaves none of the {total_steps} updates of the run to compress", "lower it, or remove compression"
    elif frozen and steps < warmup_steps:
        rule = f"is below the {warmup_steps} updates in which the learning rate rises, and second moments are kept as they are then"
        yield field, steps, rule, f"use {warmup_steps} or more; a fifth of the run is usual"
    if settings.kind == "top_k" and steps + settings.ramp_steps > total_steps:
        rule = f"and compression.warmup_steps = {steps} do not fit in the {total_steps} updates of the run"
        yield "compression.ramp_steps", settings.ramp_steps, rule, "shorten one of them"


def _on_mesh(settings: CompressionConfig, sizes: Sizes, mesh_slices: int, diloco: object) -> Problems:
    """Devices along `data`, between which gradients or changes are compressed."""
    data = sizes["data"]
    if diloco is not None and data == 1:
        yield "compression", "set", "has no link to compress: all workers are on the same devices (mesh.data = 1)", "raise mesh.data"
    elif diloco is None and mesh_slices > 1 and data != mesh_slices:
        rule = f"must be mesh.slices = {mesh_slices} with compression: a slice is one replica, which fsdp splits"
        yield "mesh.data", data, rule, f"use {mesh_slices}, and a larger mesh.fsdp (mesh.zero=1 keeps weights whole)"


def _identity(settings: CompressionConfig, mesh_slices: int, diloco: object, optimizer_beta2: float) -> dict[str, Any]:
    kept: dict[str, Any] = {"compression.kind": settings.kind, "compression.warmup_steps": settings.warmup_steps}
    if diloco is None:
        kept["mesh.slices"] = mesh_slices  # each has feedback of its own
        if settings.kind != "int8":
            kept["optimizer.beta2"] = optimizer_beta2  # second moments stay as the warm-up left them, weighted by beta2
    return kept


CAPABILITY = Capability(
    key="compression",
    rules=(_links, excludes(EXCLUDED, ", and compression is set"), _moments, _phases),
    mesh_rules=(_on_mesh,),
    identity=_identity,
    # Errors, and velocities of top_k.
    state=lambda one, state, diloco: state.add("feedback", (1 + (one.kind == "top_k" and diloco is None)) * FLOAT32, matrices=True),
    transforms=("maxlm.training.compression:CompressedSums",),
)
