"""HBM traffic of an operation of a compiled program: the bytes it reads and writes."""

from maxlm.hlo.parser import PLUMBING, Computation, Module, Op

# Operations that read and write arrays, charged by their bytes where XLA gives no estimate.
MOVES = {"fusion", "copy", "reshape", "transpose", "sort", "scatter", "gather", "reduce", "pad", "dynamic-slice", "dynamic-update-slice"}

_PASSIVE = (PLUMBING - {"copy"}) | {
    "add-dependency", "after-all", "call", "conditional", "constant", "custom-call", "domain", "infeed", "outfeed", "parameter",
    "partition-id", "recv", "replica-id", "send", "tuple", "while",
}  # fmt: skip
_IN_PLACE = "output_to_operand_aliasing={{}: ("  # followed by the operand that a fusion's result aliases: the same array with other tiles


def works(op: Op) -> bool:
    """True if `op` makes its results itself, and does not call, begin, await or hand on something."""
    return op.opcode not in _PASSIVE and not op.opcode.endswith(("-start", "-done", "-update")) and not op.groups


def moved_bytes(module: Module, op: Op, computation: Computation) -> int:
    """Bytes that `op` of `computation` reads and writes in any memory; of an array sliced or updated in place, only the slice."""
    if op.opcode == "fusion":
        body = module.computations[op.calls[0]]
        return sum(_read(module, body, inner) for inner in body.ops if inner.opcode == "parameter") + _written(body, op)
    if op.opcode == "dynamic-update-slice":
        return 2 * computation.operand(op, 1).bytes
    if op.opcode in ("dynamic-slice", "slice"):
        return 2 * op.bytes
    scratch = op.shapes[-1] if op.is_library_matmul else None
    unwritten = scratch.bytes if scratch is not None and scratch.dtype == "s8" and len(scratch.dims) == 1 else 0
    read = [computation.by_name[name].bytes for name in op.operands if name in computation.by_name]
    if op.opcode == "gather":
        read[:1] = [op.bytes]
    return op.bytes - unwritten + sum(read)


def _read(module: Module, body: Computation, value: Op) -> int:
    """Bytes of `value` that the fused computation reads, by itself or in a fusion inside it: not what it hands on, nor what a collective
    inside it sends.
    """
    parts = [0]
    users = ((op, place) for op in body.ops for place, name in enumerate(op.operands) if name == value.name)
    for user, place in users:
        if user.opcode == "bitcast" or _looks(module, user, place):
            parts.append(_read(module, body, user))
        elif user.opcode == "tuple" or user.groups:
            continue
        elif user.opcode == "fusion":
            inner = module.computations[user.calls[0]]
            parts.append(_read(module, inner, next(op for op in inner.ops if op.opcode == "parameter" and op.index == place)))
        elif user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
            parts.append(user.bytes)
        elif user.opcode != "dynamic-update-slice" or place != 0:
            return value.bytes
    return max(min(sum(parts), value.bytes), *parts)  # a gather may read a row often


def _looks(module: Module, op: Op, place: int) -> bool:
    """True for a fusion that is its operand at `place` as it is, in other tiles."""
    if op.opcode != "fusion" or f"{_IN_PLACE}{place}," not in op.attributes:
        return False
    inner = module.computations[op.calls[0]]
    made = inner.source(inner.root)
    return made is not None and made.opcode == "parameter" and made.index == place


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
