"""HBM traffic of an operation of a compiled program: the bytes it reads and writes."""

from collections.abc import Iterator

from maxlm.hlo.parser import Computation, Module, Op

# Operations that read and write arrays, charged by their bytes where XLA gives no estimate.
MOVES = {
    "abs", "add", "and", "broadcast", "compare", "concatenate", "convert", "copy", "divide", "dynamic-slice", "dynamic-update-slice",
    "exponential", "fusion", "gather", "iota", "maximum", "minimum", "multiply", "negate", "not", "or", "pad", "reduce", "reduce-precision",
    "reduce-window", "reshape", "rsqrt", "scatter", "select", "slice", "sort", "sqrt", "subtract", "transpose",
}  # fmt: skip

_IN_PLACE = "output_to_operand_aliasing={{}: ("  # followed by the operand whose memory a fusion's result is: the same with other tiles


def moved_bytes(module: Module, op: Op, computation: Computation) -> int:
    """Bytes that `op` of `computation` reads and writes in any memory; of an array sliced or updated in place, only the slice."""
    if op.opcode == "fusion":
        body = module.computations[op.calls[0]]
        return sum(_read(module, body, inner) for inner in body.ops if inner.opcode == "parameter") + _written(body, op)
    if op.opcode == "dynamic-update-slice":
        return 2 * computation.operand(op, 1).bytes
    if op.opcode == "dynamic-slice":
        return 2 * op.bytes
    scratch = op.shapes[-1] if op.is_library_matmul else None
    unwritten = scratch.bytes if scratch is not None and scratch.dtype == "s8" and len(scratch.dims) == 1 else 0
    return op.bytes - unwritten + sum(computation.by_name[name].bytes for name in op.operands if name in computation.by_name)


def _read(module: Module, body: Computation, value: Op) -> int:
    """Bytes of `value` that the fused computation reads, by itself or in a fusion inside it: not what it hands on, nor what a collective
    inside it sends.
    """
    total = 0
    for user, place in _users(body, value):
        if user.opcode == "bitcast" or (user.opcode == "fusion" and f"{_IN_PLACE}{place}," in user.attributes):
            total += _read(module, body, user)
        elif user.opcode == "tuple" or user.groups:
            continue
        elif user.opcode == "fusion":
            inner = module.computations[user.calls[0]]
            total += _read(module, inner, next(op for op in inner.ops if op.opcode == "parameter" and op.index == place))
        elif user.opcode == "dynamic-slice" and place == 0:
            total += user.bytes
        elif user.opcode != "dynamic-update-slice" or place != 0:
            return value.bytes
    return min(total, value.bytes)


def _users(body: Computation, value: Op) -> Iterator[tuple[Op, int]]:
    return ((op, place) for op in body.ops for place, name in enumerate(op.operands) if name == value.name)


def _written(body: Computation, op: Op) -> int:
    """Bytes that `op`, which runs the fused computation, writes: of an array updated in place only the update, nothing of what it hands on
    or a collective inside it receives.
    """
    root = body.by_name.get(body.root)
    names = root.operands if root is not None and root.opcode == "tuple" else (body.root,)
    total = 0
    for name, shape in zip(names, op.shapes, strict=False):
        made = body.source(name)
        if made is not None and made.opcode == "dynamic-update-slice":
            total += body.operand(made, 1).bytes
        elif made is None or not (made.opcode == "parameter" or made.groups):
            total += shape.bytes
    return total
