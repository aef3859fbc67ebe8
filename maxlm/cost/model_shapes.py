"""What a model is made of, as the fast model needs it: matmuls of a layer, what a token keeps, parameters and what the optimizer adds."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from maxlm.config.schema import Config, ModelConfig
from maxlm.hardware.chips import Chip
from maxlm.kernels.attention.blocks import padded
from maxlm.kernels.attention.mask import CAUSAL
from maxlm.kernels.attention.tpu import LANES, computed_pairs
from maxlm.models import parameter_axes
from maxlm.models.attention import layer_mask
from maxlm.models.parameters import abstract_parameters, is_matrix
from maxlm.parallel import RULES
from maxlm.parallel.experts import rows_of_round

ROUTER, JOIN = "router", "join"  # matmuls whose result no remat policy knows: of routers, and of what predicts further ahead


@dataclass(frozen=True)
class Matmul:
    """[rows, wide_in] x [wide_in, wide_out] of one layer. `split`: what `tensor` divides, one of the two sides or, between tensor-parallel
    regions, the rows.
    """

    name: str
    wide_in: int
    wide_out: int
    split: str  # "in", "out" or "rows"
    experts: int = 0  # matrices side by side, of which a row meets one; 0: this is a matmul of one matrix
    meets: int = 1  # of them, those that a token meets

    def local(self, tensor: int) -> tuple[int, int]:
        """(in, out) on one device."""
        tensor_in, tensor_out = (tensor if self.split == side else 1 for side in ("in", "out"))
        return self.wide_in // tensor_in, self.wide_out // tensor_out

    @property
    def work(self) -> int:
        """Multiply-adds of a token."""
        return self.meets * self.wide_in * self.wide_out

    def gathered(self, sizes: Mapping[str, int]) -> int:
        """Numbers of the weights on one device, as it computes with them."""
        wide_in, wide_out = self.local(sizes["tensor"])
        return wide_in * wide_out * (self.experts // sizes["expert"] if self.experts else 1)


@dataclass(frozen=True)
class Layers:
    """Layers that are alike, at these `depths`. `looped`: of how many, that surely stay in a loop, what runs again is no second reader of
    what ran before.
    """

    depths: range
    looped: range
    experts: bool
    matmuls: tuple[Matmul, ...]
    widths: Mapping[str, int]  # numbers a token, by the names that a remat policy knows, but for what experts have inside
    inside: int  # a row's number of those in each of `gate` and `up` of the experts

    def width(self, name: str, rows: float) -> int:
        """Numbers a token where experts are given so many rows of it."""
        return self.widths[name] + (math.ceil(rows * self.inside) if name in ("gate", "up") else 0)


def layers(model: ModelConfig) -> tuple[Layers, ...]:
    """Of the whole model, by depth: dense ones before those with experts, the pattern, and modules that predict further ahead."""
    dense, period = model.n_dense, len(model.layer_pattern)
    turns = max(0, (model.n_layers - dense) // period - 2)  # a turn that XLA takes out of a loop may not run again
    end, experts = model.n_layers + model.mtp_depth, model.moe is not None
    pattern, none = range(dense, model.n_layers), range(0)
    kinds = ((range(dense), none, False), (pattern, pattern[: turns * period], experts), (range(model.n_layers, end), none, experts))
    join = (Matmul(JOIN, model.d_model, model.d_model, "rows"),) * 2
    return tuple(
        Layers(
            depths,
            looped,
            with_experts,
            (*(join if depths.start >= model.n_layers else ()), *matmuls(model, experts=with_experts)),
            widths(model, experts=with_experts),
            model.moe.d_ff if model.moe is not None and with_experts else 0,
        )
        for depths, looped, with_experts in kinds
        if depths
    )


def matmuls(model: ModelConfig, *, experts: bool = False) -> tuple[Matmul, ...]:
    """Of one layer, in the order in which they run, each named as what it makes."""
    width, moe = model.d_model, model.moe
    if not experts or moe is None:
        return (*_mixing(model), *_feed_forward(model, model.d_ff))
    return (
        *_mixing(model),
        Matmul(ROUTER, width, moe.n_experts, "rows"),
        *_feed_forward(model, moe.d_ff, moe.n_experts, moe.top_k),
        *(_feed_forward(model, moe.n_shared * moe.d_ff) if moe.n_shared else ()),
    )


def _mixing(model: ModelConfig) -> tuple[Matmul, ...]:
    """Attention's."""
    width, latent, n_heads = model.d_model, model.latent, model.n_heads
    heads, groups = n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    out = Matmul("attention_out", n_heads * value_dim(model), width, "in")
    if latent is None:
        return Matmul("query", width, heads, "out"), Matmul("key", width, groups, "out"), Matmul("value", width, groups, "out"), out
    squeezed = () if latent.q_rank is None else (Matmul("query_latent", width, latent.q_rank, "rows"),)
    return (
        *squeezed,
        Matmul("query", latent.q_rank or width, heads, "out"),
        Matmul("latent", width, latent.kv_rank + latent.rope_dim, "rows"),
        Matmul("key", latent.kv_rank, n_heads * latent.nope_dim, "out"),
        Matmul("value", latent.kv_rank, n_heads * latent.value_dim, "out"),
        out,
    )


