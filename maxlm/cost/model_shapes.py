"""A model as cost models need it: layers that are alike with what their modules declare, parameters, and what the optimizer adds."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax

from maxlm.config.layer_parts import LayerParts, layer_parts, mixer_class
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.mesh import AXES
from maxlm.config.sections.offload_state import COPY
from maxlm.config.sections.optimizer_state import HALVES
from maxlm.config.table import state
from maxlm.hardware.chips import Chip
from maxlm.kernels.attention.mask import CAUSAL
from maxlm.models import parameter_axes
from maxlm.models.decoder import Block
from maxlm.models.mtp import FutureTokenModule
from maxlm.models.parameters import abstract_parameters, is_matrix
from maxlm.models.saved_tensors import Matmul
from maxlm.models.stack import PATTERN
from maxlm.parallel import mesh_axes_of
from maxlm.parallel.experts import rows_of_round
from maxlm.training.optimizer import build_optimizer


@dataclass(frozen=True)
class LayerKind:
    """Equal layers, at these `depths`. `looped`: those that surely stay in a loop; outside one, XLA may merge a recomputation with its
    first run.
    """

    depths: Sequence[int]
    looped: Sequence[int]
    parts: LayerParts
    matmuls: tuple[Matmul, ...]
    rewritten: int  # numbers a token that the mixer writes again after its matmuls
    widths: Mapping[str, int]  # numbers a token of the tensors that a remat policy may keep; of experts only what all rows share
    pattern: bool = True  # of the layer pattern, which stages divide: neither dense layers before it nor multi-token prediction

    @property
    def experts(self) -> bool:
        """True if its feed-forward part has experts."""
        return self.expert_width > 0

    @cached_property
    def expert_width(self) -> int:
        """Numbers of a row in each of `gate` and `up` of the experts; 0 without any."""
        return next((matmul.wide_out for matmul in self.matmuls if matmul.experts and matmul.name == "up"), 0)

    def width(self, name: str, rows: float) -> int:
        """Numbers a token of a tensor, where experts compute `rows` rows for each token."""
        return self.widths.get(name, 0) + (math.ceil(rows * self.expert_width) if name in ("gate", "up") else 0)


@lru_cache(maxsize=64)
def abstract_module(model: ModelConfig, parts: LayerParts) -> FutureTokenModule:
    """A multi-token prediction module with shapes for arrays; its `block` is like any layer of these parts."""
    return jax.eval_shape(lambda: FutureTokenModule(model, Block(model, parts)))


def layers(model: ModelConfig) -> tuple[LayerKind, ...]:
    """All layers by depth: dense ones before those with experts, the pattern, multi-token prediction; other parts by themselves."""
    dense, period = model.n_dense, len(model.layer_pattern)
    turns = max(0, (model.n_layers - dense) // period - 2)  # an iteration that XLA takes out of a loop may not be recomputed
    looped = range(dense, dense + turns * period)
    runs = range(dense), range(dense, model.n_layers), range(model.n_layers, model.n_layers + model.mtp_depth)
    return tuple(_layer_kind(model, depths, looped) for run in runs for depths in _alike(model, run))


def _alike(model: ModelConfig, depths: Iterable[int]) -> Iterable[Sequence[int]]:
    """`depths`, grouped by layers with parts of the same classes."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for depth in depths:
        mixer, *others = layer_parts(model, depth)
        groups.setdefault((mixer_class(model, mixer), *others), []).append(depth)
    return groups.values()


def _layer_kind(model: ModelConfig, depths: Sequence[int], looped: range) -> LayerKind:
    parts = layer_parts(model, depths[0])
    module = abstract_module(model, parts)
    block = [part for part in (module.block.attention, module.block.memory, module.block.mlp) if part is not None]
    join = module.matmuls() if depths[0] >= model.n_layers else ()
    widths = {"layer_input": model.d_model}
    for part in block:
        widths |= part.saved_tensors()
    pattern = model.n_dense <= depths[0] < model.n_layers
    inside = [depth for depth in depths if depth in looped]
    matmuls = (*join, *(matmul for part in block for matmul in part.matmuls()))
    return LayerKind(depths, inside, parts, matmuls, block[0].rewritten, widths, pattern)


