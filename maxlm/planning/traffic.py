"""Seconds of the collectives of a layout: weights, gradients, and what tokens cause."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.compression import CompressionConfig
from maxlm.cost import model_shapes
from maxlm.cost.model_shapes import LayerKind, ParameterLeaf, choices_of
from maxlm.cost.network import AxisLinks, Network
from maxlm.cost.quantized_matmuls import Quantization
from maxlm.hardware.topologies import Topology
from maxlm.models.saved_tensors import Matmul
from maxlm.parallel.experts import sends
from maxlm.planning.layouts import Layout

EVERYWHERE: tuple[str, ...] = ("fsdp", "expert")  # axes that weights are gathered over
OF_EXPERTS: tuple[str, ...] = ("fsdp",)
MESSAGE = 1 << 14  # tokens of a message so large that hops do not count
FLOAT32 = 4  # bytes

# Collectives of a layer and token, recomputation included: gathers and scatters of hidden states between tensor-parallel regions.
TENSOR_REGIONS = 10
EXPERT_EXCHANGES = 3, 2  # to experts, and back
STAGE_ENDS = 8  # gathers and scatters of hidden states for embedding, loss and their gradients, which the stages of a pipeline divide


@dataclass(frozen=True)
class Traffic:
    """Seconds of collectives. Of weights and gradients: of one pass of a microbatch through all layers, of the same through what is in no
    stage of a pipeline, and once in an update. Of tokens: `crossing` a token that passes, `ring` a token and forward pass of attention, and
    `ring_backward` a token.
    """

    gathers: float
    sums: float
    end_gathers: float
    end_sums: float
    once: float
    crossing: float
    ends: float  # a token
    ring: float
    ring_backward: float


class Collectives:
    """The collectives of one config on one machine. `links`: physical links of the axes of a layout's mesh."""

    def __init__(
        self,
        model: ModelConfig,
        topology: Topology,
        links: Callable[[Layout], Mapping[str, AxisLinks]],
        leaves: Callable[[], tuple[ParameterLeaf, ...]],
        rows: Mapping[int, float],
        quantized: Quantization,
        number: int,
        compression: CompressionConfig | None,
        *,
        streamed: bool,
    ) -> None:
        """`number`: bytes of one in a matmul; `streamed`: layers are in host memory."""
        self.model, self.topology, self._leaves, self._rows = model, topology, leaves, rows
        self._links = lru_cache(maxsize=None)(lambda mesh, across: links(Layout(mesh, 1, 1, across_slices=across)))
        self.of = lru_cache(maxsize=None)(self._traffic)
        self.quantized, self.number, self._compression, self._streamed = quantized, number, compression, streamed
        self.layers = model_shapes.layers(model)
        self.heads = 1 + model.mtp_depth

    def _traffic(self, mesh: tuple[tuple[str, int], ...], across: str, zero: int, attention: str, parts: bool) -> Traffic:
        """Traffic on a mesh; `parts`: with several microbatches, so that gradients are summed over `data` once they are all there, unless
        the layers' gradients go to host memory one by one.
        """
        sizes = dict(mesh)
        network = Network(self.topology.chip, sizes, self._links(mesh, across))
        once = (parts or zero == 1 or sizes["stage"] > 1) and not self._streamed  # see `gradients.reduction_axes`
        weights = _Weights(self, network, sizes, zero, once=once)
        gathers, sums = weights.seconds([kind for kind in self.layers if kind.pattern])
        end_gathers, end_sums = weights.seconds([kind for kind in self.layers if not kind.pattern], table=True)
        forward, backward, ends = self._ring_s(network, sizes, attention), 0.0, 0.0
        crossing = self._crossing_s(network, sizes)
        if sizes["context"] > 1 and attention == "ring":
            backward = self._ring_s(network, sizes, attention, backward=True)
        elif sizes["context"] > 1:
            crossing, forward = crossing + 2 * forward + self._ring_s(network, sizes, attention, backward=True), 0.0
        if sizes["stage"] > 1:
            ends = STAGE_ENDS * network.seconds("all-gather", self.number * MESSAGE * self.model.d_model, ("stage",), sizes["stage"])
        once_s = weights.once_s + self._distribution_s(network, sizes)
        return Traffic(gathers, sums, end_gathers, end_sums, once_s, crossing, ends / MESSAGE, forward, backward)

    def travels(self, kind: LayerKind, matmul: Matmul) -> float:
        """Bytes of a number of gathered weights: quantized ones travel so."""
        low = self.quantized.layers(kind, matmul) / len(kind.depths)
        return low + (1 - low) * self.number

    def sends(self, devices: int) -> bool:
        """True if each token is sent to its experts only, rather than gathered by all."""
        return sends(devices, choices_of(self.model), "tpu" if self.topology.is_tpu else "gpu")

    def _crossing_s(self, network: Network, sizes: Mapping[str, int]) -> float:
        """Seconds a token of entering and leaving two tensor-parallel regions and of exchanges with experts, recomputation included."""
        one = self.number * MESSAGE * self.model.d_model
        depth = sum(len(kind.depths) for kind in self.layers)
        regions = TENSOR_REGIONS * depth * network.seconds("all-gather", one, ("tensor",), sizes["tensor"])
        exchanges = sum(len(kind.depths) for kind in self.layers if kind.experts)
        devices, sent = sizes["expert"], self.sends(sizes["expert"])
        opcodes = ("all-to-all", "all-to-all") if sent else ("all-gather", "reduce-scatter")
        size = int(one * (self._rows[devices] if sent else devices))
        exchanged = exchanges * sum(
            times * network.seconds(opcode, size, ("expert",), devices) for times, opcode in zip(EXPERT_EXCHANGES, opcodes, strict=True)
        )
        return (regions + exchanged) / MESSAGE

    def _ring_s(self, network: Network, sizes: Mapping[str, int], attention: str, *, backward: bool = False) -> float:
        """Seconds a token of exchanging what attention needs of other devices of `context`, in all layers: one pass.

        Ring: keys and values from device to device, backward their float32 gradients as well. Gather: the same at once. Ulysses: queries,
        keys, values and outputs.
        """
        count, axis = sizes["context"], ("context",)
        if count == 1:
            return 0.0
        total = 0.0
        for kind in self.layers:
            wide = {name: kind.widths.get(name, 0) * MESSAGE // sizes["tensor"] for name in ("query", "key", "value", "attention")}
            keys, size = wide["key"] + wide["value"], self.number
            if attention == "ulysses":
                one = sum(network.seconds("all-to-all", size * wide[name], axis, count) for name in wide)
            elif attention == "gather":
                one = network.seconds("all-gather", size * keys * count, axis, count)
                one += network.seconds("reduce-scatter", FLOAT32 * keys * count, axis, count) if backward else 0.0
            else:
                one = (count - 1) * network.seconds("collective-permute", (size + FLOAT32 * backward) * keys, axis, count)
            total += len(kind.depths) * one
        return total / MESSAGE

    def _distribution_s(self, network: Network, sizes: Mapping[str, int]) -> float:
        """Seconds, once an update, of moving whole layers to their stages, and their gradients back."""
        if sizes["stage"] == 1:
            return 0.0
        numbers = sum(leaf.on_device(sizes) for leaf in self._leaves())
        return sum(network.seconds("all-to-all", size * numbers, ("stage",), sizes["stage"]) for size in (self.number, FLOAT32))

    def sent_share(self, replicas: int) -> float:
        """Bytes of a gradient that are sent over `data`, as a share of those without compression, after its warm-up."""
        settings = self._compression
        if settings is None:
            return 1.0
        return settings.wire_bits / (8 * self.number) * (replicas / 2 if settings.kind == "top_k" else 1)


class _Weights:
    """Gathers of weights and sums of gradients on one mesh. `once_s`: seconds of those that an update has once, of what was asked for."""

    def __init__(self, collectives: Collectives, network: Network, sizes: Mapping[str, int], zero: int, *, once: bool) -> None:
        self.all, self.network, self.sizes, self.zero, self.once = collectives, network, sizes, zero, once
        self.once_s = 0.0

    def seconds(self, kinds: list[LayerKind], *, table: bool = False) -> tuple[float, float]:
        """Seconds, a microbatch, of gathering the weights of these layers forward and backward, and of summing their gradients; with
        `table`, of embedding and unembedding as well.
        """
        gathers = sums = 0.0
        for gathered, travel, summed, size, split in self._moves(kinds, table=table):
            inside = tuple(axis for axis in split if self.sizes[axis] > 1 and (axis != "fsdp" or self.zero == 3))
            count = math.prod(self.sizes[axis] for axis in inside)
            gathers += gathered * self.network.seconds("all-gather", travel, inside, count)
            sums += summed * self.network.seconds("reduce-scatter", size, inside, count)
            shards = math.prod(self.sizes[axis] for axis in split)
            if "fsdp" in split and self.zero < 3:
                fsdp = self.sizes["fsdp"]
                moves = (("all-gather", gathered / 2 * travel), ("reduce-scatter", summed * size))
                self.once_s += sum(self.network.seconds(opcode, round(part / count), ("fsdp",), fsdp) for opcode, part in moves)
            replicas = self.sizes["data"]
            sent = int(self.all.sent_share(replicas) * size) // shards
            over_data = summed * self.network.seconds("all-reduce", sent, ("data",), replicas)
            self.once_s += over_data * self.once
            sums += over_data * (not self.once)
            sums += summed * self.network.seconds("all-reduce", size // shards, ("context",), self.sizes["context"])
        return gathers, sums

    def _moves(self, kinds: list[LayerKind], *, table: bool) -> list[tuple[int, int, int, int, tuple[str, ...]]]:
        """(times gathered, bytes, times their gradients are summed, bytes, axes that split them) of weights that travel together."""
        model, number, heads = self.all.model, self.all.number, self.all.heads
        moves: list[tuple[int, int, int, int, tuple[str, ...]]] = []
        if table:
            size = number * model.vocab_size * model.d_model // (self.sizes["tensor"] * self.sizes["stage"])
            moves.append((2 * heads, size // number if self.all.quantized.unembedding else size, 2 + heads, size, EVERYWHERE))
        for kind in kinds:
            for axes, inside in ((EVERYWHERE, False), (OF_EXPERTS, True)):
                inside_of = [matmul for matmul in kind.matmuls if bool(matmul.experts) == inside]
                moved = sum(self.all.travels(kind, matmul) * matmul.gathered(self.sizes) for matmul in inside_of)
                size = number * sum(matmul.gathered(self.sizes) for matmul in inside_of)
                moves.append((2 * len(kind.depths), round(moved), len(kind.depths), size, axes))
        return moves
