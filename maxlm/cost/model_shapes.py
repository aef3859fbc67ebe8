"""A model as cost models need it: layers that are alike with what their modules declare, parameters, and what the optimizer adds."""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax

from maxlm.config.axes import mesh_axes_of
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.mesh import AXES
from maxlm.config.sections.offload_state import COPY
from maxlm.config.sections.optimizer_state import HALVES
from maxlm.config.table import state
from maxlm.hardware.chips import LANES, Chip
from maxlm.kernels.attention.mask import CAUSAL
from maxlm.kernels.attention.tpu import computed_pairs, padded
from maxlm.models import parameter_axes
from maxlm.models.decoder import Block
from maxlm.models.layers import layer_mask
from maxlm.models.moe import Moe
from maxlm.models.mtp import FutureTokenModule
from maxlm.models.parameters import abstract_parameters, is_matrix
from maxlm.models.saved_tensors import Matmul
from maxlm.models.stack import PATTERN
from maxlm.parallel.experts import rows_of_round
from maxlm.training.optimizer import build_optimizer


@dataclass(frozen=True)
class LayerKind:
    """Equal layers, at these `depths`. `looped`: those that surely stay in a loop; outside one, XLA may merge a recomputation with its
    first run.
    """

    depths: range
    looped: range
    experts: bool
    matmuls: tuple[Matmul, ...]
    widths: Mapping[str, int]  # numbers a token of the tensors that a remat policy may keep; of experts only what all rows share
    expert_width: int  # numbers of a row in each of `gate` and `up` of the experts
    pattern: bool = True  # of the layer pattern, which stages divide: neither dense layers before it nor multi-token prediction

    def width(self, name: str, rows: float) -> int:
        """Numbers a token of a tensor, where experts compute `rows` rows for each token."""
        return self.widths[name] + (math.ceil(rows * self.expert_width) if name in ("gate", "up") else 0)


@lru_cache(maxsize=64)
def abstract_module(model: ModelConfig, *, experts: bool) -> FutureTokenModule:
    """A multi-token prediction module with shapes for arrays; its `block` is like any layer with, or without, experts."""
    return jax.eval_shape(lambda: FutureTokenModule(model, Block(model, local=False, experts=experts)))


def layers(model: ModelConfig) -> tuple[LayerKind, ...]:
    """All layers by depth: dense ones before those with experts, the pattern, multi-token prediction."""
    dense, period = model.n_dense, len(model.layer_pattern)
    turns = max(0, (model.n_layers - dense) // period - 2)  # an iteration that XLA takes out of a loop may not be recomputed
    end, experts = model.n_layers + model.mtp_depth, model.moe is not None
    pattern, none = range(dense, model.n_layers), range(0)
    kinds = ((range(dense), none, False), (pattern, pattern[: turns * period], experts), (range(model.n_layers, end), none, experts))
    return tuple(_layer_kind(model, *kind) for kind in kinds if kind[0])


def _layer_kind(model: ModelConfig, depths: range, looped: range, experts: bool) -> LayerKind:
    module = abstract_module(model, experts=experts)
    attention, mlp = module.block.attention, module.block.mlp
    join = module.matmuls() if depths.start >= model.n_layers else ()
    widths = {"layer_input": model.d_model, **attention.saved_tensors(), **mlp.saved_tensors()}
    expert_width = mlp.up_DEF.shape[-1] if isinstance(mlp, Moe) else 0
    pattern = model.n_dense <= depths.start < model.n_layers
    return LayerKind(depths, looped, experts, (*join, *attention.matmuls(), *mlp.matmuls()), widths, expert_width, pattern)


def rows_of(model: ModelConfig, expert: int, tokens: int) -> int:
    """Rows that the experts of a device compute in a round, where `expert` devices have so many tokens each; 0 without experts."""
    return 0 if model.moe is None else rows_of_round(tokens, choices_of(model), model.moe.n_experts, expert)


def choices_of(model: ModelConfig) -> int:
    """Experts that a token chooses, or may be chosen by; 0 without experts."""
    if model.moe is None:
        return 0
    return model.moe.n_experts if model.moe.router.choice == "expert" else model.moe.top_k


def attention_flops(model: ModelConfig, seq_len: int, depths: range | None = None) -> float:
    """FLOPs a token of one forward pass through the attention of layers, by default all: two matmuls over the pairs that masks leave."""
    pairs = {kind: layer_mask(model, local=kind == "local").attended_pairs(seq_len) for kind in ("global", "local")}
    total = sum(pairs[kind] for kind in _pattern(model, depths))
    return 2 * model.n_heads * (model.head_dim + value_dim(model)) * total / seq_len


def kernel_attention_flops(model: ModelConfig, seq_len: int, chip: Chip) -> tuple[float, float]:
    """FLOPs a token that our attention kernel is charged, forward (two matmuls) and backward (five): whole blocks of a window, half of a
    square, heads padded to whole lanes.
    """
    causal = CAUSAL.attended_pairs(seq_len)
    charged = {}
    for kind in ("global", "local"):
        mask = layer_mask(model, local=kind == "local")
        at = (seq_len, model.head_dim, mask, chip.device_kinds[0])
        computed = computed_pairs(*at) if seq_len % LANES == 0 else (mask.attended_pairs(seq_len),) * 2
        charged[kind] = [min(pairs, causal) for pairs in computed]
    forward, backward = (sum(charged[kind][i] for kind in _pattern(model)) for i in (0, 1))
    keys, values = padded(model.head_dim), padded(value_dim(model))
    each = 2 * model.n_heads / seq_len
    return each * (keys + values) * forward, each * (3 * keys + 2 * values) * backward


def value_dim(model: ModelConfig) -> int:
    return abstract_module(model, experts=False).block.attention.out_HKD.shape[-2]


def _pattern(model: ModelConfig, depths: range | None = None) -> list[str]:
    depths = range(model.n_layers + model.mtp_depth) if depths is None else depths
    return [model.layer_pattern[depth % len(model.layer_pattern)] for depth in depths]


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
        moments[_parameter(jax.tree_util.keystr(path), named)] += leaf.size * leaf.dtype.itemsize
    leaves = []
    for (name, leaf), logical in zip(named.items(), axes, strict=True):
        split, scanned = tuple(itertools.chain(*mesh_axes_of(logical))), name.startswith(f"['{PATTERN[0]}']")
        kept = _by_tier(config, moments[name], leaf.size, matrix=is_matrix(logical), scanned=scanned)
        leaves.append(ParameterLeaf(leaf.size, kept, split, is_matrix(logical), scanned))
    return tuple(leaves)


def _by_tier(config: Config, moments: int, numbers: int, *, matrix: bool, scanned: bool) -> dict[str | None, int]:
    """Bytes of the state of a parameter in each tier of memory."""
    tiers, kept = config.memory.offload_state, state(config, dict.fromkeys(AXES, 1), moments, numbers, matrix=matrix)
    if HALVES in kept.entries and tiers is not None and tiers.weights is not None and scanned:
        kept = kept.move(HALVES, tiers.weights)
    found: Counter[str | None] = Counter()
    for name, entry in kept.entries.items():
        found[entry.tier] += entry.bytes * (name != COPY and (matrix or not entry.matrices))
    return found


def _parameter(moment: str, names: Collection[str]) -> str:
    """The parameter among `names` that an array of the optimizer's state belongs to, whose path ends as its whole name; else empty."""
    return max((name for name in names if moment.endswith(name)), key=len, default="")
