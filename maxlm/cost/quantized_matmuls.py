"""Matmuls that `precision.matmul` quantizes, and whether a compiled program computes them so: nothing may fall back in silence."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax
from flax import nnx

from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.matmul import QuantizedConfig
from maxlm.cost import model_shapes
from maxlm.cost.model_shapes import LayerKind
from maxlm.cost.pricing import format_of
from maxlm.hardware.chips import MatmulFormat
from maxlm.hlo.op_flops import Dot, dots, kernel_operands
from maxlm.hlo.parser import Module
from maxlm.kernels.quantize import MOST_SUMMED
from maxlm.models import mfu_format
from maxlm.models.quantized import is_quantized, kept_high
from maxlm.models.saved_tensors import Matmul

Sides = tuple[int, ...]  # of a matmul, shortest first; none: of experts

_GROUPED = "grouped_matmul_"  # names of our kernels of experts begin so
_MOST_PASSES = 4  # forward, the same recomputed, and the two of the gradient
_READ_THE_SAME = (  # matrices, as in precision.matmul.skip
    ("query", "key", "value"),
    ("query", "key"),
    ("key", "value"),
    ("gate", "up"),
    ("query_down", "kv_down"),
)
_SLACK = 0.01  # of the FLOPs


@dataclass(frozen=True)
class Intended:
    """Matmuls of one shape: how many layers quantize them, and FLOPs a step on one device. `names` as in precision.matmul.skip."""

    names: tuple[str, ...]
    low: float  # least FLOPs with 8-bit operands
    high: float  # most with wider ones
    found_low: float
    found_high: float

    @property
    def problem(self) -> str:
        """Difference of the compiled program from the settings, as a sentence; empty if there is none."""
        names = " and ".join(self.names)
        if self.found_low < (1 - _SLACK) * self.low:
            return f"precision.matmul: of {names}, {self.found_low / self.low:.0%} of the FLOPs that should have 8-bit operands do."
        if self.found_high > (1 + _SLACK) * self.high + _SLACK * self.low:
            return f"precision.matmul: matmuls of {names} with {self.found_high:.3g} FLOPs a step have operands of more than 8 bits."
        return ""


@dataclass(frozen=True)
class Quantization:
    """Matmuls of a model that `precision.matmul` quantizes."""

    formats: tuple[MatmulFormat, MatmulFormat]  # forward, and of the two of a gradient: there e5m2 meets e4m3, and is as fast
    names: frozenset[str]  # of matrices, as in `precision.matmul.skip`
    high: frozenset[int]  # layers, by depth, that are not quantized; multi-token prediction comes after all others
    unembedding: bool = False

    def layers(self, kind: LayerKind, matmul: Matmul) -> int:
        """Number of layers of this kind in which this matmul is quantized."""
        if matrix_of(matmul) not in self.names:
            return 0
        return sum(depth not in self.high for depth in kind.depths) if self.high else len(kind.depths)


def quantization_of(config: Config) -> Quantization:
    """The matmuls of the model of `config` that `precision.matmul` quantizes."""
    settings = config.precision.matmul
    if settings is None or settings.weights_only or settings.format == "int4":
        return Quantization(("bf16", "bf16"), frozenset(), frozenset())
    forward, gradient = mfu_format(config.precision.matmul), settings.gradient_element or "bf16"
    assert gradient != "int4", "gradients have no such format"
    return Quantization(
        (forward, "bf16" if gradient == "bf16" else forward),
        _names(settings, config.model),
        _high_depths(settings, config.model),
        settings.unembedding,
    )


def _names(settings: QuantizedConfig, model: ModelConfig) -> frozenset[str]:
    blocks = [model_shapes.abstract_module(model, kind.parts).block for kind in model_shapes.layers(model)]
    variables = jax.tree_util.tree_flatten_with_path(blocks, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))[0]
    low = [(path, variable) for path, variable in variables if is_quantized(settings, path, variable)]
    names = [str(getattr(path[-1], "name", getattr(path[-1], "key", ""))).rpartition("_")[0] for path, _ in low]
    return frozenset("experts" if "expert" in variable.axes else name for name, (_, variable) in zip(names, low, strict=True))


def _high_depths(settings: QuantizedConfig, model: ModelConfig) -> frozenset[int]:
    period, dense = len(model.layer_pattern), model.n_dense
    whole = (model.n_layers - dense) // period
    first, last = kept_high(settings, model, "layers")
    parts = {
        "head": range(dense),
        "layers": range(dense, dense + first * period),
        "end": range(dense + (whole - last) * period, dense + whole * period),
        "tail": range(dense + whole * period, model.n_layers),
        "ahead": range(model.n_layers, model.n_layers + model.mtp_depth),
    }
    kept = [depths for name, depths in parts.items() if name in ("layers", "end") or kept_high(settings, model, name)[0]]
    return frozenset(itertools.chain(*kept))


def matrix_of(matmul: Matmul) -> str:
    """The matrix behind a matmul, as `precision.matmul.skip` calls it."""
    return matmul.matrix or matmul.name


def check(config: Config, module: Module, sizes: Mapping[str, int]) -> tuple[Intended, ...]:
    """Every shape of quantized matmul of `config` on a mesh of `sizes`, with what the compiled `module` has. Of experts: all in one."""
    step = _Step(config, quantization_of(config), sizes)
    quantization = step.quantization
    if not quantization.names:
        return ()
    shapes: dict[Sides, list[tuple[str, bool, float]]] = {}  # sides -> (matrix, quantized, FLOPs of a forward pass)
    for sides, name, quantized, flops in step.matmuls():
        shapes.setdefault(sides, []).append((name, quantized, flops))
    found = _found(module)
    passes = 1 if quantization.formats[1] == "bf16" else 3
    needed = {sides: passes * sum(flops for _, quantized, flops in rows if quantized) for sides, rows in shapes.items()}
    _count_as_parts(found, needed, step.merges())
    intended = []
    for sides, rows in shapes.items():
        if not any(quantized for _, quantized, _ in rows):
            continue
        low = sum(flops for _, quantized, flops in rows if quantized)
        other = sum(flops for _, quantized, flops in rows if not quantized)
        matrices = tuple(dict.fromkeys(name for name, quantized, _ in rows if quantized))
        high = _MOST_PASSES * other + (2 * low if passes == 1 else 0)
        intended.append(Intended(matrices, passes * low, high, *found.get(sides, (0.0, 0.0))))
    return tuple(intended)


@dataclass(frozen=True)
class _Step:
    """Matmuls of a step of `config` on one device of a mesh of `sizes`, as its layers declare them."""

    config: Config
    quantization: Quantization
    sizes: Mapping[str, int]

    @property
    def rows(self) -> int:
        """Tokens of a microbatch on a device."""
        shards = math.prod(self.sizes[axis] for axis in ("data", "fsdp", "expert", "context"))
        return self.config.tokens_per_step // self.config.train.microbatches // shards

    def matmuls(self) -> Iterator[tuple[Sides, str, bool, float]]:
        """(sides, matrix, quantized, FLOPs of all forward passes of a step) of every matmul of a layer; experts have no sides."""
        config, sizes, rows = self.config, self.sizes, self.rows
        for kind in model_shapes.layers(config.model):
            for matmul in _as_computed(kind.matmuls):
                wide_in, wide_out = matmul.local(sizes["tensor"])
                sides = () if matmul.experts else tuple(sorted((rows, wide_in, wide_out)))
                a_layer = 2.0 * config.train.microbatches * rows * wide_in * wide_out * matmul.meets
                inside = self.quantization.layers(kind, matmul)
                for layers, low in ((inside, True), (len(kind.depths) - inside, False)):
                    if layers:
                        yield sides, matrix_of(matmul), low, layers * a_layer
        width, vocab = config.model.d_model, config.model.vocab_size // (sizes["tensor"] * sizes["stage"])
        if vocab <= MOST_SUMMED:  # a gradient of more is summed in parts
            positions = rows // config.train.loss_chunks
            heads = (1 + config.model.mtp_depth) * config.train.microbatches * config.train.loss_chunks
            flops = 2.0 * heads * positions * width * vocab
            yield tuple(sorted((positions, width, vocab))), "unembedding", self.quantization.unembedding, flops

    def merges(self) -> Iterator[tuple[Sides, list[Sides]]]:
        """(its sides, sides of its parts) of every matmul that XLA:GPU may make of several which read the same, the largest first."""
        for kind in model_shapes.layers(self.config.model):
            made = {matrix_of(matmul): matmul.local(self.sizes["tensor"]) for matmul in kind.matmuls if not matmul.experts}
            for names in _READ_THE_SAME:
                wides = [made[name] for name in names if name in made]
                if len(wides) == len(names):
                    wide_in = wides[0][0]
                    parts = [(*sorted((self.rows, wide_in, wide_out)),) for _, wide_out in wides]
                    yield (*sorted((self.rows, wide_in, sum(wide_out for _, wide_out in wides))),), parts


def _as_computed(matmuls: tuple[Matmul, ...]) -> Iterator[Matmul]:
    """Matmuls of a layer; results that are columns of one matrix as the one matmul that makes them."""
    shared = Counter(matmul.matrix for matmul in matmuls if matmul.matrix and not matmul.experts)
    for matmul in matmuls:
        if matmul.experts or shared[matmul.matrix] <= 1:
            yield matmul
    for matrix, parts in shared.items():
        if parts > 1:
            columns = [matmul for matmul in matmuls if matmul.matrix == matrix]
            yield replace(columns[0], wide_out=sum(matmul.wide_out for matmul in columns))


def _found(module: Module) -> dict[Sides, tuple[float, float]]:
    """FLOPs a step of matmuls with 8-bit operands, and with others, by sides; matmuls of experts, by kernels, under ()."""
    found: dict[Sides, tuple[float, float]] = {}
    for run in module.executed():
        computation = module.computations[run.computation]
        if _GROUPED in run.op.name and run.op.stated is not None:
            matmuls = [Dot(kernel_operands(run.op, computation), (), run.op.stated.flops)]
        else:
            matmuls = list(dots(module, run.op, computation))
        for dot in matmuls:
            low, high = found.get(dot.sides, (0.0, 0.0))
            flops = run.times * dot.flops
            found[dot.sides] = (low, high + flops) if format_of(dot.operands) == "bf16" else (low + flops, high)
    return found


def _count_as_parts(
    found: dict[Sides, tuple[float, float]], needed: Mapping[Sides, float], merges: Iterable[tuple[Sides, list[Sides]]]
) -> None:
    """Count merged matmuls with 8-bit operands as their parts; of a shape that others have as well only what these do not need. What has
    wider operands is not parted, since it may as well be a matmul that is none of these.
    """
    for merged, parts in 2 * [*merges]:  # twice: one may be as wide as a part of another that comes after it
        whole = sum(map(math.prod, parts))
        shares = Counter[Sides]()
        for part in parts:
            shares[part] += math.prod(part)
        low = {sides: found.get(sides, (0.0, 0.0))[0] for sides in (merged, *shares)}
        lacking = max((needed.get(part, 0.0) - low[part]) * whole / share for part, share in shares.items())
        moved = min(lacking, low[merged] - needed[merged]) if merged in needed else low[merged]
        if moved > 0:
            for sides, more in ((merged, -moved), *((part, moved * share / whole) for part, share in shares.items())):
                before, high = found.get(sides, (0.0, 0.0))
                found[sides] = (before + more, high)
