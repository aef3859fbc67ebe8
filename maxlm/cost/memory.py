"""Contents of a chip's HBM during a step: the state and the batch to the byte, temporaries as the program's text names them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from maxlm.compiler.aot import CompiledStep
from maxlm.config.schema import ModelConfig
from maxlm.cost.model_shapes import layers, rows_of
from maxlm.hardware.chips import LANES
from maxlm.hlo.liveness import Buffer, at_peak
from maxlm.hlo.parser import Module
from maxlm.memory.pieces import bytes_on_device
from maxlm.memory.spaces import is_on_host
from maxlm.models.parameters import parameter_axes
from maxlm.models.stack import STACKED, layer_groups
from maxlm.training.split_masters import RESIDUAL, difference_dtype

if TYPE_CHECKING:
    from maxlm.training.program import Program

KEPT, GRADIENTS, CAST, GATHERED = "kept for backward: ", "gradients", "weights as matmuls read them", "gathered weights"
LOSS, ATTENTION, FEED_FORWARD, ROUTING = "logits and loss", "attention", "feed-forward", "routing"
_ORDER = (KEPT, GRADIENTS, CAST, GATHERED, LOSS, ATTENTION, FEED_FORWARD, ROUTING)  # the most certain first


@dataclass(frozen=True)
class MemoryPart:
    """A part of one device's HBM: `group` is state, batch, temporaries or code."""

    group: str
    name: str
    bytes: int


def divide_memory(program: "Program", step: CompiledStep, module: Module | None) -> tuple[MemoryPart, ...]:
    """Divide `step.needed` into parts, which sum to it. Without a `module` (it did not fit) temporaries are one part."""
    parts = state_parts(program)
    if step.memory is not None:
        padding = step.memory.argument - sum(part.bytes for part in parts)
        parts = (*parts[:-1], MemoryPart("state", "counters, and padding of layouts", padding), parts[-1])
    code = step.memory.code if step.memory is not None else 0
    temporaries = max(0, step.needed - code - sum(part.bytes for part in parts))
    if module is None:
        return (*parts, MemoryPart("temporaries", "activations, gradients and the rest", temporaries))
    made = (MemoryPart("code", "program", code),) if step.machine_code else ()
    return (*parts, *_temporaries(program, at_peak(module), temporaries), *made)


def state_parts(program: "Program") -> tuple[MemoryPart, ...]:
    """Parameters, frozen ones, optimizer state and batch on one device, to the byte."""
    state = program.abstract_state
    residual = state.extra.get(RESIDUAL)
    apart = (RESIDUAL, *(one.name for one in program.update.transforms if not one.by_parameter))
    averages = {name: own for name, own in state.extra.items() if name not in apart}
    frozen = (MemoryPart("state", "frozen model (float32)", _bytes(state.model_state)),)
    settings = program.config.optimizer
    difference = difference_dtype(settings.state)
    masters = "float32" if difference is None else f"bfloat16 and {8 * difference.itemsize} bits"
    formats = [] if settings.state is None or not settings.facts.moments else [settings.state.moments, settings.state.second]
    optimizer = [settings.name, *dict.fromkeys(formats if set(formats) != {"float32"} else [])]  # formats of moments that are not float32
    return (
        *(frozen if program.config.model.lora is not None else ()),
        MemoryPart("state", f"parameters ({masters})", _bytes(state.params) + _bytes(residual)),
        MemoryPart("state", f"optimizer ({' '.join(optimizer)})", _bytes((state.opt_state, averages))),
        MemoryPart("batch", "batch", _bytes(program.abstract_batch)),
    )


def _bytes(tree: Any) -> int:
    """Bytes on one device, without state in other tiers (`memory.offload_state`)."""
    return sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(tree) if not is_on_host(leaf))


def _temporaries(program: "Program", buffers: Iterable[Buffer], total: int) -> list[MemoryPart]:
    """`total` bytes, divided by the names of the buffers live at the peak. The last part is what no buffer accounts for."""
    names = _BufferNames(program)
    sums: dict[str, int] = {}
    for buffer in buffers:
        name = names.name_of(buffer)
        sums[name] = sums.get(name, 0) + buffer.bytes
    rest, parts = total, []
    for name in sorted(filter(None, sums), key=lambda name: next(i for i, start in enumerate(_ORDER) if name.startswith(start))):
        size = min(sums[name], rest)  # the replay may keep more live than XLA does: the least certain names get less
        rest -= size
        parts.append(MemoryPart("temporaries", name, size))
    return [*(part for part in parts if part.bytes), MemoryPart("temporaries", "other", rest)]


