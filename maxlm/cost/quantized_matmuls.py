"""Matmuls that `precision.matmul` quantizes, and whether a compiled program computes them so: nothing may fall back in silence."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxlm.config.precision import QuantizedConfig, QuantizedMatrix
from maxlm.config.schema import Config
from maxlm.cost import model_shapes
from maxlm.cost.model_shapes import LayerKind
from maxlm.cost.pricing import format_of
from maxlm.hlo.op_flops import dots, kernel_operands
from maxlm.hlo.parser import Module
from maxlm.models.saved_tensors import Matmul

_MATRICES: dict[str, QuantizedMatrix] = {  # by the name of their result
    "query_latent": "query_down",
    "query": "query",
    "latent": "kv_down",
    "key": "key",
    "value": "value",
    "attention_out": "out",
    "gate": "gate",
    "up": "up",
    "mlp_out": "down",
}
_GROUPED = "grouped_matmul_"  # names of our kernels of experts begin so
_MOST_PASSES = 4  # forward, the same recomputed, and the two of the gradient
_SLACK = 0.01  # of the FLOPs


@dataclass(frozen=True)
class Intended:
    """Matmuls of one shape: those of layers that are quantized, and FLOPs a step on one device. `names` as in precision.matmul.skip."""

    names: tuple[str, ...]
    low: float  # least FLOPs with 8-bit operands
    high: float  # most with wider ones
    found_low: float
    found_high: float

    @property
    def problem(self) -> str:
        """What the compiled program does otherwise; empty where nothing."""
        names = " and ".join(self.names)
        if self.found_low < (1 - _SLACK) * self.low:
            return f"precision.matmul: of {names}, {self.found_low / self.low:.0%} of the FLOPs that should have 8-bit operands do."
        if self.found_high > (1 + _SLACK) * self.high + _SLACK * self.low:
            return f"precision.matmul: matmuls of {names} with {self.found_high:.3g} FLOPs a step have operands of more than 8 bits."
        return ""


def quantized_matrix(settings: QuantizedConfig, matmul: Matmul, *, latent: bool) -> bool:
    """True if `settings` quantize this matmul in the layers that they quantize at all."""
    name = _matrix(matmul, latent=latent)
    return name is not None and name not in settings.skip and not settings.weights_only and settings.format != "int4"


def quantized_layers(settings: QuantizedConfig, config: Config, kind: LayerKind) -> int:
    """Number of layers of this kind that are quantized."""
    first, last = settings.first_layers, config.model.n_layers - settings.last_layers
    return sum(first <= depth < last for depth in kind.depths)


def _matrix(matmul: Matmul, *, latent: bool) -> QuantizedMatrix | None:
    if matmul.experts:
        return "experts"
    return "kv" if latent and matmul.name in ("key", "value") else _MATRICES.get(matmul.name)


def check(config: Config, module: Module, sizes: Mapping[str, int]) -> tuple[Intended, ...]:
    """Every shape of quantized matmul of `config` on a mesh of `sizes`, with what the compiled `module` has. Of experts: all in one."""
    settings = config.precision.matmul
    if settings is None or settings.weights_only or settings.format == "int4":
        return ()
    shapes: dict[tuple[int, ...], list[tuple[str, bool, float]]] = {}  # sides -> (matrix, quantized, FLOPs of a forward pass)
    for sides, name, quantized, flops in _matmuls(config, settings, sizes):
        shapes.setdefault(sides, []).append((name, quantized, flops))
    found = _found(module)
    passes = 1 if settings.gradient_element is None else 3
    intended = []
    for sides, rows in shapes.items():
        if not any(quantized for _, quantized, _ in rows):
            continue
        low = sum(flops for _, quantized, flops in rows if quantized)
        other = sum(flops for _, quantized, flops in rows if not quantized)
        names = tuple(dict.fromkeys(name for name, quantized, _ in rows if quantized))
        high = _MOST_PASSES * other + (2 * low if passes == 1 else 0)
        intended.append(Intended(names, passes * low, high, *found.get(sides, (0.0, 0.0))))
    return tuple(intended)


def _matmuls(
    config: Config, settings: QuantizedConfig, sizes: Mapping[str, int]
) -> Iterator[tuple[tuple[int, ...], str, bool, float]]:
    """(sides, matrix, quantized, FLOPs of all forward passes of a step on a device) of every matmul of a layer; experts have no sides."""
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"] * sizes["context"]
    rows = config.tokens_per_step // config.train.microbatches // shards
    latent = config.model.latent is not None
    for kind in model_shapes.layers(config.model):
        inside = quantized_layers(settings, config, kind)
        for matmul in kind.matmuls:
            wide_in, wide_out = matmul.local(sizes["tensor"])
            sides = () if matmul.experts else tuple(sorted((rows, wide_in, wide_out)))
            a_layer = 2.0 * config.train.microbatches * rows * wide_in * wide_out * matmul.meets
            name, quantized = _matrix(matmul, latent=latent) or matmul.name, quantized_matrix(settings, matmul, latent=latent)
            for layers, low in ((inside, quantized), (len(kind.depths) - inside, False)):
                if layers:
                    yield sides, name, low, layers * a_layer


def _found(module: Module) -> dict[tuple[int, ...], tuple[float, float]]:
    """FLOPs a step of matmuls with 8-bit operands, and with others, by sides; those of experts, by kernels, under ()."""
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    for run in module.executed():
        computation = module.computations[run.computation]
        if _GROUPED in run.op.name and run.op.stated is not None:
            matmuls = [((), kernel_operands(run.op, computation), run.op.stated.flops)]
        else:
            matmuls = [(dot.sides, dot.operands, dot.flops) for dot in dots(module, run.op, computation)]
        for sides, operands, flops in matmuls:
            low, high = found.get(sides, (0.0, 0.0))
            wide = format_of(operands) == "bf16"
            found[sides] = (low, high + run.times * flops) if wide else (low + run.times * flops, high)
    return found
