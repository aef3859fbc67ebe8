"""How long a step of a layout takes and what it holds, without compiling it: a fraction of a millisecond a layout.

The constants say what XLA made of Llama-3.1-8B for v5p (libtpu 0.0.42; seconds of `cost.estimate`). They only rank layouts: what decides is
compiled, and what was compiled corrects them (`calibrate`). The two `least_*` figures are true lower bounds, by which layouts are dropped.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from maxlm.config.schema import Config
from maxlm.hardware.topologies import Topology
from maxlm.hardware.xla_flags import FLAGS, SPARSE_CORE
from maxlm.kernels.attention.tpu import why_not
from maxlm.planning.collectives import HOST_BYTES_PER_S, AxisLinks, Network
from maxlm.planning.cost import ATTENTION_SHARES, HBM_SHARE, OUR_ATTENTION_SHARES
from maxlm.planning.search.layouts import Layout
from maxlm.planning.search.shapes import Held, Matmul, attention_flops, attention_work, held, matmuls, widths
from maxlm.planning.work import matrix_unit

MATMUL_SHARE = {"v5e": 0.94, "v5p": 0.97, "v6e": 0.81}  # of the peak, that large matmuls reach; of other chips, OTHER_SHARE is assumed
OTHER_SHARE = 0.88
# Bytes moved between HBM and the chip, a token and layer, as multiples of a tensor of that width in the dtype of the matmuls.
MODEL_WIDE, HIDDEN_WIDE = 28, 5  # norms and residuals; the activation, backward (forward it is part of a matmul)
NORMED_WIDE = 5  # norms of queries and keys, where a model has them
KEPT_MOVES, HOST_MOVES = 2.6, 8  # writing what is kept into its stack, and reading it; the same of what goes to the host
ALL_KEPT = 3  # what `none` keeps, as a multiple of the tensors that have names
LOGIT_BYTES = 4
TABLE_BYTES = 10  # a number of the unembedding, once a microbatch
STATE_BYTES = 40  # a parameter, once a step
# Shares of a collective's seconds that the chip waits for, where there is enough to compute meanwhile. A SparseCore, on chips that have
# one, drives those over fsdp and data.
GATHERS_WAIT, SUMS_WAIT, ALONE_WAIT = 0.1, 0.2, 0.9
TENSOR_WAIT, HOST_WAIT = 0.75, 0.1


# Host memory a chip (docs.cloud.google.com/tpu/docs: 192 GB for 4 chips of v5e, 1,536 GiB for 8 of v6e), and the share of it that may be
# taken from the loader and the checkpoints. Of chips that are not here, half of the HBM's size is assumed.
HOST_BYTES = {"v5e": 48e9, "v6e": 192 * 2**30}
HOST_SHARE = 0.75
LANES = 128  # a head is padded to a multiple
PASSES = {"default": 1, "high": 3, "highest": 6}  # through the matrix unit, of a float32 matmul
MOST_VMEM = 128 * 2**20  # bytes of a chip, of any kind (jax-ml.github.io/scaling-book, part 2)


@dataclass(frozen=True)
class Estimate:
    """One layout on one device. The first five are seconds of a step; host_s: waiting for copies between chip and host."""

    matmul_s: float
    attention_s: float
    memory_s: float
    exposed_s: float
    host_s: float
    state: int  # bytes of parameters, optimizer and batch, exact but for norms and biases
    temporaries: int  # bytes of everything else at the fullest moment
    least_bytes: int  # no program of this layout can do with less
    least_s: float  # nor be faster

    @property
    def parts(self) -> tuple[float, ...]:
        """Seconds: matmul, attention, memory-bound, waiting for other chips, waiting for the host."""
        return self.matmul_s, self.attention_s, self.memory_s, self.exposed_s, self.host_s


class Analytic:
    """The fast model of one config on one machine. `links` says how the axes of a mesh lie on the machine."""

    def __init__(self, config: Config, topology: Topology, links: Callable[[Layout], Mapping[str, AxisLinks]]) -> None:
        self.config, self.topology = config, topology
        self._links = lru_cache(maxsize=None)(lambda mesh, across: links(Layout(mesh, 1, 1, across_slices=across)))
        self._speech = lru_cache(maxsize=None)(self._speech_s)
        self.number = 2 if config.precision.compute == "bfloat16" else 4  # bytes of one in a matmul
        chip = topology.chip
        passes = PASSES[config.precision.matmul] if self.number == 4 else 1
        self.peak = chip.peak_bf16_flops_per_device / passes
        self.share = MATMUL_SHARE.get(chip.name, OTHER_SHARE)
        self.hbm = HBM_SHARE * chip.hbm_bytes_per_s / chip.devices_per_chip
        self.widths = widths(config.model)
        self.matmuls = matmuls(config.model)
        self.attention_flops = attention_flops(config.model, config.data.seq_len)
        self.attention_work = attention_work(config.model, config.data.seq_len, chip)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """Parameters, and what the optimizer adds to them."""
        return held(self.config)

    def estimate(self, layout: Layout) -> Estimate:
        """What `layout` takes and holds."""
        sizes = layout.sizes
        tokens = self.config.tokens_per_step // layout.shards  # of one device, in all microbatches
        compute = self._matmul_s(layout, tokens), self._attention_s(layout, tokens), self._memory_s(layout, tokens)
        state = self._state_bytes(layout.mesh) + 20 * tokens // sizes["context"]
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

    def fits_host(self, layout: Layout) -> bool:
        """Whether the hosts have room for what `layout` offloads."""
        chip = self.topology.chip
        room = HOST_BYTES.get(chip.name, chip.hbm_bytes / 2) * HOST_SHARE / chip.devices_per_chip
        return self._host_bytes(layout, self.config.tokens_per_step // layout.shards) <= room

    # Time

    @cached_property
    def attention_shares(self) -> tuple[float, float]:
        """Of the peak, forward and backward: our kernel's where it runs, splash's where not."""
        chip, model = self.topology.chip, self.config.model
        ours = any(not why_not(self.config.data.seq_len, model.head_dim, kind) for kind in chip.device_kinds)
        shares = OUR_ATTENTION_SHARES if ours else ATTENTION_SHARES
        return shares.get(chip.name, shares["v5p"])

    def again(self, layout: Layout) -> tuple[Matmul, ...]:
        """The matmuls of a layer that run a second time, since what they make was not kept."""
        model = self.config.model
        if layout.remat in ("none", "dots"):
            return ()
        saved = {*layout.kept, *layout.offload}
        found = []
        for matmul in self.matmuls:
            needed = matmul.name != "mlp_out" or model.norm_position == "sandwich"  # else nobody asks for it
            normed = model.qk_norm and matmul.name in ("query", "key")  # kept behind the norm, asked for before it
            if needed and (matmul.name not in saved or normed):
                found.append(matmul)
        return tuple(found)

    def attention_again(self, layout: Layout) -> bool:
        """Whether attention's forward pass runs twice."""
        return layout.remat != "none" and "attention" not in (*layout.kept, *layout.offload)

    def _matmul_s(self, layout: Layout, tokens: int) -> float:
        model, tensor = self.config.model, layout.sizes["tensor"]
        rows, parts = tokens // layout.microbatches, layout.microbatches
        again = self.again(layout)
        layer = sum((3 + (matmul in again)) * self._one_s(rows, *matmul.local(tensor)) for matmul in self.matmuls)
        vocab = 3 * layout.loss_chunks * self._one_s(rows // layout.loss_chunks, model.d_model, model.vocab_size // tensor)
        return parts * (model.n_layers * layer + vocab)

    def _one_s(self, rows: int, wide_in: int, wide_out: int) -> float:
        tile = matrix_unit(self.topology.chip)
        padded = math.ceil(wide_in / tile) * math.ceil(wide_out / tile) * tile**2
        moved = self.number * (rows * (wide_in + wide_out) + wide_in * wide_out)
        return max(2 * rows * padded / (self.share * self.peak), moved / self.hbm)

    def _attention_s(self, layout: Layout, tokens: int) -> float:
        forward, backward = self.attention_shares
        padded = math.ceil(self.config.model.head_dim / LANES) * LANES / self.config.model.head_dim
        work_forward, work_backward = self.attention_work
        work = padded * ((1 + self.attention_again(layout)) * work_forward / forward + work_backward / backward)
        return work * tokens / layout.sizes["tensor"] / self.peak

    def _memory_s(self, layout: Layout, tokens: int) -> float:
        model, tensor = self.config.model, layout.sizes["tensor"]
        wide = MODEL_WIDE * model.d_model + HIDDEN_WIDE * model.d_ff
        wide += NORMED_WIDE * model.qk_norm * (model.n_heads + model.n_kv_heads) * model.head_dim
        moved = self.number * model.n_layers * tokens / tensor * wide
        moved += KEPT_MOVES * layout.microbatches * self._stack_bytes(layout, tokens // layout.microbatches)
        moved += HOST_MOVES * self._host_bytes(layout, tokens)
        moved += tokens * model.vocab_size / tensor * LOGIT_BYTES
        moved += layout.microbatches / tensor * model.vocab_size * model.d_model * TABLE_BYTES
        moved += STATE_BYTES * self._numbers(layout.mesh)
        return moved / self.hbm

    def _exposed_s(self, layout: Layout, tokens: int, compute_s: float) -> float:
        gathers, sums, crossing = self._speech(layout.mesh, layout.across_slices)
        gathers, sums = layout.microbatches * gathers, layout.microbatches * sums
        shared = crossing * tokens  # between tensor-parallel regions
        driven = set(SPARSE_CORE) <= set(FLAGS.get(self.topology.chip.name, ()))
        waits = GATHERS_WAIT * gathers + SUMS_WAIT * sums if driven else ALONE_WAIT * (gathers + sums)
        waits += TENSOR_WAIT * shared
        return max(waits, gathers + sums + shared - compute_s)

    def _host_s(self, layout: Layout, tokens: int, compute_s: float) -> float:
        one_way = self._host_bytes(layout, tokens) / HOST_BYTES_PER_S.get(self.topology.chip.name, math.inf)
        return max(2 * HOST_WAIT * one_way, one_way - compute_s / 3)  # a third of the computing is the forward pass

    def _speech_s(self, mesh: tuple[tuple[str, int], ...], across: str) -> tuple[float, float, float]:
        """Seconds of gathering weights and of summing gradients, a microbatch; and of what tensor parallelism says, a token."""
        model, sizes = self.config.model, dict(mesh)
        network = Network(self.topology.chip, sizes, self._links(mesh, across))
        tensor, n = sizes["tensor"], model.n_layers
        layer = self.number * sum(matmul.wide_in * matmul.wide_out for matmul in self.matmuls) // tensor
        table = self.number * model.vocab_size * model.d_model // tensor
        gathers = sums = crossing = 0.0
        if sizes["fsdp"] > 1:  # weights are gathered forward and backward, and their gradients summed
            gathers = 2 * n * network.seconds("all-gather", layer, ("fsdp",), sizes["fsdp"])
            gathers += 2 * network.seconds("all-gather", table, ("fsdp",), sizes["fsdp"])
            sums = n * network.seconds("reduce-scatter", layer, ("fsdp",), sizes["fsdp"])
            sums += 3 * network.seconds("reduce-scatter", table, ("fsdp",), sizes["fsdp"])
        if sizes["data"] > 1:
            sums += n * network.seconds("all-reduce", layer // sizes["fsdp"], ("data",), sizes["data"])
            sums += 3 * network.seconds("all-reduce", table // sizes["fsdp"], ("data",), sizes["data"])
        if tensor > 1:  # a large message, so that the hops do not count: entering and leaving two regions, there, back and again
            tokens = 1 << 14
            crossing = 10 * n * network.seconds("all-gather", self.number * tokens * model.d_model, ("tensor",), tensor) / tokens
        return gathers, sums, crossing

    # Memory

    def _host_bytes(self, layout: Layout, tokens: int) -> int:
        wide = sum(self.widths[name] for name in layout.offload)
        return self.number * self.config.model.n_layers * tokens * wide // layout.sizes["tensor"]

    def _state_bytes(self, mesh: tuple[tuple[str, int], ...]) -> int:
        sizes = dict(mesh)
        return 4 * sum((1 + leaf.moments) * leaf.on_device(sizes) for leaf in self.held)

    def _numbers(self, mesh: tuple[tuple[str, int], ...]) -> int:
        """Parameters of one device."""
        sizes = dict(mesh)
        return sum(leaf.on_device(sizes) for leaf in self.held)

    def _stack_bytes(self, layout: Layout, tokens: int) -> int:
        """What is kept on the device for the backward pass of one microbatch of `tokens` tokens."""
        names = {*layout.kept, "layer_input"} - set(layout.offload)
        if layout.remat == "none":  # float32 of norms and of the activation is kept as well
            return ALL_KEPT * self.number * self.config.model.n_layers * tokens * sum(self.widths.values()) // layout.sizes["tensor"]
        return self.number * self.config.model.n_layers * tokens * sum(self.widths[name] for name in names) // layout.sizes["tensor"]

    def _temporaries(self, layout: Layout, tokens: int) -> int:
        model, tensor = self.config.model, layout.sizes["tensor"]
        rows = tokens // layout.microbatches
        numbers = self._numbers(layout.mesh)
        stack = self._stack_bytes(layout, rows)
        table, number = model.vocab_size * model.d_model // tensor, self.number
        layer = sum(matmul.wide_in * matmul.wide_out for matmul in self.matmuls) // tensor
        loss = table * (2 * number + 4) + rows // layout.loss_chunks * model.vocab_size // tensor * 6 + 6 * number * rows * model.d_model
        inside = 4 * number * rows * model.d_ff // tensor + 6 * number * rows * model.d_model
        backward = inside + 2 * number * layer + 4 * numbers
        gradients = 4 * numbers if layout.microbatches > 1 else 0
        return int(stack + max(loss, backward) + gradients + number * numbers)

    # Bounds

    def _least_bytes(self, layout: Layout, tokens: int) -> int:
        """State, and with it either every gradient or all that is kept; a sum over microbatches is there all the time.

        XLA may keep as much of them in VMEM as there is: all of a tiny model's.
        """
        names = {*layout.kept, "layer_input"} - set(layout.offload) - {"mlp_out"}  # nobody asks for that one again
        if layout.remat in ("none", "dots"):
            names -= {"layer_input", "attention_out"}  # another tensor may stand for these
        rows = tokens // layout.microbatches
        stack = self.number * self.config.model.n_layers * rows * sum(self.widths[name] for name in names) // layout.sizes["tensor"]
        numbers = sum(leaf.on_device(layout.sizes) for leaf in self.held if leaf.matrix)
        beside = 4 * numbers + stack if layout.microbatches > 1 else max(self.number * numbers, stack)
        return self._state_bytes(layout.mesh) + max(0, beside - MOST_VMEM)

    def _least_s(self, layout: Layout, tokens: int) -> float:
        """Every FLOP that must run, at the peak, and nobody waits for anything. A turn that XLA takes out of a loop may not run again."""
        model, tensor = self.config.model, layout.sizes["tensor"]
        turns = model.n_layers // len(model.layer_pattern)
        surely = max(0, turns - 2) / turns  # part of the layers that stay in a loop
        again = self.again(layout)
        layer = sum((3 + surely * (matmul in again)) * matmul.wide_in * matmul.wide_out for matmul in self.matmuls)
        matmul = 2 * (model.n_layers * layer + 3 * model.d_model * model.vocab_size)
        attention = (3 + surely * self.attention_again(layout)) * self.attention_flops
        return tokens * (matmul + attention) / tensor / self.topology.chip.peak_bf16_flops_per_device
