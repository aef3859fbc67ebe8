"""Sizes of the named mesh axes, and the table of the mesh axes that split each logical axis of a tensor."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator

from maxlm.config.capability import Capability, Inert, Problems, Sizes, divisors_text
from maxlm.config.fields import Few, Int, Section, whole
from maxlm.config.sections.model import ModelConfig
from maxlm.config.sections.pipeline import PipelineConfig

AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")  # outermost first
ContextAttention = Literal["ring", "gather", "ulysses"]
BATCH_AXES = ("data", "fsdp", "expert")


class LogicalAxis(NamedTuple):
    """One row of the table: read by the rules, by the partition specs (`maxlm.parallel.sharding`) and by the search for a layout."""

    mesh: tuple[str, ...] = ()  # mesh axes that split it, outermost first
    sizes: tuple[str, ...] = ()  # settings that give the size of such a dim; one in a section that is absent gives none
    reason: str = ""


LOGICAL_AXES: Mapping[str, LogicalAxis] = {
    "batch": LogicalAxis(BATCH_AXES, ("train.global_batch",)),
    "seq": LogicalAxis(("context",), ("data.seq_len",)),
    "kv_heads": LogicalAxis(("tensor",), ("model.n_kv_heads",), "each tensor shard needs whole key/value heads"),
    "heads": LogicalAxis(("tensor",), ("model.n_heads",)),
    "mlp": LogicalAxis(("tensor",), ("model.d_ff", "model.moe.d_ff")),
    "vocab": LogicalAxis(("tensor", "stage"), ("model.vocab_size",), "tables and the loss are split along it"),
    # Between tensor-parallel regions the sequence is split over `tensor`, too, and over `stage` where the vocabulary is split over it.
    "seq_between": LogicalAxis(("context", "tensor"), ("data.seq_len",), "split between tensor-parallel regions"),
    "seq_vocab": LogicalAxis(("context", "tensor", "stage"), ("data.seq_len",), "split where tokens are looked up"),
    # Width of a weight (ZeRO-3), at rest over a pipeline's stages too: by each of these axes that splits no other dim of the tensor.
    "embed": LogicalAxis(
        ("fsdp", "expert", "stage"),
        ("model.d_model", "model.latent.q_rank", "model.latent.kv_rank"),
        "every matrix is split along it",
    ),
    "embed_act": LogicalAxis(),  # width of activations, of norms and of biases: whole
    "expert": LogicalAxis(("expert",), ("model.moe.n_experts",), "each device of the axis holds whole experts"),
    "choices": LogicalAxis(),  # experts, where every device knows all of them
    "worker": LogicalAxis(("data",), ("diloco.workers",), "each device of the axis holds whole workers"),
    "head_dim": LogicalAxis(),
    "rank": LogicalAxis(),  # of adapters
    "position": LogicalAxis(),
    "layers": LogicalAxis(),
    "run": LogicalAxis(),
}
RULES: Mapping[str, tuple[str, ...]] = {name: axis.mesh for name, axis in LOGICAL_AXES.items()}


class MeshConfig(Section):
    """Sizes of the named mesh axes. One may be -1: whatever devices are left; rules of its size are then checked where the number of
    devices is known: by `cluster.topology`, or when the run starts.
    """

    data: Int = 1
    """Replicas of the model, each with a share of the batch (data parallelism); -1: all devices that the other axes leave. Unit: devices.
    """
    stage: Int = 1
    """Stages of a pipeline over the layers (pipeline parallelism); -1: all devices that the other axes leave. Unit: devices."""
    fsdp: Int = -1
    """Shards of the weights and the optimizer state, each with a share of the batch (fully sharded data parallelism, ZeRO, arXiv
    1910.02054); -1: all devices that the other axes leave. Unit: devices.
    """
    context: Int = 1
    """Parts into which each sequence is split (context parallelism); -1: all devices that the other axes leave. Unit: devices."""
    tensor: Int = 1
    """Parts into which heads, feed-forward widths and the vocabulary are split (tensor parallelism, arXiv 1909.08053); -1: all devices that
    the other axes leave. Unit: devices.
    """
    expert: Int = 1
    """Groups into which the experts of each layer are split, each with a share of the batch (expert parallelism); -1: all devices that the
    other axes leave. Unit: devices.
    """
    context_attention: ContextAttention = "ring"
    """Attention over a sequence that mesh.context splits. ring: keys and values are passed from device to device, block by block (arXiv
    2310.01889); gather: they are gathered all at once; ulysses: heads are split in place of tokens (arXiv 2309.14509).
    """
    zero: Annotated[Literal[1, 2, 3], BeforeValidator(whole)] = 3
    """Parts of the state that `fsdp` splits (ZeRO, arXiv 1910.02054). 1: master weights and optimizer state; 2: gradients as well, as they
    are formed; 3: also the weights that are computed with, which are gathered layer by layer. With 1 and 2 the weights are gathered once an
    update.
    """
    slices: Few = 1
    """Pods or slices that are joined by the data-centre network alone. Unit: slices."""
    across_slices: Literal["data", "fsdp", "stage"] = "data"
    """Mesh axis that crosses slices; its size must be a multiple of `slices`."""

    def sizes(self) -> dict[str, int]:
        """Axis name -> configured size (one may be -1), outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}