class _BufferNames:
    """Names a buffer by its shape, the place that made it, and the shapes that the config implies."""

    def __init__(self, program: "Program") -> None:
        config, mesh = program.config, program.mesh.shape
        axes = jax.tree.leaves(parameter_axes(config.model), is_leaf=lambda leaf: isinstance(leaf, tuple))
        self.shards: set[tuple[int, ...]] = set()
        self.gathered: set[tuple[int, ...]] = set()
        for leaf, names in zip(jax.tree.leaves(program.abstract_state.params), axes, strict=True):
            if math.prod(leaf.shape) <= 2**16:
                continue
            stacked = sum(name in STACKED for name in names)
            shard = leaf.sharding.shard_shape(leaf.shape)
            self.shards |= _forms(shard, names)
            if "expert" in names:  # gathered, the shards not yet put together
                self.gathered |= {_core((mesh["fsdp"], *form)) for form in _forms(shard[stacked:], names)}
            whole = _without(leaf, {"fsdp"} if "expert" in names else {"fsdp", "expert"})
            for n in range(stacked + 1):
                if n == 0 or len(leaf.shape) > n + 1:
                    self.gathered |= _forms(whole[n:], names)
        stacks = {group.stacked[i:] for group in layer_groups(config.model) for i in (0, 1)}  # periods and a run in them, or one of the two
        self.stacks = sorted(filter(None, stacks), key=lambda sizes: (-len(sizes), sizes))
        tensor, expert = mesh["tensor"], mesh["expert"]
        self.vocab = config.model.vocab_size // tensor
        kinds = layers(config.model)
        self.hidden = {size for kind in kinds for size in (kind.widths.get("up", 0) // tensor, *_padded(kind.expert_width // tensor))} - {0}
        rows = config.train.global_batch // config.train.microbatches // (mesh["data"] * mesh["fsdp"] * expert)
        tokens = rows * (config.data.seq_len // mesh["context"])
        self.kept = kept_sizes(config.model, config.memory.remat, tokens, tensor, expert)
        routed = rows_of(config.model, expert, tokens)
        self.rows = {count * config.model.d_model for count in (routed, tokens * expert if expert > 1 else 0) if count}
        self.routed = {routed, tokens * config.model.moe.n_experts} if config.model.moe is not None else set()

    def name_of(self, buffer: Buffer) -> str:
        """The name of the part that `buffer` belongs to; empty if unknown."""
        dims, where = buffer.shape.dims, buffer.where
        backward = any("transpose(" in op.where for op in buffer.writers)
        if "while/body" in where and "transpose(" not in where:
            lead = next((lead for lead in self.stacks if dims[: len(lead)] == lead), ())
            names = self.kept.get(math.prod(dims[len(lead) :])) if lead else None
            if names:
                return KEPT + ", ".join(names)
        if _core(dims) in self.shards:
            return GRADIENTS if backward or buffer.shape.dtype == "f32" else CAST
        if self.vocab in dims:
            return GRADIENTS if backward and _core(dims) in self.gathered else LOSS
        if _core(dims) in self.gathered:
            return GRADIENTS if backward else GATHERED
        if any(mark in where for mark in ("attention_forward", "attention_backward", "splash", "BGRST", "BSGRK")):
            return ATTENTION
        if not self.hidden.isdisjoint(dims) or math.prod(dims) in self.rows:
            return FEED_FORWARD
        return ROUTING if math.prod(dims) in self.routed else ""


def kept_sizes(model: ModelConfig, remat: str | Sequence[str], tokens: int, tensor: int, expert: int = 1) -> dict[int, tuple[str, ...]]:
    """Elements a layer -> names of the tensors of that size which the remat policy keeps, for `tokens` tokens a device."""
    rows = rows_of(model, expert, tokens)
    sizes: dict[int, tuple[str, ...]] = {}
    for kind in layers(model):
        names = list(kind.widths) if remat in ("none", "dots") else ["layer_input", *(() if isinstance(remat, str) else remat)]
        for name in dict.fromkeys(names):
            tensor_sizes = [
                tokens * kind.widths.get(name, 0) // tensor
            ]  # between tensor-parallel regions the sequence is split over `tensor`
            if name in ("gate", "up") and remat != "dots":
                tensor_sizes += [rows * inside for inside in _padded(kind.expert_width // tensor)]
            for size in tensor_sizes:
                if size and name not in sizes.get(size, ()):
                    sizes[size] = (*sizes.get(size, ()), name)
    return sizes


def _padded(inside: int) -> tuple[int, int]:
    """The width inside an expert, and the same padded to whole lanes as on TPUs."""
    return inside, -(-inside // LANES) * LANES


def _forms(shape: tuple[int, ...], names: Sequence[str]) -> set[tuple[int, ...]]:
    """Forms that a parameter with these logical axes may take: as it is; experts also side by side, their inner width padded or not."""
    if tuple(names[-3:]) != ("embed", "expert", "mlp"):
        return {_core(shape)}
    *before, experts, inside = shape
    sizes = _padded(inside)
    return {_core((*before, *after)) for size in sizes for after in ((experts, size), (experts * size,))}


def _core(dims: Sequence[int]) -> tuple[int, ...]:
    """Dims in any order, without dims of 1: layouts and transpositions change neither."""
    return tuple(sorted(dim for dim in dims if dim != 1))


def _without(leaf: Any, axes: set[str]) -> tuple[int, ...]:
    """The shape of `leaf` on one device if the mesh axes in `axes` did not split it."""
    mesh, spec = leaf.sharding.mesh.shape, leaf.sharding.spec
    shape = list(leaf.sharding.shard_shape(leaf.shape))
    for dim, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            shape[dim] *= mesh[axis] if axis in axes else 1
    return tuple(shape)
