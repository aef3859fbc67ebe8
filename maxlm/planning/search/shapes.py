"""What a model is made of, as the fast model needs it: matmuls of a layer, what a token keeps, parameters and what the optimizer adds."""

from collections.abc import Mapping
from dataclasses import dataclass

from maxlm.config.schema import Config, ModelConfig
from maxlm.hardware.chips import Chip
from maxlm.kernels.attention.tpu import LANES, computed_pairs
from maxlm.models import parameter_axes
from maxlm.models.flops import attended_pairs
from maxlm.models.parameters import abstract_parameters, is_matrix
from maxlm.parallel import RULES


@dataclass(frozen=True)
class Matmul:
    """[tokens, wide_in] x [wide_in, wide_out] of one layer. `split`: which of the two sides `tensor` divides."""

    name: str
    wide_in: int
    wide_out: int
    split: str  # "in" or "out"

    def local(self, tensor: int) -> tuple[int, int]:
        """(in, out) on one device."""
        return (self.wide_in // tensor, self.wide_out) if self.split == "in" else (self.wide_in, self.wide_out // tensor)


def matmuls(model: ModelConfig) -> tuple[Matmul, ...]:
    """Of one layer, in the order in which they run, each named as what it makes."""
    width, heads, groups = model.d_model, model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    gate = () if model.activation == "gelu" else (Matmul("gate", width, model.d_ff, "out"),)
    return (
        Matmul("query", width, heads, "out"),
        Matmul("key", width, groups, "out"),
        Matmul("value", width, groups, "out"),
        Matmul("attention_out", heads, width, "in"),
        *gate,
        Matmul("up", width, model.d_ff, "out"),
        Matmul("mlp_out", model.d_ff, width, "in"),
    )


def widths(model: ModelConfig) -> Mapping[str, int]:
    """Numbers a token and layer, by the names that a remat policy knows; 0 for a gate that is not there."""
    heads, groups = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    gate = 0 if model.activation == "gelu" else model.d_ff
    between = dict.fromkeys(("layer_input", "attention_out", "mlp_out"), model.d_model)
    return {**between, "query": heads, "key": groups, "value": groups, "attention": heads, "gate": gate, "up": model.d_ff}


def attention_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs a token of one forward pass through the attention of all layers: two matmuls over the pairs that the masks leave."""
    pairs = {kind: attended_pairs(seq_len, model.window if kind == "local" else None) for kind in ("global", "local")}
    total = sum(pairs[model.layer_pattern[i % len(model.layer_pattern)]] for i in range(model.n_layers))
    return 4 * model.n_heads * model.head_dim * total / seq_len


def attention_work(model: ModelConfig, seq_len: int, chip: Chip) -> tuple[float, float]:
    """FLOPs a token of our kernel, forward (two matmuls) and backward (five), as charged: whole blocks of a window, half of a square."""
    causal = attended_pairs(seq_len)
    works = {}
    for kind in ("global", "local"):
        window = model.window if kind == "local" else None
        at = (seq_len, model.head_dim, window, chip.device_kinds[0])
        computed = computed_pairs(*at) if seq_len % LANES == 0 else (attended_pairs(seq_len, window),) * 2
        works[kind] = [min(pairs, causal) for pairs in computed]
    layers = [works[model.layer_pattern[i % len(model.layer_pattern)]] for i in range(model.n_layers)]
    pair = 2 * model.n_heads * model.head_dim / seq_len
    return 2 * pair * sum(forward for forward, _ in layers), 5 * pair * sum(backward for _, backward in layers)


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
    moments = [jax.tree_util.keystr(path) for path, _ in optimizer]  # end as the name of the parameter that they belong to
    axes = jax.tree.leaves(parameter_axes(config.model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = []
    for (path, leaf), names in zip(jax.tree_util.tree_flatten_with_path(shapes)[0], axes, strict=True):
        count = sum(moment.endswith(jax.tree_util.keystr(path)) for moment in moments)
        leaves.append(Held(leaf.size, count, tuple(axis for name in names for axis in RULES[name]), is_matrix(names)))
    return tuple(leaves)