def _problems(mesh: MeshConfig) -> Problems:
    sizes = mesh.sizes()
    for axis in AXES:
        if (size := sizes[axis]) < 1 and size != -1:
            yield f"mesh.{axis}", size, "must be 1 or more, or -1 for the devices that are left", "use 1 to leave the axis out"
    free = [axis for axis in AXES if sizes[axis] == -1]
    if len(free) > 1:
        yield f"mesh.{free[1]}", -1, f"only one axis may be -1, and mesh.{free[0]} is", "give one of them a size"


def _experts(mesh: MeshConfig, sizes: Sizes, model_moe: object) -> Problems:
    if model_moe is None and sizes["expert"] > 1:
        yield "mesh.expert", sizes["expert"], "the model has no experts to split", "use 1, or set model.moe"


def _context(mesh: MeshConfig, sizes: Sizes, data_seq_len: int, model_n_kv_heads: int, train_loss_chunks: int) -> Problems:
    context, tensor = sizes["context"], sizes["tensor"]
    if context == 1:
        return
    seq_len, groups, ulysses = data_seq_len, model_n_kv_heads, mesh.context_attention == "ulysses"
    if ulysses and groups % (context * tensor):
        most = max((n for n in range(1, context) if groups % (n * tensor) == 0), default=1)
        rule = f"ulysses splits key/value heads: context x tensor = {context * tensor} does not divide model.n_kv_heads = {groups}"
        yield "mesh.context", context, rule, f"use mesh.context={most}, or mesh.context_attention=ring, which splits none"
    parts = context * tensor if ulysses else math.lcm(2 * context, context * tensor)
    own = seq_len // context
    if seq_len % parts:
        chunks = "" if ulysses else ": each device has two chunks of the sequence"
        rule = f"needs data.seq_len = {seq_len} to be a multiple of {parts}{chunks}"
        yield "mesh.context", context, rule, f"use data.seq_len={-(-seq_len // parts) * parts}, or a smaller axis"
    elif own % train_loss_chunks:
        rule = f"does not divide the {own} tokens of a sequence that each of mesh.context = {context} devices has"
        yield "train.loss_chunks", train_loss_chunks, rule, f"use {divisors_text(own)}"


def _stages(
    mesh: MeshConfig,
    sizes: Sizes,
    model: ModelConfig,
    pipeline: PipelineConfig | None,
    train_microbatches: int,
    memory_offload: tuple[str, ...],
) -> Problems:
    """Stages of a pipeline, or its section without one."""
    stage = sizes["stage"]
    if stage == 1:
        if pipeline is not None:
            yield "pipeline", "set", "mesh.stage = 1 makes no pipeline", "remove it, or raise mesh.stage"
        return
    chunks = (pipeline or PipelineConfig()).chunks
    period = len(model.layer_pattern)
    periods = math.ceil((model.n_layers - model.n_dense) / period)
    held = f"{periods} periods of {period} layers" if period > 1 else f"{periods} layers"
    held += f" after model.moe.n_dense = {model.n_dense}" if model.n_dense else ""
    if stage > periods:
        rule = f"is more than the {held} of the model, and a stage without any would only wait"
        yield "mesh.stage", stage, rule, f"use {periods} at most"
    elif stage * chunks > periods:
        rule = f"makes {stage * chunks} parts with mesh.stage = {stage}, of {held}"
        yield "pipeline.chunks", chunks, rule, f"use {periods // stage} at most"
    if chunks > 1 and train_microbatches % stage:
        rule = f"is not a multiple of mesh.stage = {stage}, and pipeline.chunks > 1 takes them in rounds of as many"
        yield "train.microbatches", train_microbatches, rule, f"use {math.ceil(train_microbatches / stage) * stage}"
    if model.lora is not None and not set(model.lora.matrices or model.adaptable) & set(_of_pattern(model).adaptable):
        rule = f"divides layers of which model.lora.matrices = {list(model.lora.matrices or ())} adapts none"
        yield "mesh.stage", stage, rule, "adapt matrices of attention, too, or use 1"
    if memory_offload:
        rule = f"does not work with mesh.stage = {stage}: what waits for its backward pass stays on the device"
        yield "memory.offload", list(memory_offload), rule, "use [], and recompute (memory.remat) instead"


def _of_pattern(model: ModelConfig) -> ModelConfig:
    """The model without the dense layers before its pattern."""
    return model if model.moe is None else model.model_copy(update={"moe": model.moe.model_copy(update={"n_dense": 0})})


def _inert(mesh: MeshConfig) -> Iterator[Inert]:
    if mesh.slices == 1:
        yield Inert("mesh.across_slices", "mesh.slices = 1, so no axis crosses slices", "raise mesh.slices")
    if mesh.context == 1:
        yield Inert("mesh.context_attention", "mesh.context = 1 splits no sequence", "raise mesh.context")
    if mesh.fsdp == mesh.expert == 1:
        yield Inert("mesh.zero", "mesh.fsdp = 1 splits nothing", "raise mesh.fsdp")


CAPABILITY = Capability(key="mesh", rules=(_problems,), mesh_rules=(_experts, _context, _stages), inert=_inert)