def _feed_forward(model: ModelConfig, hidden: int, experts: int = 0, meets: int = 1) -> tuple[Matmul, ...]:
    gate = () if model.activation == "gelu" else (Matmul("gate", model.d_model, hidden, "out", experts, meets),)
    up, down = Matmul("up", model.d_model, hidden, "out", experts, meets), Matmul("mlp_out", hidden, model.d_model, "in", experts, meets)
    return (*gate, up, down)


def value_dim(model: ModelConfig) -> int:
    """Of a head's values."""
    return model.head_dim if model.latent is None else model.latent.value_dim


def widths(model: ModelConfig, *, experts: bool = False) -> Mapping[str, int]:
    """Numbers a token and layer, by the names that a remat policy knows; 0 for a gate that is not there. What experts have inside is left
    to who knows their rows: of `gate` and `up` only the shared ones' are here.
    """
    heads, groups = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    values, attention = model.n_kv_heads * value_dim(model), model.n_heads * value_dim(model)
    hidden = model.moe.n_shared * model.moe.d_ff if experts and model.moe is not None else model.d_ff
    gate = 0 if model.activation == "gelu" else hidden
    between = dict.fromkeys(("layer_input", "attention_out", "mlp_out"), model.d_model)
    return {**between, "query": heads, "key": groups, "value": values, "attention": attention, "gate": gate, "up": hidden}


def rows_of(model: ModelConfig, expert: int, tokens: int) -> int:
    """Rows that the experts of a device are given in a round, where `expert` devices have so many tokens each; 0 without experts."""
    return 0 if model.moe is None else rows_of_round(tokens, choices_of(model), model.moe.n_experts, expert)


def choices_of(model: ModelConfig) -> int:
    """Of a token, some of which may be none; 0 without experts."""
    if model.moe is None:
        return 0
    return model.moe.n_experts if model.moe.router.choice == "expert" else model.moe.top_k


def attention_flops(model: ModelConfig, seq_len: int, depths: range | None = None) -> float:
    """FLOPs a token of one forward pass through the attention of layers, by default all: two matmuls over the pairs that masks leave."""
    pairs = {kind: layer_mask(model, local=kind == "local").attended_pairs(seq_len) for kind in ("global", "local")}
    total = sum(pairs[kind] for kind in _pattern(model, depths))
    return 2 * model.n_heads * (model.head_dim + value_dim(model)) * total / seq_len


def attention_work(model: ModelConfig, seq_len: int, chip: Chip) -> tuple[float, float]:
    """FLOPs a token of our kernel, forward (two matmuls) and backward (five), as charged: whole blocks of a window, half of a square, heads
    padded to whole lanes.
    """
    causal = CAUSAL.attended_pairs(seq_len)
    works = {}
    for kind in ("global", "local"):
        mask = layer_mask(model, local=kind == "local")
        at = (seq_len, model.head_dim, mask, chip.device_kinds[0])
        computed = computed_pairs(*at) if seq_len % LANES == 0 else (mask.attended_pairs(seq_len),) * 2
        works[kind] = [min(pairs, causal) for pairs in computed]
    forward, backward = (sum(works[kind][i] for kind in _pattern(model)) for i in (0, 1))
    keys, values = padded(model.head_dim), padded(value_dim(model))
    each = 2 * model.n_heads / seq_len
    return each * (keys + values) * forward, each * (3 * keys + 2 * values) * backward


def _pattern(model: ModelConfig, depths: range | None = None) -> list[str]:
    depths = range(model.n_layers + model.mtp_depth) if depths is None else depths
    return [model.layer_pattern[depth % len(model.layer_pattern)] for depth in depths]


@dataclass(frozen=True)
class Held:
    """Parameters of one leaf: how many numbers, how many float32 the optimizer adds to each, and the mesh axes that split it."""

    numbers: int
    moments: int
    axes: tuple[str, ...]
    matrix: bool

    def on_device(self, sizes: Mapping[str, int]) -> int:
        """Numbers of one device."""
        numbers = self.numbers
        for axis in self.axes:
            numbers //= sizes[axis]
        return numbers


def held(config: Config) -> tuple[Held, ...]:
    """Every leaf of the parameters, with what the optimizer keeps of it."""
    import jax

    from maxlm.training.optimizer import build_optimizer

    shapes = abstract_parameters(config.model)
    optimizer = jax.tree_util.tree_flatten_with_path(jax.eval_shape(build_optimizer(config).init, shapes))[0]
    axes = jax.tree.leaves(parameter_axes(config.model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]}
    moments = Counter(_parameter(jax.tree_util.keystr(path), named) for path, _ in optimizer)
    leaves = []
    for (name, leaf), logical in zip(named.items(), axes, strict=True):
        leaves.append(Held(leaf.size, moments[name], tuple(axis for one in logical for axis in RULES[one]), is_matrix(logical)))
    return tuple(leaves)


def _parameter(moment: str, names: Collection[str]) -> str:
    """Of `names`, the parameter that part of the optimizer's state belongs to, which ends as its whole name does; empty where to none."""
    return max((name for name in names if moment.endswith(name)), key=len, default="")
