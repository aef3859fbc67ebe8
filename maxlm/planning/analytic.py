"""Analytic model of a step: time and memory of a layout without compiling it, in a fraction of a millisecond.

Its constants were read off Llama 3.1 8B as XLA compiled it for v5p (libtpu 0.0.42; seconds of `cost.step_cost`). They only rank layouts:
the best are compiled, and what was compiled corrects the others (`explore`). The two `least_*` figures are true lower bounds, by which
layouts are dropped. On GPUs matmuls, attention and links are charged as `cost.pricing` charges compiled programs: shares of peak that
others measured, or that `maxlm plan --calibrate` did.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, get_args

from maxlm.config.axes import divisors
from maxlm.config.schema import Config
from maxlm.config.sections.memory import RematName
from maxlm.cost import efficiency, model_shapes
from maxlm.cost.model_shapes import LayerKind, ParameterLeaf, choices_of, rows_of
from maxlm.cost.network import AxisLinks
from maxlm.cost.quantized_matmuls import quantization_of
from maxlm.hardware.chips import COUNTED, MOST_VMEM_BYTES, Chip, MatmulFormat
from maxlm.hardware.topologies import Topology
from maxlm.hardware.xla_flags import FLAGS, SPARSE_CORE
from maxlm.hlo.op_flops import PASSES
from maxlm.kernels.attention.tpu import why_not
from maxlm.models.saved_tensors import JOIN, ROUTER, Matmul
from maxlm.planning import gpu_attention
from maxlm.planning.layouts import LOSS_CHUNKS, Layout, periods
from maxlm.planning.traffic import MESSAGE, Collectives
from maxlm.training.split_masters import difference_dtype

# Bytes moved between HBM and the chip, a token and layer, as multiples of a tensor of that width in the dtype of the matmuls.
MODEL_WIDE, HIDDEN_WIDE = 28, 5  # norms and residuals; the activation, backward (forward it is part of a matmul)
NORMED_WIDE = 5  # norms of queries and keys, where a model has them; of latent attention, putting them together from their parts
# The same of a row of an expert: what is inside it (Mixtral 8x7B for v5p, as above), and the row, read from its token and added up for it.
ROW_INSIDE, ROW_WIDE = 11, 12
KEPT_MOVES, HOST_MOVES = 2.6, 8  # writing what is kept into its stack, and reading it; the same of what goes to the host
ALL_KEPT = 3  # what `none` keeps, as a multiple of the tensors that have names
# Both without a loop over layers: there are no stacks, and what XLA joins with its neighbours is not kept (seven programs: 1.1 to 1.5).
UNROLLED_MOVES, UNROLLED_ALL_KEPT = 1.3, 1.4
# The same of quantizing, in bytes a number: of what a matmul reads, each time that it is computed; of that in the gradient, and of what is
# written (Llama 3.1 70B in fp8 for tpu7x).
QUANTIZED_IN, QUANTIZED_GRADIENT = 4, (6, 9)
LOGIT_BYTES = 4
TABLE_BYTES = 10  # a number of the unembedding, once a microbatch
STATE_BYTES = 40  # a parameter, once a step
# Exposed share of a collective's seconds, where there is enough to compute meanwhile. A SparseCore, on chips that have one, runs those over
# fsdp and data; GPUs overlap them with matmuls too, and are assumed to hide as much.
GATHERS_WAIT, SUMS_WAIT, ALONE_WAIT = 0.1, 0.2, 0.9
TENSOR_WAIT, HOST_WAIT = 0.75, 0.1
ONCE_WAIT, RING_WAIT = 0.1, 0.01  # of what an update has once; of what attention sends round a ring while it computes
MERGED_BYTES = 73  # a number of attention's output, for each other device of `context`: partial outputs, and gradients of queries and keys
ACCUMULATED_BYTES = 12  # a number of a gradient that microbatches are added up in, each time

HOST_SHARE = 0.75  # of host memory; the rest is for the loader and the checkpoints
FORWARD, GRADIENT = ("forward",), ("by_transpose", "transposed_dw")  # parts of a grouped matmul


class Shares(NamedTuple):
    """State of one device: bytes of parameters and optimizer, parameters, parameters in matrices."""

    state: int
    numbers: int
    matrices: int


@dataclass(frozen=True)
class Estimate:
    """One layout on one device. The first five are seconds of a step; host_s: waiting for copies between chip and host."""

    matmul_s: float
    attention_s: float
    memory_s: float
    exposed_s: float
    host_s: float
    state: int  # bytes of parameters, optimizer and batch, exact but for norms and biases
    temporaries: int  # bytes of everything else at the peak
    least_bytes: int  # lower bound for any program of this layout
    least_s: float  # the same of its time

    @property
    def needed(self) -> int:
        """Bytes of a device."""
        return self.state + self.temporaries

    @property
    def parts(self) -> tuple[float, ...]:
        """Seconds: matmul, attention, memory-bound, waiting for other chips, waiting for the host."""
        return self.matmul_s, self.attention_s, self.memory_s, self.exposed_s, self.host_s


def _moves(layout: Layout) -> float:
    """Number of times that each byte kept for the backward pass is moved."""
    return UNROLLED_MOVES if layout.unroll else KEPT_MOVES


def host_room(chip: Chip) -> float:
    """Bytes of host memory for the state and the activations of a device; half of HBM is assumed where none is stated."""
    return (chip.host_bytes or chip.hbm_bytes / 2) * HOST_SHARE / chip.devices_per_chip


class Analytic:
    """The analytic model of one config on one machine. `links`: physical links of the axes of a layout's mesh. `flash`: True for attention
    by others' kernels, splash on TPUs and on GPUs those that keep scores on the chip; default what this repository runs there.
    """

    def __init__(
        self, config: Config, topology: Topology, links: Callable[[Layout], Mapping[str, AxisLinks]], flash: bool | None = None
    ) -> None:
        self.config, self.topology = config, topology
        self._shares = lru_cache(maxsize=None)(self._shares_of)
        self._host_state = lru_cache(maxsize=None)(self._host_state_of)
        self._attention_of = lru_cache(maxsize=None)(self._attention_seconds)
        self._waiting = lru_cache(maxsize=None)(lambda schedule: schedule.depth)
        self._layers_s = lru_cache(maxsize=None)(self._each_matmul_s)
        self._inside = lru_cache(maxsize=None)(self._inside_bytes)
        self.number = 4 if config.precision.compute == "float32" else 2  # bytes of one in a matmul
        chip = topology.chip
        passes = PASSES[config.precision.float32_matmul] if self.number == 4 else 1
        self.peak = chip.peak_bf16_flops_per_device / passes
        self.share = chip.reached.predicted_matmul if topology.is_tpu else efficiency.gpu_matmul_share(chip)
        hbm_share = efficiency.HBM_SHARE if topology.is_tpu else efficiency.gpu_hbm_share(chip)
        self.hbm = hbm_share * chip.hbm_bytes_per_s_per_device
        self.splash = flash is True
        if flash is None and not topology.is_tpu:
            flash = gpu_attention.kernel_runs(config.model, config.data.seq_len, config.precision.compute, chip)
        self.driven = not topology.is_tpu or set(SPARSE_CORE) <= set(FLAGS.get(chip.name, ()))
        self.writes_scores = not topology.is_tpu and not flash
        self.layers = model_shapes.layers(config.model)
        self.quantized = quantization_of(config)
        self.fastest = max(chip.peak_flops(format) for format in self.quantized.formats) / chip.peak_bf16_flops
        self.heads = 1 + config.model.mtp_depth  # unembeddings of a token
        looped = [model_shapes.attention_flops(config.model, config.data.seq_len, kind.looped) for kind in self.layers]
        self.attention_flops = model_shapes.attention_flops(config.model, config.data.seq_len), sum(looped)
        experts = 1 if config.model.moe is None else config.model.moe.n_experts
        self.rows = {expert: rows_of(config.model, expert, MESSAGE) / MESSAGE for expert in divisors(experts)}
        settings, streamed = (self.quantized, self.number, config.compression), config.memory.layers_on_host
        self.collectives = Collectives(config.model, topology, links, lambda: self.leaves, self.rows, *settings, streamed=streamed)

    @cached_property
    def leaves(self) -> tuple[ParameterLeaf, ...]:
        """Arrays of parameters, with the state that the optimizer adds."""
        return model_shapes.parameter_leaves(self.config)

    def estimate(self, layout: Layout) -> Estimate:
        """Time and memory of `layout` on one device."""
        tokens = self.tokens(layout)
        compute = self._matmul_s(layout, tokens), self._attention_s(layout, tokens), self._memory_s(layout, tokens)
        state = self._shares(layout.mesh).state + 20 * tokens
        least_bytes = self._least_bytes(layout, tokens)
        return Estimate(
            *compute,
            exposed_s=self._exposed_s(layout, tokens, sum(compute)),
            host_s=self._host_s(layout, tokens, sum(compute)),
            state=state,
            temporaries=max(self._temporaries(layout, tokens), least_bytes - state),
            least_bytes=least_bytes,
            least_s=self._least_s(layout, tokens),
        )

    def frame_bounds(self, frame: Layout) -> tuple[float, int]:
        """(seconds that `estimate` predicts at least, bytes that a device needs at least) for all layouts of a frame."""
        tokens, kept = self.tokens(frame), replace(frame, loss_chunks=LOSS_CHUNKS[0], remat="none")
        rows = tokens // frame.microbatches
        moved = _moves(frame) * self.passes(frame) * frame.microbatches * self._stack_bytes(kept, rows) / self.hbm
        compute_s = self._matmul_s(kept, tokens) + self._attention_s(kept, tokens) + self._memory_s(kept, tokens) - moved
        return compute_s + self._exposed_s(kept, tokens, compute_s), self._least_with_stack(frame, 0)

    def fits_host(self, layout: Layout) -> bool:
        """True if what `layout` and `memory.offload_state` keep there fits in the hosts' memory, and the time of a layout's copies is known
        (of GPUs it is not). No state is refused where host memory is only assumed.
        """
        chip = self.topology.chip
        if layout.offload and chip.host_bytes_per_s is None:
            return False
        if chip.host_bytes is None and not layout.offload:
            return True
        rows = self.tokens(layout) // layout.microbatches  # of the others nothing waits there
        return self._host_bytes(layout, rows) <= host_room(chip)

    def tokens(self, layout: Layout) -> int:
        """Tokens of one device, in all microbatches. The stages of a pipeline all have the same."""
        return self.config.tokens_per_step // (layout.shards * layout.sizes["context"])

    def passes(self, layout: Layout) -> float:
        """Layers of the pattern that a device computes, padding and idle ticks included, as a share of all: 1 without a pipeline."""
        stages = layout.sizes["stage"]
        if stages == 1:
            return 1.0
        ticks = layout.pipeline.units + stages - 1  # forward; there are as many backward
        return ticks * self._part(layout) / layout.microbatches

    def _part(self, layout: Layout) -> float:
        """Layers of a part of the depth, padding included, as a share of the layers of the pattern."""
        count = periods(self.config.model)
        return math.ceil(count / (layout.sizes["stage"] * layout.chunks)) / count

    # Time

    def _attention_seconds(self, parts: int) -> tuple[float, float]:
        """Seconds of attention of a token on one device that has all heads, forward and backward: by our kernel where it runs on so many
        parts of a sequence, else by splash; of GPUs see `gpu_attention`.
        """
        chip, model = self.topology.chip, self.config.model
        if not self.topology.is_tpu:
            return gpu_attention.seconds_a_token(model, self.config.data.seq_len, chip, not self.writes_scores, self.peak, self.hbm)
        length = self.config.data.seq_len // parts
        ours = not self.splash and any(not why_not(length, model.head_dim, kind, self.number) for kind in chip.device_kinds)
        shares, met = chip.reached.our_attention if ours else chip.reached.attention, length * min(parts, 2)  # most chunks meet whole ones
        forward_s = backward_s = 0.0
        for left, (forward, backward) in model_shapes.kernel_attention_flops(model, self.config.data.seq_len, chip).items():
            forward_s += forward / (shares.at(left * met, backward=False) * self.peak)
            backward_s += backward / (shares.at(left * met, backward=True) * self.peak)
        return forward_s, backward_s

    def recomputes(self, layout: Layout, matmul: Matmul) -> bool:
        """True if a matmul of a layer is recomputed, since its result was not kept."""
        model = self.config.model
        if layout.remat == "none" or matmul.name == JOIN:
            return False
        if layout.remat == "dots":
            return bool(matmul.experts) and matmul.name != "mlp_out"  # a kernel, which that policy does not know
        needed = matmul.name != "mlp_out" or model.norms_outputs  # else it is not used again
        normed = model.qk_norm and matmul.name in ("query", "key")  # kept behind the norm, asked for before it
        return needed and (normed or matmul.name not in (*layout.kept, *layout.offload))

    def recomputes_attention(self, layout: Layout) -> bool:
        """True if attention is computed again in the backward pass."""
        return layout.remat != "none" and "attention" not in (*layout.kept, *layout.offload)

    def _matmul_s(self, layout: Layout, tokens: int) -> float:
        model, across = self.config.model, layout.sizes["tensor"] * layout.sizes["stage"]
        rows, parts, share = tokens // layout.microbatches, layout.microbatches, self.passes(layout)
        blocks = 0.0
        for kind, matmul, forward_s, gradient_s in self._layers_s(layout.mesh, rows):
            one = (1 + self.recomputes(layout, matmul)) * forward_s + 2 * gradient_s
            blocks += one * (share if kind.pattern else 1)
        formats = self.quantized.formats if self.quantized.unembedding else ("bf16", "bf16")
        shape = rows // layout.loss_chunks, model.d_model, model.vocab_size // across
        vocab = layout.loss_chunks * sum(times * self._one_s(*shape, format) for times, format in zip((1, 2), formats, strict=True))
        return parts * (blocks + self.heads * vocab)

    def _each_matmul_s(self, mesh: tuple[tuple[str, int], ...], rows: int) -> tuple[tuple[LayerKind, Matmul, float, float], ...]:
        """Every matmul of a layer, with its seconds in all layers of its kind: forward, and one of the two of its gradient."""
        sizes = dict(mesh)
        forward, gradient = self.quantized.formats
        return tuple(
            (
                kind,
                matmul,
                self._in_layers_s(rows, kind, matmul, sizes, forward, FORWARD),
                self._in_layers_s(rows, kind, matmul, sizes, gradient, GRADIENT),
            )
            for kind in self.layers
            for matmul in kind.matmuls
        )

    def _in_layers_s(
        self, rows: int, kind: LayerKind, matmul: Matmul, sizes: Mapping[str, int], format: MatmulFormat, parts: Sequence[str]
    ) -> float:
        low = self.quantized.layers(kind, matmul)
        high = len(kind.depths) - low
        wide = high * self._in_layer_s(rows, matmul, sizes, "bf16", parts) if high else 0.0
        return wide + (low * self._in_layer_s(rows, matmul, sizes, format, parts) if low else 0.0)

    def _in_layer_s(self, rows: int, matmul: Matmul, sizes: Mapping[str, int], format: MatmulFormat, parts: Sequence[str]) -> float:
        tensor = sizes["tensor"]
        if matmul.experts:
            return self._grouped_s(rows * choices_of(self.config.model), matmul, sizes, format, parts)
        passes = PASSES["highest"] if matmul.name == ROUTER and self.number == 2 else 1
        return passes * self._one_s(rows // tensor if matmul.split == "rows" else rows, *matmul.local(tensor), format)

    def _grouped_s(self, rows: float, matmul: Matmul, sizes: Mapping[str, int], format: MatmulFormat, parts: Sequence[str]) -> float:
        """Seconds of the experts of a device, for all of their `rows`: the mean of the `parts` of a `GroupedMatmul`."""
        wide_in, wide_out = matmul.local(sizes["tensor"])
        moved = self._bytes(format) * (rows * wide_in + matmul.gathered(sizes)) + self.number * rows * wide_out
        if not self.topology.is_tpu:
            return max(2 * rows * wide_in * wide_out / (self.share * self._speed(format)), moved / self.hbm)
        groups = matmul.experts // sizes["expert"]
        products = (efficiency.GroupedMatmul(round(rows), wide_in, wide_out, groups, part, ours=not self.splash) for part in parts)
        speed = COUNTED * self.topology.chip.matmul_speed(format)
        return statistics.mean(product.seconds(self.topology.chip, moved, self.hbm, speed) for product in products)

    def _one_s(self, rows: int, wide_in: int, wide_out: int, format: MatmulFormat = "bf16") -> float:
        tile = self.topology.chip.matrix_unit
        padded = math.ceil(wide_in / tile) * math.ceil(wide_out / tile) * tile**2
        moved = self._bytes(format) * (rows + wide_out) * wide_in + self.number * rows * wide_out
        return max(2 * rows * padded / (self.share * self._speed(format)), moved / self.hbm)

    def _bytes(self, format: MatmulFormat) -> int:
        return self.number if format == "bf16" else 1

    def _speed(self, format: MatmulFormat) -> float:
        """FLOP/s of a large matmul."""
        return self.peak * self.topology.chip.matmul_speed(format)

    def _attention_s(self, layout: Layout, tokens: int) -> float:
        chunked = layout.sizes["context"] > 1 and layout.attention != "ulysses"
        forward, backward = self._attention_of(2 * layout.sizes["context"] if chunked else 1)
        one = (1 + self.recomputes_attention(layout)) * forward + backward
        return self.passes(layout) * one * tokens / layout.sizes["tensor"]

    def _memory_s(self, layout: Layout, tokens: int) -> float:
        model, tensor, parts, passes = self.config.model, layout.sizes["tensor"], layout.microbatches, self.passes(layout)
        sizes, chunked = layout.sizes, layout.attention != "ulysses"
        moved, routed = 0.0, self.rows[layout.sizes["expert"]]
        for kind in self.layers:
            share = passes if kind.pattern else 1
            merged = MERGED_BYTES * (sizes["context"] - 1) * kind.widths.get("attention", 0) if chunked else 0
            common = MODEL_WIDE * model.d_model + NORMED_WIDE * kind.rewritten
            wide = common + merged / self.number + HIDDEN_WIDE * kind.widths.get("up", 0) + ROW_INSIDE * routed * kind.expert_width
            whole = ROW_WIDE * routed * model.d_model * kind.experts  # rows have their whole width on every device of `tensor`
            moved += share * self.number * len(kind.depths) * tokens * (wide / tensor + whole)
            moved += share * tokens * self._quantizing(kind, layout)
        moved += _moves(layout) * passes * parts * self._stack_bytes(layout, tokens // parts)
        moved += HOST_MOVES * self._host_bytes(layout, tokens)
        across = tensor * layout.sizes["stage"]
        moved += self.heads * tokens * model.vocab_size / across * LOGIT_BYTES
        moved += parts / across * model.vocab_size * model.d_model * TABLE_BYTES
        moved += STATE_BYTES * self._shares(layout.mesh).numbers
        if self._accumulates(layout) and (layout.zero < 3 or layout.sizes["stage"] > 1):
            moved += ACCUMULATED_BYTES * passes * parts * self._summed(layout).numbers
        return moved / self.hbm

    def _quantizing(self, kind: LayerKind, layout: Layout) -> float:
        """Bytes a token that all layers of a kind move to quantize operands."""
        if not self.quantized.names:
            return 0.0
        tensor, moved = layout.sizes["tensor"], 0.0
        for matmul in kind.matmuls:
            wide_in, wide_out = matmul.local(tensor)
            met = max(matmul.meets, 1) * self.quantized.layers(kind, matmul)
            moved += met * (1 + self.recomputes(layout, matmul)) * QUANTIZED_IN * wide_in
            if self.quantized.formats[1] != "bf16":
                moved += met * (QUANTIZED_GRADIENT[0] * wide_in + QUANTIZED_GRADIENT[1] * wide_out)
        return moved

    def _exposed_s(self, layout: Layout, tokens: int, compute_s: float) -> float:
        share, parts = self.passes(layout), layout.microbatches
        traffic = self.collectives.of(layout.mesh, layout.across_slices, layout.zero, layout.attention, parts > 1)
        gathers = parts * (share * traffic.gathers + traffic.end_gathers)
        sums = parts * (share * traffic.sums + traffic.end_sums)
        shared = (share * traffic.crossing + traffic.ends) * tokens  # of tensor-parallel regions, experts, and the ends of a pipeline
        ring = share * tokens * ((1 + self.recomputes_attention(layout)) * traffic.ring + traffic.ring_backward)
        waits = GATHERS_WAIT * gathers + SUMS_WAIT * sums if self.driven else ALONE_WAIT * (gathers + sums)
        waits += (ONCE_WAIT if self.driven else ALONE_WAIT) * traffic.once
        waits += TENSOR_WAIT * shared + max(RING_WAIT * ring, ring - self._attention_s(layout, tokens))
        return max(waits, gathers + sums + traffic.once + shared + ring - compute_s)

    def _host_s(self, layout: Layout, tokens: int, compute_s: float) -> float:
        one_way = self._held_bytes(layout.offload, layout, tokens) / (self.topology.chip.host_bytes_per_s_per_device or math.inf)
        waits = max(2 * HOST_WAIT * one_way, one_way - compute_s / 3)  # a third of the computing is the forward pass
        return self._state_s(layout) + self._of_layers_s(layout, compute_s) + waits

    # Memory

    def _host_bytes(self, layout: Layout, tokens: int) -> int:
        return self._host_state(layout.mesh) + self._of_layers_on_host(layout) + self._held_bytes(layout.offload, layout, tokens)

    def _host_state_of(self, mesh: tuple[tuple[str, int], ...]) -> int:
        """Bytes of the state of one device in host memory."""
        sizes = dict(mesh)
        return sum(leaf.held_bytes(("host",), leaf.on_device(sizes)) for leaf in self.leaves)

    def _hosted(self, layout: Layout, kind: str) -> int:
        """Numbers of one device in the layers' matrices, if their `gradients` or their `weights` are in host memory; else 0."""
        settings = self.config.memory.offload_state
        if settings is None or getattr(settings, kind) is None:
            return 0
        return sum(leaf.on_device(layout.sizes) for leaf in self.leaves if leaf.matrix and leaf.scanned)

    def _of_layers_on_host(self, layout: Layout) -> int:
        """Bytes in host memory of the layers' weights, and of their gradients: of a microbatch, and of the sum over several."""
        copied = difference_dtype(self.config.optimizer.state) is None  # else their halves are part of the state
        gradients = (self.number + 4 * self._accumulates(layout)) * self._hosted(layout, "gradients")
        return copied * self.number * self._hosted(layout, "weights") + gradients

    def _of_layers_s(self, layout: Layout, compute_s: float) -> float:
        """Seconds that copies of the layers' weights and gradients take: meanwhile, the time beyond computation; after them
        sums over microbatches, the gradient's norm, and its way back to the update.
        """
        weights, gradients = (self.number * self._hosted(layout, kind) for kind in ("weights", "gradients"))
        meanwhile = layout.microbatches * max(2 * weights, gradients)
        summed = gradients * (self.number + 4) / self.number * layout.microbatches if self._accumulates(layout) else 0
        after = summed + 2 * (4 / self.number if self._accumulates(layout) else 1) * gradients
        speed = self.topology.chip.host_bytes_per_s_per_device or math.inf
        return max(0.0, meanwhile / speed - compute_s) + after / speed

    def _state_s(self, layout: Layout) -> float:
        """Seconds that state of other tiers takes through the device: read, masters once more for their copy, and written at the same time.
        All of it follows the gradients, or precedes them.
        """
        settings = self.config.memory.offload_state
        if settings is None:
            return 0.0
        numbers = [(leaf, leaf.on_device(layout.sizes)) for leaf in self.leaves]
        copied = settings.master == "host" and difference_dtype(self.config.optimizer.state) is None
        again = sum(4 * size for leaf, size in numbers if leaf.matrix and copied)
        read = again + sum(leaf.held_bytes(("host", "nvme"), size) for leaf, size in numbers)
        return read / (self.topology.chip.host_bytes_per_s_per_device or math.inf)

    def _shares_of(self, mesh: tuple[tuple[str, int], ...], *, whole: bool = False) -> Shares:
        """Share of one device in the state; `whole`: with parameters that `fsdp` does not split."""
        sizes = dict(mesh) | ({"fsdp": 1} if whole else {})
        shares = [(leaf, leaf.on_device(sizes)) for leaf in self.leaves]
        state = sum(leaf.held_bytes((None,), numbers) for leaf, numbers in shares)
        return Shares(state, sum(numbers for _, numbers in shares), sum(numbers for leaf, numbers in shares if leaf.matrix))

    def _computed_with(self, layout: Layout) -> Shares:
        """Weights in the dtype of the matmuls, all of an update through."""
        return self._shares(layout.mesh, whole=layout.zero < 3)

    def _summed(self, layout: Layout) -> Shares:
        """Gradients of a microbatch, before they are summed over devices; at ZeRO stage 2 they are scattered as they are formed."""
        return self._shares(layout.mesh, whole=layout.zero == 1 or (layout.zero == 2 and self._accumulates(layout)))

    def _accumulates(self, layout: Layout) -> bool:
        """True if gradients are added up in float32."""
        return layout.microbatches > 1 or layout.sizes["stage"] > 1

    def _waits_bytes(self, layout: Layout, stack: int) -> int:
        """Bytes kept for the backward passes, where `stack` are the bytes of all layers and one microbatch."""
        return stack if layout.sizes["stage"] == 1 else int(stack * self._part(layout) * self._waiting(layout.pipeline))

    def _held_bytes(self, names: Collection[str], layout: Layout, tokens: int, kinds: Collection[LayerKind] | None = None) -> int:
        """Bytes of the tensors with these names, in layers of these kinds, by default all layers."""
        routed = 0 if layout.remat == "dots" else self.rows[layout.sizes["expert"]]
        kinds = self.layers if kinds is None else kinds
        wide = sum(len(kind.depths) * kind.width(name, routed) for kind in kinds for name in names)
        return self.number * tokens * wide // layout.sizes["tensor"]

    def _stack_bytes(self, layout: Layout, tokens: int) -> int:
        """Bytes kept on the device for the backward pass of one microbatch of `tokens` tokens."""
        if layout.remat != "none":
            return self._held_bytes({*layout.kept, "layer_input"} - set(layout.offload), layout, tokens)
        times = UNROLLED_ALL_KEPT if layout.unroll else ALL_KEPT
        sizes, stack = layout.sizes, int(times * self._held_bytes(get_args(RematName), layout, tokens))
        for kind in self.layers:  # float32 of norms and of the activation is kept as well; of experts their rows, and weights as gathered
            stack += self.number * len(kind.depths) * kind.experts * int(tokens * self.rows[sizes["expert"]]) * self.config.model.d_model
            stack += self.number * len(kind.depths) * sum(matmul.gathered(sizes) for matmul in kind.matmuls if matmul.experts)
        return stack

    def _temporaries(self, layout: Layout, tokens: int) -> int:
        model, sizes, number = self.config.model, layout.sizes, self.number
        rows, piped = tokens // layout.microbatches, sizes["stage"] > 1
        numbers, computed, summed = (one.numbers for one in (self._shares(layout.mesh), self._computed_with(layout), self._summed(layout)))
        far = self._hosted(layout, "gradients")
        numbers, computed, summed = numbers - far, computed - self._hosted(layout, "weights"), summed - far
        stack = self._waits_bytes(layout, self._stack_bytes(layout, rows))
        vocab = model.vocab_size // (sizes["tensor"] * sizes["stage"])
        logits = 4 if self.config.precision.compute == "float16" else number  # their exponentials
        logits += 0 if self.topology.is_tpu else 4  # a TPU does not write logits themselves
        loss = vocab * (model.d_model * (2 * number + 4) + rows // layout.loss_chunks * logits) + 6 * number * rows * model.d_model
        scores = gpu_attention.score_bytes(model.n_heads, self.config.data.seq_len, rows) // sizes["tensor"] if self.writes_scores else 0
        backward = self._inside(layout.mesh, rows) + scores + (4 * numbers if layout.zero == 3 else number * summed)
        gradients = 4 * summed if self._accumulates(layout) else 0
        kept = difference_dtype(self.config.optimizer.state) is not None  # masters in two parts hold what is computed with already
        cast = number * ((0 if kept and layout.zero == 3 else computed) + piped * computed)  # of a pipeline as it lies, and on the stages
        return int(stack + max(loss, backward) + gradients + cast)

    def _inside_bytes(self, mesh: tuple[tuple[str, int], ...], rows: int) -> int:
        """Bytes that the backward pass of a layer needs: gathered weights of two layers, weights of experts one matrix at a time."""
        sizes, number, model = dict(mesh), self.number, self.config.model
        routed, most = int(rows * self.rows[sizes["expert"]]), 0
        for kind in self.layers:
            inside = 4 * number * rows * kind.widths.get("up", 0) // sizes["tensor"] + 6 * number * rows * model.d_model
            inside += round(
                sum(
                    self.collectives.travels(kind, matmul) * (1 if matmul.experts else 2) * matmul.gathered(sizes)
                    for matmul in kind.matmuls
                )
            )
            if kind.experts:
                inside += 3 * number * routed * (kind.expert_width // sizes["tensor"] + model.d_model)
            if kind.experts and sizes["expert"] > 1:  # tokens of all, or choices, and sums
                inside += 4 * number * (routed if self.collectives.sends(sizes["expert"]) else rows * sizes["expert"]) * model.d_model
            most = max(most, inside)
        return most

    # Bounds

    def _least_bytes(self, layout: Layout, tokens: int) -> int:
        """State, and with it either every gradient or all that is kept; a sum over microbatches is there all the time.

        XLA may keep as much of them in VMEM as there is: all of a tiny model's. What predicts further ahead is in no loop, and not counted.
        """
        names = {*layout.kept, "layer_input"} - set(layout.offload) - {"mlp_out"}  # which is not used again
        if layout.remat in ("none", "dots"):
            names -= {"layer_input", "attention_out"}  # another tensor may stand for these
        rows = tokens // layout.microbatches
        stack = self._held_bytes(names, layout, rows, [kind for kind in self.layers if kind.depths[0] < self.config.model.n_layers])
        return self._least_with_stack(layout, self._waits_bytes(layout, stack))

    def _least_with_stack(self, layout: Layout, stack: int) -> int:
        """`_least_bytes` of a layout that keeps `stack` bytes for the backward pass."""
        weights = self.number * self._computed_with(layout).matrices if layout.zero < 3 or layout.sizes["stage"] > 1 else 0
        gradients = self._summed(layout).matrices - self._hosted(layout, "gradients")
        rest = 4 * gradients + weights + stack if self._accumulates(layout) else max(self.number * gradients, weights + stack)
        return self._shares(layout.mesh).state + max(0, rest - MOST_VMEM_BYTES)

    def _least_s(self, layout: Layout, tokens: int) -> float:
        """Seconds of the necessary FLOPs at peak, without waits. A loop iteration that XLA peels off may not be recomputed."""
        model, blocks = self.config.model, 0.0
        for kind in self.layers:
            share = self.passes(layout) if kind.pattern else 1
            for matmul in kind.matmuls:
                turns = 3 * len(kind.depths) + len(kind.looped) * self.recomputes(layout, matmul)
                blocks += share * turns * matmul.multiply_adds / (self.fastest if self.quantized.layers(kind, matmul) else 1)
        matmul_flops = 2 * (blocks + 3 * self.heads * model.d_model * model.vocab_size / layout.sizes["stage"])
        attention, looped = self.attention_flops
        flops = matmul_flops + self.passes(layout) * (3 * attention + self.recomputes_attention(layout) * looped)
        return tokens * flops / layout.sizes["tensor"] / self.topology.chip.peak_bf16_flops_per_device
