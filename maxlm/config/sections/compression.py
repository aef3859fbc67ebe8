"""Compression of gradients where they cross slow links: between slices, or between workers of local updates."""

from typing import Annotated, Any, Literal

from pydantic import Field

from maxlm.config.capability import FLOAT32, Capability, Config, Problems, Sizes, State, refuse
from maxlm.config.fields import Count, Float, Positive, Section


class Int8Compression(Section):
    """8 bits a number, with a scale for every 256, and feedback of the errors (arXiv 1809.07599): half the bytes of bfloat16, a quarter of
    float32's. The optimizer stays as it is.
    """

    kind: Literal["int8"]
    warmup_steps: Count = 0  # updates that are summed as without compression

    @property
    def wire_bits(self) -> float:
        """Bits a number that a stage sends, scales included; as a sum without compression, a compressed one has two stages."""
        return 8 + 32 / 256


class SignCompression(Section):
    """One bit a number of Adam's momentum, with a scale for every 1024 (1-bit Adam, arXiv 2102.02888). After the warm-up, which is Adam as
    ever, its second moments stay as they are then.
    """

    kind: Literal["sign"]
    warmup_steps: Positive  # the paper takes a seventh to a fifth of the run

    @property
    def wire_bits(self) -> float:
        """As of `Int8Compression`."""
        return 1 + 32 / 1024


class TopKCompression(Section):
    """The largest of every 4096 accumulated changes, with momentum (Deep Gradient Compression, arXiv 1712.01887): 4 bytes for each that is
    sent. After the warm-up Adam's second moments stay as they are then, as in 1-bit Adam.
    """

    kind: Literal["top_k"]
    warmup_steps: Positive  # updates that are summed as without compression
    density: Annotated[Float, Field(ge=2**-12, le=2**-4)] = 2**-6  # share of the numbers that are sent at the end
    ramp_steps: Count = 0  # updates after the warm-up in which the density falls from 1/4, by a factor of 4 at a time; 0: at once

    @property
    def wire_bits(self) -> float:
        """As of `Int8Compression`, between two devices; between n it is n / 2 times that, since each sends to all."""
        return 32 * self.density


CompressionConfig = Annotated[Int8Compression | SignCompression | TopKCompression, Field(discriminator="kind")]


def _problems(config: Config, settings: CompressionConfig) -> Problems:
    """Settings of `compression`, and what does not go together with it."""
    optimizer = config.optimizer
    if config.diloco is None and config.mesh.slices == 1:
        rule = "is for links between slices or between workers of local updates, and here are neither (mesh.slices = 1, no diloco)"
        yield "compression", "set", rule, "remove it, or set mesh.slices or diloco"
    elif config.diloco is None and config.mesh.across_slices != "data":
        rule = "sends more than gradients between slices, and compression is of gradients"
        yield "mesh.across_slices", config.mesh.across_slices, rule, "use data, or remove compression"
    others = {
        "model.lora": "trains adapters, whose gradients are small",
        "elastic": "changes the number of devices along mesh.data, each of which has feedback of its own",
    }
    yield from refuse(config, others, ", and compression is set")
    if config.health is not None and config.health.layers is not None:
        rule = "compares the gradients of layers, which are not summed before they are compressed"
        yield "health.layers", config.health.layers, rule, "remove it, or compression"
    frozen = settings.kind != "int8" and config.diloco is None
    if frozen and optimizer.name != "adamw":
        rule = f"has no second moments that compression.kind = {settings.kind} could keep as they are after its warm-up"
        yield "optimizer.name", optimizer.name, rule, "use adamw, or compression.kind=int8"
    formats = {} if optimizer.state is None else {"moments": optimizer.state.moments, "second_moment": optimizer.state.second}
    for name, value in formats.items():
        if frozen and value != "float32":
            rule = f"is not float32, in which compression.kind = {settings.kind} reads and keeps the moments of Adam"
            yield f"optimizer.state.{name}", value, rule, "remove it, or use compression.kind=int8"
    yield from _phases(config, settings, frozen=frozen)


def _phases(config: Config, settings: CompressionConfig, *, frozen: bool) -> Problems:
    """Warm-up and ramp of `compression`. `frozen`: Adam's second moments are, after the warm-up."""
    warmup = config.steps_of(config.optimizer.warmup_steps, config.optimizer.warmup_tokens, 0)
    field, steps = "compression.warmup_steps", settings.warmup_steps
    if steps >= config.total_steps:
        yield field, steps, f"leaves none of the {config.total_steps} updates of the run to compress", "lower it, or remove compression"
    elif frozen and steps < warmup:
        rule = f"is below the {warmup} updates in which the learning rate rises, and second moments are kept as they are then"
        yield field, steps, rule, f"use {warmup} or more; a fifth of the run is usual"
    if settings.kind == "top_k" and steps + settings.ramp_steps > config.total_steps:
        rule = f"and compression.warmup_steps = {steps} do not fit in the {config.total_steps} updates of the run"
        yield "compression.ramp_steps", settings.ramp_steps, rule, "shorten one of them"


def _on_mesh(config: Config, settings: CompressionConfig, sizes: Sizes) -> Problems:
    """Devices along `data`, between which gradients or changes are compressed."""
    data, slices = sizes["data"], config.mesh.slices
    if config.diloco is not None and data == 1:
        yield "compression", "set", "has no link to compress: all workers are on the same devices (mesh.data = 1)", "raise mesh.data"
    elif config.diloco is None and slices > 1 and data != slices:
        rule = f"must be mesh.slices = {slices} with compression: a slice is one replica, which fsdp splits"
        yield "mesh.data", data, rule, f"use {slices}, and a larger mesh.fsdp (mesh.zero=1 keeps weights whole)"


def _identity(config: Config, settings: CompressionConfig) -> dict[str, Any]:
    kept: dict[str, Any] = {"compression.kind": settings.kind, "compression.warmup_steps": settings.warmup_steps}
    if config.diloco is None:
        kept["mesh.slices"] = config.mesh.slices  # each has feedback of its own
        if settings.kind != "int8":
            kept["optimizer.beta2"] = config.optimizer.beta2  # second moments stay those of the warm-up, whose weights sum to what it says
    return kept


def _state(config: Config, settings: CompressionConfig, state: State, sizes: Sizes) -> State:
    """Feedback of matrices: errors, and velocities."""
    kinds = 2 if settings.kind == "top_k" and config.diloco is None else 1
    return state.add("feedback", kinds * FLOAT32, matrices=True)


CAPABILITY = Capability(
    key="compression",
    rules=(_problems,),
    mesh_rules=(_on_mesh,),
    identity=_identity,
    state=_state,
    transforms=("maxlm.training.compression:CompressedSums",),
)
