"""Parse the text of a program that XLA has compiled and scheduled (`compiled.as_text()`) into typed records.

A record of an operation keeps how often it runs, its bytes, XLA's own estimate of its cycles, the devices of a collective and the place in
the model it comes from. Tested with libtpu 0.0.42.1 for v5e, v5p and v6e, and with jaxlib 0.10.2 on CPU.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from maxlm.base.errors import UserError
from maxlm.kernels.platform import RARELY

VMEM, HOST = 1, 5  # memory spaces as layouts write them, S(1) and S(5); 0, the default, is HBM

_BITS = {
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 16),
    **dict.fromkeys(("f32", "s32", "u32"), 32),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 64),
    "c128": 128,
}  # any other float has 8 bits, such as f8e4m3fn
_NO_ESTIMATE = 1 << 60  # XLA writes a number near 2**63 for no estimate

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OP = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_PAREN = re.compile(r"[()]")
_NAME = re.compile(r"%([\w.\-]+)")
_WHERE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLS = re.compile(
    r"\b(body|condition|calls|to_apply|called_computations|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_GROUPS = re.compile(r"\b(?:replica_groups|source_target_pairs)=(mesh\[.*?\}|\{\{.*?\}\}|\{\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_STATED = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["([\d",]*)"\]')
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")  # of a tuple
_TYPED = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)) [a-z][\w\-]*\(")
_AT_MOST = re.compile(r"at_most_(\d+)_turns")  # the scope of a loop with a trip count that depends on data, in the name of the operation
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_INTEGER = re.compile(r"-?\d+")
_TILES = re.compile(r'"tile_k\\*": (?P<deep>\d+), \\*"tile_n\\*": (?P<wide>\d+)')  # in the metadata of tokamax's kernels
_FIGURE = re.compile(r'"(\w+)":"?(\d+)')
SPARSE_CORE = "TODO(b/522284627)"  # target of the custom call that libtpu 0.0.52 wraps around what the SparseCore runs
CUBLAS = re.compile(r"__cublas\$(gemm|lt\$matmul(\$\w+)?)")  # targets of custom calls that are matmuls of NVIDIA's library
PALLAS = "tpu_custom_call"  # target of a Pallas kernel
INLINED = ("fusion", "call")  # runs another computation once, and its result is that root
_ESTIMATED = ("fusion", "dot", "convolution")  # have cycles once a TPU's machine code is made
PLUMBING = frozenset({"get-tuple-element", "bitcast", "optimization-barrier", "copy"})  # hands a value on unchanged


@dataclass(frozen=True, slots=True)
class Shape:
    """One array: element type, dims, and the memory it lies in (0 HBM, 1 VMEM, 5 host)."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return _BITS.get(self.dtype, 8)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without the padding of its layout; 0 for a token."""
        return 0 if self.dtype in ("token", "opaque") else -(-self.elements * self.bits // 8)


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """A Pallas kernel's own `pl.CostEstimate`, for one call."""

    flops: int
    bytes_accessed: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, as scheduled. Absent text is "", an absent number is None."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the results, nested tuples laid flat
    operands: tuple[str, ...]
    attributes: str  # what follows the operands, before metadata and backend_config; of a matmul of cuBLAS also what a dot states
    where: str  # metadata op_name: where in the model it arises
    cycles: int | None  # XLA's own estimate
    target: str  # of a custom call
    stated: CostEstimate | None
    groups: str  # replica_groups or source_target_pairs, as written
    calls: tuple[str, ...]  # computations it names; of a while loop its body first, then its condition
    start: str  # of a -done: the operation that began it, "" where a loop carries it in
    index: int | None  # of a parameter or a get-tuple-element
    literal: str  # of a constant
    trips: int | None  # of a while loop, how often it turns; None where data decides

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def is_library_matmul(self) -> bool:
        """True for a matmul of NVIDIA's library that says what it sums."""
        return CUBLAS.fullmatch(self.target) is not None and "lhs_contracting_dims" in self.attributes

    @property
    def turns(self) -> int:
        """Times that the called computation runs; loops with a data-dependent trip count as one."""
        return self.trips if self.opcode == "while" and self.trips is not None else 1


@dataclass(frozen=True)
class Computation:
    """Operations in the order in which the chip starts them."""

    name: str
    ops: tuple[Op, ...]
    root: str

    @cached_property
    def by_name(self) -> Mapping[str, Op]:
        """Operations by name."""
        return {op.name: op for op in self.ops}

    def operand(self, op: Op, place: int) -> Op:
        """The operation that makes the operand of `op` at `place`. Raises UserError when the program does not hold it."""
        made = self.by_name.get(op.operands[place]) if place < len(op.operands) else None
        if made is None:
            raise UserError(f"This compiled program is incomplete: an operand of {op.name} is not in it; write it again in full.")
        return made

    def source(self, name: str) -> Op | None:
        """The operation `name` gets its value from, past those which only hand it on; None where another computation made it."""
        op = self.by_name.get(name)
        while op is not None and op.opcode in PLUMBING and op.operands:
            op = self.by_name.get(op.operands[0])
        return op


@dataclass(frozen=True, slots=True)
class Executed:
    """An operation of `computation` that runs, `times` a step."""

    op: Op
    times: int
    computation: str


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str
    raised_vmem: bool | None = None  # compiled with more scoped VMEM than XLA's default; None: as `maxlm.hardware.xla_flags` has it

    @cached_property
    def has_cycles(self) -> bool:
        """True if XLA has estimated operations, as it does of a TPU's program with its machine code; before, of single numbers alone."""
        ops = (op for computation in self.computations.values() for op in computation.ops)
        return any(op.cycles is not None for op in ops if op.opcode in _ESTIMATED)

    def executed(self, computation: str = "", times: int = 1) -> Iterator[Executed]:
        """Every operation that runs with `computation`, by default the entry, into loops, calls, and the longer branch of a conditional.

        In schedule order; one that calls comes before what it calls. What a fusion holds is not listed: the fusion is what runs.
        """
        name = computation or self.entry
        for op in self.computations[name].ops:
            yield Executed(op, times, name)
            for callee in self.called(op):
                yield from self.executed(callee, times * op.turns)

    def called(self, op: Op) -> tuple[str, ...]:
        """The computations the chip enters when it runs `op`: a loop's body, a callee, the longer branch; none for a fusion."""
        if op.opcode == "while":
            return op.calls[:1]
        if op.opcode == "conditional":
            return (max(op.calls, key=self._work),)
        if op.opcode == "call" or op.target == SPARSE_CORE or (op.opcode.endswith("-start") and not op.groups):
            return op.calls[:1]
        return ()

    def cycles(self, computation: str) -> int:
        """Cycles of `computation`, run once, by XLA's estimates."""
        return sum(run.times * (run.op.cycles or 0) for run in self.executed(computation))

    def _work(self, computation: str) -> tuple[int, int]:
        """The same, and the bytes that it makes: where XLA has not estimated anything yet, these say which is longer."""
        handed_on = PLUMBING | {"parameter", "constant", "tuple"}
        made = (run for run in self.executed(computation) if run.op.opcode not in handed_on)
        return self.cycles(computation), sum(run.times * run.op.bytes for run in made)


def read(text: str) -> Module:
    """The program in `text`, the scheduled HLO that `compiled.as_text()` returns.

    Raises UserError when it is no HLO, is not scheduled, is cut short, or calls a computation it does not hold.
    """
    first = text[: text.find("\n")] if "\n" in text else text
    if not first.startswith("HloModule "):
        raise UserError(
            "This is no compiled program: its first line does not start with 'HloModule'; give what `compiled.as_text()` writes."
        )
    if "is_scheduled=true" not in first:
        raise UserError("This program is not scheduled (no is_scheduled=true in its first line); give the compiled one, not the lowered.")
    computations, entry = _computations(text)
    if not entry:
        raise UserError("This compiled program is cut short: it has no ENTRY computation; write it again in full.")
    for computation in computations.values():
        missing = next((callee for op in computation.ops for callee in op.calls if callee not in computations), None)
        if missing:
            raise UserError(
                f"This compiled program is incomplete: {computation.name} calls {missing}, which is not in it; write it again in full."
            )
    counted = {name: _with_trips(computation, computations) for name, computation in computations.items()}
    return Module(counted, entry)


def with_bounds(module: Module) -> Module:
    """`module`, its loops that depend on data turning as often as the scope that they stand in says they do at most."""

    def bounded(op: Op) -> Op:
        return replace(op, trips=_number(_AT_MOST, op.where)) if op.opcode == "while" and op.trips is None else op

    computations = {name: replace(body, ops=tuple(map(bounded, body.ops))) for name, body in module.computations.items()}
    return replace(module, computations=computations)


def _computations(text: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    entry = name = ""
    statements: list[str] = []
    for line in text.splitlines():
        if not name:
            header = _HEADER.match(line)
            if header:
                name, statements = header.group(2), []
                entry = name if header.group(1) else entry
        elif line == "}" or line.startswith("}, "):
            if line.startswith("}, ") and not line.startswith("}, execution_thread="):
                statements[-1] += line  # the end of an attribute that spans lines
                continue
            computations[name] = _computation(name, statements)
            name = ""
        elif _OP.match(line):
            statements.append(line)
        elif statements:
            statements[-1] += line  # frontend attributes may hold line breaks
    if name:
        raise UserError(f"This compiled program is cut short: its computation {name} does not end; write it again in full.")
    return computations, entry


def _computation(name: str, statements: list[str]) -> Computation:
    roots = [statement for statement in statements if statement.lstrip().startswith("ROOT ")]
    plain = Computation(name, tuple(map(_op, _with_elements(statements))), "")
    root = _op(roots[-1]).name if roots else ""
    ops = tuple(_with_start(op, plain) if op.opcode.endswith("-done") else _with_weights_once(op, plain) for op in plain.ops)
    return Computation(name, ops, root)


def _with_start(op: Op, computation: Computation) -> Op:
    """A -done with the operation that began it; an -update in between is passed over."""
    source = computation.source(op.operands[0]) if op.operands else None
    while source is not None and source.opcode.endswith("-update"):
        source = computation.source(source.operands[0])
    begun = source.name if source is not None and source.opcode.endswith("-start") else ""
    return replace(op, start=begun)


def _with_weights_once(op: Op, computation: Computation) -> Op:
    """A grouped matmul of tokamax with the bytes that it moves: it states the weights of a group for every tile of rows. Where a tile holds
    all that is summed over, the next tile of the group finds them in VMEM.
    """
    tiles = _TILES.search(op.attributes)
    if tiles is None or op.stated is None or len(op.shapes[0].dims) != 2:  # the gradient of weights reads none
        return op
    arrays = [shape for name in op.operands if (source := computation.by_name.get(name)) for shape in source.shapes]
    rows, columns = op.shapes[0].dims
    of_weights = [shape for shape in arrays if len(shape.dims) == 3]  # with scales, where they are quantized
    of_rows = [shape for shape in arrays if len(shape.dims) == 2 and shape.dims[0] == rows]
    deep = max((shape.dims[1] for shape in of_rows), default=0)
    if not of_weights or int(tiles["deep"]) < deep:
        return op
    moved = -(-columns // int(tiles["wide"])) * sum(shape.bytes for shape in of_rows) + sum(shape.bytes for shape in of_weights) + op.bytes
    return replace(op, stated=replace(op.stated, bytes_accessed=min(op.stated.bytes_accessed, moved)))


def _op(line: str) -> Op:
    match = _OP.match(line)
    assert match
    opcode = match.group(4)
    end = _closing(line, match.end())
    arguments, rest = line[match.end() : end], line[end + 1 :]
    attributes, _, backend = rest.partition(", backend_config=")
    attributes, _, metadata = attributes.partition(", metadata=")
    target = text_of(_TARGET, attributes)
    if CUBLAS.fullmatch(target) and (contracted := text_of(_CONTRACTED, backend)):
        attributes = f"{attributes}, lhs_contracting_dims={{{contracted.replace(chr(34), '')}}}"
    cycles = _number(_CYCLES, backend)
    index = int(arguments) if opcode == "parameter" else _number(_INDEX, attributes)
    return Op(
        name=match.group(2),
        opcode=opcode,
        shapes=_shapes(match.group(3)),
        operands=() if opcode in ("constant", "parameter") else tuple(_NAME.findall(arguments)),
        attributes=attributes,
        where=text_of(_WHERE, metadata),
        cycles=cycles if cycles is not None and cycles < _NO_ESTIMATE else None,
        target=target,
        stated=_stated(backend) if opcode == "custom-call" else None,
        groups=text_of(_GROUPS, attributes),
        calls=_calls(attributes),
        start="",
        index=index,
        literal=arguments if opcode == "constant" and len(arguments) < 64 else "",
        trips=_number(_TRIPS, backend),
    )


def _closing(line: str, start: int) -> int:
    depth = 1
    for paren in _PAREN.finditer(line, start):
        depth += 1 if paren.group() == "(" else -1
        if depth == 0:
            return paren.start()
    raise UserError(f"This compiled program is damaged: an operation does not end: {line.strip()[:80]}; write it again in full.")


@lru_cache(maxsize=1 << 14)
def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = _SPACE.search(layout)
        sizes = tuple(int(size.lstrip("<= ")) for size in dims.split(",") if size)
        shapes.append(Shape(dtype, sizes, int(space.group(1)) if space else 0))
    return tuple(shapes)


def _calls(attributes: str) -> tuple[str, ...]:
    named = {key: _NAME.findall(value) or [value] for key, value in _CALLS.findall(attributes)}
    body = named.pop("body", [])
    return tuple(itertools.chain(body, *named.values()))


def _stated(backend: str) -> CostEstimate | None:
    match = _STATED.search(backend)
    if not match:
        return None
    figures = {key: int(value) for key, value in _FIGURE.findall(match.group(1))}
    return CostEstimate(figures.get("flops", 0), figures.get("bytes_accessed", 0))


def text_of(pattern: re.Pattern[str], text: str) -> str:
    """The first group of `pattern` in `text`; empty where it does not match."""
    match = pattern.search(text)
    return match.group(1) if match else ""


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(match.group(1)) if match else None


def _with_trips(computation: Computation, computations: Mapping[str, Computation]) -> Computation:
    """`computation` with `trips` of loops: as XLA states, else from where the counter starts to the constant that ends it, by its steps.

    XLA may take the first turn out of a loop, and unrolls rings of matmuls (windowed einsum), which then step by 2. For GPUs it fuses the
    comparison and the addition. Loops in the scope `RARELY` turn 0 times. None stays where data decides otherwise.
    """
    ops = tuple(replace(op, trips=_trips(op, computation, computations)) if op.opcode == "while" else op for op in computation.ops)
    return replace(computation, ops=ops)


def _trips(op: Op, computation: Computation, computations: Mapping[str, Computation]) -> int | None:
    if op.trips is not None:
        return op.trips
    body, condition = (computations[name] for name in op.calls[:2])
    if any(RARELY in one.where for one in (op, *condition.ops)):  # XLA may drop the name of the loop itself
        return 0
    end = _end(condition.root, _Scope(condition, computations))
    if end is None or end.element is None:
        return None
    scope = _Scope(computation, computations)
    start = _fixed(_element(op.operands[0], end.element, scope), scope)
    turned = _element(body.root, end.element, _Scope(body, computations))
    if start is None or turned is None or turned.element != end.element or turned.offset <= 0:
        return None
    return max(0, -(-(end.offset - start) // turned.offset))


@dataclass(frozen=True, slots=True)
class _Scalar:
    """An integer: `offset`, added to element `element` of the state that a loop carries unless that is None."""

    element: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class _Scope:
    """A computation, and what the parameters of a fused one stand for; without `arguments` its parameter is the state of a loop."""

    computation: Computation
    computations: Mapping[str, Computation]
    arguments: tuple[_Scalar | None, ...] | None = None

    def inside(self, op: Op) -> "_Scope":
        """Return the scope of the computation that the fusion or call `op` runs."""
        arguments = tuple(_scalar(name, self) for name in op.operands)
        return _Scope(self.computations[op.calls[0]], self.computations, arguments)


def _fixed(value: _Scalar | None, scope: _Scope) -> int | None:
    """The constant that `value` is, also where the loops around it carry it along unchanged; None if it is none."""
    while value is not None and value.element is not None:
        body, computations = scope.computation, scope.computations
        users = [(outer, op) for outer in computations.values() for op in outer.ops if op.opcode == "while" and op.calls[0] == body.name]
        if _element(body.root, value.element, scope) != _Scalar(value.element, 0) or len(users) != 1:
            return None
        scope = _Scope(users[0][0], computations)
        before, added = _element(users[0][1].operands[0], value.element, scope), value.offset
        value = _Scalar(before.element, before.offset + added) if before is not None else None
    return value.offset if value is not None else None


def _end(name: str, scope: _Scope) -> _Scalar | None:
    """The counter of a condition with the result `name`, and as `offset` the first value that ends the loop; None if it is no count."""
    op = scope.computation.by_name.get(name)
    if op is None:
        return None
    if op.opcode in INLINED:
        inner = scope.inside(op)
        return _end(inner.computation.root, inner)
    if op.opcode in PLUMBING and op.opcode != "get-tuple-element":
        return _end(op.operands[0], scope)
    direction = text_of(_DIRECTION, op.attributes)
    if op.opcode != "compare" or direction not in ("LT", "LE", "GT", "GE"):
        return None
    counter, limit = (_scalar(one, scope) for one in (op.operands if direction[0] == "L" else reversed(op.operands)))
    if counter is None or limit is None or limit.element is not None:
        return None
    return _Scalar(counter.element, limit.offset - counter.offset + direction.endswith("E"))


def _scalar(name: str, scope: _Scope) -> _Scalar | None:
    """The value of `name`, through copies, additions and fusions, where it is a constant or an element of the state and a constant."""
    op = scope.computation.by_name.get(name)
    if op is None or any(shape.dims for shape in op.shapes[:1]):
        return None
    if op.opcode == "constant":
        return _Scalar(None, int(op.literal)) if _INTEGER.fullmatch(op.literal) else None
    if op.opcode == "parameter":
        return scope.arguments[op.index] if scope.arguments is not None and op.index is not None else None
    if op.opcode == "get-tuple-element":
        return _element(op.operands[0], op.index or 0, scope)
    if op.opcode in PLUMBING or op.opcode in ("copy-start", "copy-done"):
        return _scalar(op.operands[0], scope)
    if op.opcode in INLINED:
        inner = scope.inside(op)
        return _scalar(inner.computation.root, inner)
    if op.opcode != "add":
        return None
    left, right = (_scalar(one, scope) for one in op.operands)
    if left is None or right is None or None not in (left.element, right.element):
        return None
    return _Scalar(right.element if left.element is None else left.element, left.offset + right.offset)


def _element(name: str, place: int, scope: _Scope) -> _Scalar | None:
    """`_scalar` of element `place` of the tuple `name`."""
    op = scope.computation.by_name.get(name)
    if op is None:
        return None
    if op.opcode == "parameter" and scope.arguments is None:
        return _Scalar(place, 0)
    if op.opcode == "tuple":
        return _scalar(op.operands[place], scope) if place < len(op.operands) else None
    if op.opcode in INLINED:
        inner = scope.inside(op)
        return _element(inner.computation.root, place, inner)
    return _element(op.operands[0], place, scope) if op.opcode in PLUMBING and op.opcode != "get-tuple-element" else None


def _with_elements(statements: Sequence[str]) -> list[str]:
    """The statements of a computation, with a get-tuple-element, before the first use, in place of each `%x#1` (of libtpu 0.0.52)."""
    if not any("#" in statement for statement in statements):
        return list(statements)
    tuples = {match.group(1): match.group(2) for statement in statements if (match := _TYPED.match(statement))}
    lines: list[str] = []
    known: set[str] = set()
    for statement in statements:
        for name, index in dict.fromkeys(_ELEMENT.findall(statement)):
            element = f"{name}.element.{index}"
            if name in tuples and element not in known:
                known.add(element)
                shape = _tuple_shapes(tuples[name][1:-1])[int(index)]
                lines.append(f"  %{element} = {shape} get-tuple-element(%{name}), index={index}")
        lines.append(_ELEMENT.sub(lambda found: f"%{found[1]}.element.{found[2]}" if found[1] in tuples else found[0], statement))
    return lines


@lru_cache(maxsize=64)  # asked for once an element
def _tuple_shapes(text: str) -> tuple[str, ...]:
    """The shapes of a tuple, some of which may be tuples."""
    parts: list[str] = []
    depth = start = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return (*parts, text[start:].strip())
