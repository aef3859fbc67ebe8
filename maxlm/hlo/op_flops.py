"""FLOPs of compiled matmuls and attention kernels, from their shapes."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from maxlm.hlo.parser import Computation, Module, Op, Shape

OURS = re.compile(r"attention_(forward|backward)")  # the names of our kernels
ATTENTION = re.compile(r"attention|flash|splash|mha|mqa", re.IGNORECASE)
_LANES = 128  # of a TPU's vector
_SMALL = 1000  # times smaller than the largest operand: no matrix of a matmul
INDICES = ("s32", "u32", "pred")  # dtypes of arrays that no matmul reads

_FUNCTIONS = {  # which a TPU computes in another unit than sums and products, fewer of them a cycle
    "cosine", "divide", "erf", "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power", "rsqrt", "sine", "sqrt",
    "tanh",
}  # fmt: skip

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_GROUPED = re.compile(r"batch_group_count=(\d+)")
_PRECISION = re.compile(r"operand_precision=\{(\w+),(\w+)\}")
PASSES = {"default": 1, "high": 3, "highest": 6}  # through a TPU's matrix unit, of a matmul of two float32 arrays


@dataclass(frozen=True)
class Dot:
    """One matmul of a compiled program."""

    operands: str  # dtypes that it reads: "bf16", "s8", or "f8e4m3fn x f8e5m2" where the two differ
    sides: tuple[int, ...]  # its three lengths, shortest first; batch dims are part of them
    flops: int  # 2 a multiply-add
    passes: int = 1  # through a TPU's matrix unit


def dots(module: Module, op: Op, computation: Computation, tile: int = 1, *, merged: bool = False) -> Iterator[Dot]:
    """The matmuls that `op` is or, fused, contains. `tile`: the width of the matrix unit, to count features padded to whole tiles;
    `merged`: heads share a tile, each in whole lanes. A product that uses each number once, such as the sum of the few rows of a token that
    its experts made, is for the vector unit, which pads nothing.

    Operands are the dot's own: an array that a fusion converts before its dot counts in the dtype after the conversion.
    """
    if op.opcode in ("dot", "convolution") or op.is_library_matmul:
        left, right = (computation.operand(op, place).shapes[0] for place in (0, 1))
        exact = _flops(op, computation, 1, merged=False)
        once = exact <= 2 * max(shape.elements for shape in (left, right, op.shapes[0]))
        if flops := exact if once else _flops(op, computation, tile, merged):
            yield Dot(_pair(left.dtype, right.dtype), _sides(left, right, op.shapes[0]), flops, _passes(op, left, right))
    elif op.opcode == "fusion":
        for body in (module.computations[callee] for callee in op.calls):
            for inner in body.ops:
                yield from dots(module, inner, body, tile, merged=merged)


def matmul_flops(module: Module, op: Op, computation: Computation, tile: int = 1) -> int:
    """FLOPs of all `dots`; 0 without any."""
    return sum(dot.flops for dot in dots(module, op, computation, tile))


def flops_by_operands(module: Module, op: Op, computation: Computation) -> Mapping[str, int]:
    """FLOPs of all `dots` by the formats of their operands."""
    total: Counter[str] = Counter()
    for dot in dots(module, op, computation):
        total[dot.operands] += dot.flops
    return total


def unit_flops(module: Module, op: Op, computation: Computation, tile: int) -> Mapping[str, int]:
    """FLOPs that a TPU's matrix unit of width `tile` computes for all `dots`, by the formats of their operands: padded to whole tiles, and
    of float32 in all of its passes.
    """
    total: Counter[str] = Counter()
    for dot in dots(module, op, computation, tile, merged=True):
        total[dot.operands] += dot.passes * dot.flops
    return total


def computes_functions(module: Module, op: Op, computation: Computation) -> bool:
    """True for a fusion that computes exponentials, quotients or their like of an array as large as one of its matmuls reads or makes."""
    smallest = 0.99 * min((math.prod(dot.sides[:2]) for dot in dots(module, op, computation)), default=0)  # sides of batches are rounded
    return any(inner.opcode in _FUNCTIONS and inner.shapes[0].elements >= smallest for inner in _inside(module, op))


def _inside(module: Module, op: Op) -> Iterator[Op]:
    """Yield every operation of a fusion, and of the fusions in it; none of another operation."""
    for body in (module.computations[callee] for callee in op.calls if op.opcode == "fusion"):
        for inner in body.ops:
            yield inner
            yield from _inside(module, inner)


def kernel_operands(op: Op, computation: Computation) -> str:
    """Dtypes of the two narrowest matrices that a kernel reads, as `Dot` writes them: scales and what it adds are wider, and what says
    which blocks of a mask are empty (splash attention has it in 8 bits) is far smaller than the largest.
    """
    arrays = [shape for name in op.operands if (source := computation.by_name.get(name)) for shape in source.shapes]
    least = max((shape.elements for shape in arrays), default=0) / _SMALL
    large = (shape for shape in arrays if len(shape.dims) >= 2 and shape.dtype not in INDICES and shape.elements >= least)
    matrices = sorted(large, key=lambda shape: shape.bits)
    return _pair(*(shape.dtype for shape in matrices[:2])) if len(matrices) > 1 else ""


@dataclass(frozen=True)
class CausalAttention:
    """Shapes of one call of an attention kernel: `keys` tokens, and the FLOPs over the pairs that a causal mask leaves."""

    keys: int
    flops: int


def causal_attention(op: Op, computation: Computation) -> CausalAttention | None:
    """An attention kernel's shapes, from its queries and keys; None if they are not recognised.

    Two matmuls over every pair of tokens forward; backward three for dq, four for dk and dv, five for all in one kernel. A head dim counts
    as whole lanes: narrower ones leave a part of the matrix unit idle. A window, or documents that do not see each other, would make it
    less: kernels should state their cost.
    """
    arrays = [shape for name in op.operands if (source := computation.by_name.get(name)) for shape in source.shapes]
    if OURS.search(op.name):
        return _our_attention(op, [shape for shape in arrays if len(shape.dims) == 4])
    heads = [s for s in arrays if s.dtype in ("bf16", "f16", "f32") and len(s.dims) >= 3 and _head_dim(s)]
    if len(heads) < 2:
        return None
    query, key = heads[:2]
    results = sum(len(shape.dims) >= 3 and shape.dims[-1] in map(_head_dim, heads[:3]) for shape in op.shapes)
    over_keys, over_values = (1, 1) if not is_backward(op.name) else (3, 2) if results >= 3 else (2, 1) if "dq" in op.name else (2, 2)
    keys, queries = key.dims[-1] * key.dims[-2] // _head_dim(key), query.elements // _head_dim(query)
    dims = over_keys * _lanes(_head_dim(query)) + over_values * _lanes(_head_dim(heads[2] if len(heads) > 2 else key))
    return CausalAttention(keys, queries * keys * dims)  # 2 FLOPs a multiply-add, half of the pairs


def _our_attention(op: Op, heads_first: list[Shape]) -> CausalAttention | None:
    """Shapes of our attention kernels. Their first operands of four dims are queries, keys and values, [batch, heads, tokens, head dim]."""
    if len(heads_first) < 3:
        return None
    queries, _, values = heads_first[:3]
    batch, heads, tokens, head_dim = queries.dims
    keys, results = _lanes(head_dim), _lanes(values.dims[-1])
    return CausalAttention(tokens, batch * heads * tokens**2 * (3 * keys + 2 * results if is_backward(op.name) else keys + results))


def _lanes(size: int) -> int:
    """`size`, padded to whole lanes."""
    return _whole(size, _LANES)


def _head_dim(shape: Shape) -> int:
    """Head dim of queries or keys, [tokens, head dim] or transposed; 0 for any other shape."""
    return next((dim for dim in (shape.dims[-1], shape.dims[-2]) if dim in (64, 128, 192, 256)), 0)


def is_backward(name: str) -> bool:
    """True for the name, or source location, of an attention kernel of the backward pass."""
    return bool(re.search(r"dq|dkv|bwd|backward", name))


def _sides(left: Shape, right: Shape, result: Shape) -> tuple[int, ...]:
    sizes = left.elements, right.elements, result.elements
    whole = math.prod(sizes)
    return tuple(sorted(round(math.sqrt(whole) / size) for size in sizes)) if whole else (0, 0, 0)


def _passes(op: Op, left: Shape, right: Shape) -> int:
    precision = _PRECISION.search(op.attributes)
    if precision is None or "f32" not in (left.dtype, right.dtype):
        return 1
    passes = max(PASSES.get(name, 1) for name in precision.groups())
    return passes if left.dtype == right.dtype else min(passes, 3)  # bfloat16 is one of the three parts of a float32


def _pair(left: str, right: str) -> str:
    return left if left == right else " x ".join(sorted((left, right)))


def _flops(op: Op, computation: Computation, tile: int, merged: bool) -> int:
    left, right = (computation.operand(op, place).shapes[0] for place in (0, 1))
    result = op.shapes[0]
    if op.opcode != "convolution":
        contracted = _CONTRACTED.search(op.attributes)
        return 2 * result.elements * math.prod(left.dims[int(i)] for i in contracted.group(1).split(",") if i) if contracted else 0
    return _convolution_flops(op.attributes, left, right, result, tile, merged)


def _convolution_flops(attributes: str, left: Shape, right: Shape, result: Shape, tile: int, merged: bool) -> int:
    """A convolution, as which XLA:TPU writes every matmul: batch dims become spatial ones, padded or dilated so that most of the window
    falls on nothing. Only what falls on numbers counts (as in XLA's own HloCostAnalysis).
    """
    labels = _LABELS.search(attributes)
    if not labels:
        return 0
    left_labels, right_labels, result_labels = labels.groups()
    window = _window(attributes, right, right_labels)
    pairs = math.prod(
        _pairs(left.dims[left_labels.index(d)], result.dims[result_labels.index(d)], **figures) for d, figures in window.items()
    )
    grouped = _GROUPED.search(attributes)
    batch_group = int(grouped.group(1)) if grouped else 1
    summed, kept = (  # heads of both arrays, over which it sums, and heads of one of them
        math.prod(right.dims[right_labels.index(d)] for d in window if merged and side.dims[labels.index(d)] == 1)
        for side, labels in ((result, result_labels), (left, left_labels))
    )
    lanes = min(_LANES, tile)
    inputs = _whole(summed * _whole(right.dims[right_labels.index("i")], lanes), tile) // summed
    outputs = _whole(kept * _whole(result.dims[result_labels.index("f")], lanes), tile) // kept
    return 2 * pairs * left.dims[left_labels.index("b")] * outputs * inputs // batch_group


def _whole(size: int, tile: int) -> int:
    """`size`, padded to whole tiles."""
    return -(-size // tile) * tile


def _window(attributes: str, right: Shape, right_labels: str) -> dict[str, dict[str, int]]:
    """For each spatial dim: size, stride, padding before, and dilation of the two sides."""
    written = _WINDOW.search(attributes)
    fields = dict(part.split("=") for part in written.group(1).split()) if written else {}
    windows = {}
    for i, dim in enumerate(sorted(label for label in right_labels if label.isdigit())):
        given = {key: value.split("x")[i] for key, value in fields.items()}
        windows[dim] = {
            "size": right.dims[right_labels.index(dim)],
            "stride": int(given.get("stride", 1)),
            "before": int(given.get("pad", "0_0").split("_")[0]),
            "dilated": int(given.get("lhs_dilate", 1)),
            "spread": int(given.get("rhs_dilate", 1)),
        }
    return windows


@lru_cache(maxsize=4096)
def _pairs(width: int, results: int, size: int, stride: int, before: int, dilated: int, spread: int) -> int:
    """Number of (place of the result, place in the window) that fall on one of `width` numbers, not on padding or in a gap."""
    if stride == dilated == spread == 1 and before == 0 and results + size - 1 <= width:
        return results * size
    starts, end = np.arange(results) * stride - before, (width - 1) * dilated
    places = (starts + place * spread for place in range(size))
    return sum(int(np.count_nonzero((at >= 0) & (at <= end) & (at % dilated == 0))) for at in places)