def rows_of(model: ModelConfig, expert: int, tokens: int) -> int:
    """Rows that the experts of a device compute in a round, where `expert` devices have so many tokens each; 0 without experts."""
    return 0 if model.moe is None else rows_of_round(tokens, choices_of(model), model.moe.n_experts, expert)


def choices_of(model: ModelConfig) -> int:
    """Experts that a token chooses, or may be chosen by; 0 without experts."""
    if model.moe is None:
        return 0
    return model.moe.n_experts if model.moe.router.choice == "expert" else model.moe.top_k


def attention_flops(model: ModelConfig, seq_len: int, depths: Iterable[int] | None = None) -> float:
    """FLOPs a token of one forward pass through the mixers of layers, by default all, over pairs of positions that masks leave."""
    return sum(mixer.pair_flops(seq_len) for mixer in _mixers(model, depths)) / 3


def kernel_attention_flops(model: ModelConfig, seq_len: int, chip: Chip) -> Mapping[float, tuple[float, float]]:
    """FLOPs a token that the TPU kernels of all mixers are charged, (forward, backward), by the share of a causal mask's pairs that the
    mixer's own mask leaves.
    """
    total: dict[float, tuple[float, float]] = {}
    for mixer in _mixers(model):
        if mixer.mask is None:
            continue
        share = mixer.mask.attended_pairs(seq_len) / CAUSAL.attended_pairs(seq_len)
        before, charged = total.get(share, (0.0, 0.0)), mixer.kernel_flops(seq_len, chip.device_kinds[0])
        total[share] = before[0] + charged[0], before[1] + charged[1]
    return total


def value_dim(model: ModelConfig) -> int:
    """Dims of a head's values; 0 for a model without attention."""
    return next((mixer.out_HKD.shape[-2] for mixer in _mixers(model) if mixer.mask is not None), 0)


def _mixers(model: ModelConfig, depths: Iterable[int] | None = None) -> list[Any]:
    depths = range(model.n_layers + model.mtp_depth) if depths is None else depths
    return [abstract_module(model, layer_parts(model, depth)).block.attention for depth in depths]


@dataclass(frozen=True)
class ParameterLeaf:
    """One array of parameters: how many numbers, bytes of its state by tier of memory (None: HBM), and the mesh axes that split it."""

    numbers: int
    state: Mapping[str | None, int]
    axes: tuple[str, ...]
    matrix: bool
    scanned: bool = False  # of the stack of layers

    def on_device(self, sizes: Mapping[str, int]) -> int:
        """Numbers on a device of a mesh of these sizes."""
        numbers = self.numbers
        for axis in self.axes:
            numbers //= sizes[axis]
        return numbers

    def held_bytes(self, tiers: tuple[str | None, ...], numbers: int) -> int:
        """Bytes that these tiers hold for so many numbers of it, without a copy that matmuls read."""
        return sum(self.state.get(tier, 0) for tier in tiers) * numbers // self.numbers


def parameter_leaves(config: Config) -> tuple[ParameterLeaf, ...]:
    """Every array of parameters, with the state that the optimizer adds."""
    shapes = abstract_parameters(config.model)
    optimizer = jax.tree_util.tree_flatten_with_path(jax.eval_shape(build_optimizer(config).init, shapes))[0]
    axes = jax.tree.leaves(parameter_axes(config.model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]}
    moments: Counter[str] = Counter()
    for path, leaf in optimizer:
        place = jax.tree_util.keystr(path)  # ends with the name of the parameter
        moments[max((name for name in named if place.endswith(name)), key=len, default="")] += leaf.size * leaf.dtype.itemsize
    leaves = []
    for (name, leaf), logical in zip(named.items(), axes, strict=True):
        split, scanned = tuple(itertools.chain(*mesh_axes_of(logical))), name.startswith(f"['{PATTERN[0]}']")
        matrix, whole = is_matrix(logical), dict.fromkeys(AXES, 1)
        kept, tiers = state(config, whole, moments[name], leaf.size, matrix=matrix), config.memory.offload_state
        if HALVES in kept.entries and tiers is not None and tiers.weights is not None and scanned:
            kept = kept.move(HALVES, tiers.weights)
        held: Counter[str | None] = Counter()
        for part, entry in kept.entries.items():
            held[entry.tier] += entry.bytes * (part != COPY and (matrix or not entry.matrices))
        leaves.append(ParameterLeaf(leaf.size, held, split, matrix, scanned))
    return tuple(leaves)
