"""Buffers that are live at the peak of a compiled program's memory, found by a replay of its schedule.

XLA states how many bytes a program needs, not what they are. Here every operation's results are followed until their last reader, a
loop's carried values are one buffer all along, updates in place take none, and donated arguments are given back to the outputs of the same
place. This estimates the composition; the total stays XLA's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from maxlm.hlo.parser import Computation, Module, Op, Shape

HBM = 0
_SAME = frozenset({"bitcast", "optimization-barrier", "copy-done", "reshape", "get-tuple-element", "tuple", "while"})


@dataclass(eq=False)
class Buffer:
    """A stretch of HBM: an array that is written by one operation or, in a loop, by several (`writers`, the first of them its maker)."""

    shape: Shape
    outside: bool = False  # an argument, or of a computation further out: its owner counts it
    writers: list[Op] = field(default_factory=list)
    stands_for: "Buffer | None" = None  # the buffer that it replaces

    @property
    def bytes(self) -> int:
        """Bytes of HBM; 0 for a buffer in another memory."""
        return self.shape.bytes if self.shape.memory_space == HBM else 0

    @property
    def place(self) -> "Buffer":
        """The buffer in memory that this one uses."""
        return self if self.stands_for is None else self.stands_for.place

    @property
    def where(self) -> str:
        """Place in the model that makes it: the deepest of its writers, since one outside a loop may only fill it with zeros."""
        named = [op.where for op in self.writers if op.where]
        return max(named, key=lambda where: where.count("/"), default="")


def at_peak(module: Module) -> tuple[Buffer, ...]:
    """The buffers, arguments excluded, that are live at the peak of the program."""
    entry = module.computations[module.entry]
    parameters = sorted((op for op in entry.ops if op.opcode == "parameter"), key=lambda op: op.index or 0)
    arguments = {op.name: [Buffer(shape, outside=True, writers=[op]) for shape in op.shapes] for op in parameters}
    donated = [buffer for op in parameters for buffer in arguments[op.name]]
    return _Replay(module, entry, arguments, donated).peak()


class _Replay:
    """One computation, run once. `given` are the buffers of its parameters, `kept` the buffers that its results replace, in order."""

    def __init__(self, module: Module, computation: Computation, given: dict[str, list[Buffer]], kept: Sequence[Buffer]) -> None:
        self.module, self.computation, self.values = module, computation, dict(given)
        self.inner: dict[int, tuple[Buffer, ...]] = {}  # what lives only inside a loop or call, at its fullest, by position
        self.made: dict[int, list[Buffer]] = {}
        for position, op in enumerate(computation.ops):
            if op.name not in self.values:
                self.values[op.name] = self._results(op, position)
        for result, place in zip(self.results, kept, strict=False):
            if result.place is not place.place and result.shape.dims == place.shape.dims and not result.place.outside:
                place.place.writers.extend(result.place.writers)
                result.place.stands_for = place.place

    @property
    def results(self) -> list[Buffer]:
        """Buffers of the root instruction, in the order of its shapes."""
        return self.values[self.computation.root]

    def peak(self) -> tuple[Buffer, ...]:
        """Buffers that are live at the peak, inner computations included."""
        last = self._last_reads()
        alive: dict[int, Buffer] = {}
        best: tuple[Buffer, ...] = ()
        most = -1
        for position, op in enumerate(self.computation.ops):
            dying = [buffer for buffer in self._read_by(op) if last[id(buffer)] == position]
            for buffer in self.made.get(position, ()):
                if buffer.place is not buffer or not buffer.bytes or id(buffer) not in last:
                    continue
                heir = next((b for b in dying if id(b) in alive and b.bytes == buffer.bytes and _in_place(op)), None)
                if heir is not None:  # an elementwise operation may write over what it reads for the last time
                    del alive[id(heir)]
                alive[id(buffer)] = buffer
            inner = self.inner.get(position, ())
            size = sum(buffer.bytes for buffer in alive.values()) + sum(buffer.bytes for buffer in inner)
            if size > most:
                best, most = (*alive.values(), *inner), size
            alive = {key: buffer for key, buffer in alive.items() if last[key] > position}
        return best

    def _last_reads(self) -> dict[int, int]:
        """id of a buffer -> position of its last reader; results are read after the end."""
        last: dict[int, int] = {}
        for position, op in enumerate(self.computation.ops):
            for buffer in self._read_by(op):
                last[id(buffer)] = position
            for buffer in self.made.get(position, ()):
                last.setdefault(id(buffer.place), position)
        for buffer in self.results:
            last[id(buffer.place)] = len(self.computation.ops)
        return last

    def _read_by(self, op: Op) -> Iterator[Buffer]:
        if op.opcode in ("tuple", "get-tuple-element", "bitcast"):
            return
        for operand in op.operands:
            for buffer in self.values.get(operand, ()):
                yield buffer.place

    def _results(self, op: Op, position: int) -> list[Buffer]:
        """The buffers an operation's results lie in; new ones are noted as made at `position`."""
        given = [buffer for operand in op.operands for buffer in self.values.get(operand, ())]
        if op.opcode == "while":
            body = self.module.computations[op.calls[0]]
            inside = _Replay(self.module, body, _passed(body, given), given)
            self.inner[position] = inside.peak()
            return given
        if op.opcode == "get-tuple-element":
            return _element(given, op)
        if (op.opcode in _SAME or op.opcode.endswith("-done")) and len(given) >= len(op.shapes):
            return given[-len(op.shapes) :] if op.opcode.endswith("-done") else given
        for callee in self.module.called(op):
            computation = self.module.computations[callee]
            if op.opcode in ("call", "conditional"):
                self.inner[position] = _Replay(self.module, computation, _passed(computation, given), ()).peak()
        reused = dict(self._written_over(op))
        made = self.made.setdefault(position, [])
        results = []
        for number, shape in enumerate(op.shapes):
            old = reused.get(number)
            if old is not None:
                old.place.writers.append(op)
            else:
                old = Buffer(shape, writers=[op])
                made.append(old)
            results.append(old)
        return results

    def _written_over(self, op: Op) -> Iterator[tuple[int, Buffer]]:
        """(number of a result, the operand's buffer it is written into)."""
        operands = [self.values.get(name, []) for name in op.operands]
        if op.opcode == "dynamic-update-slice" and operands[0]:
            yield 0, operands[0][0]
        elif op.opcode == "fusion":
            for result, operand in _updated_in_place(self.module.computations[op.calls[0]]):
                if operand < len(operands) and operands[operand]:
                    yield result, operands[operand][0]
        elif op.opcode.endswith("-start"):
            given = [buffer for buffers in operands for buffer in buffers]
            new = 0 if op.opcode == "copy-start" else len(op.shapes) - 1
            for number, shape in enumerate(op.shapes):
                same = next((b for b in given if (b.shape.dtype, b.shape.dims) == (shape.dtype, shape.dims)), None)
                if same is not None and number != new:
                    given.remove(same)
                    yield number, same


def _passed(computation: Computation, given: list[Buffer]) -> dict[str, list[Buffer]]:
    """The parameters of a called computation: views of the caller's buffers, which it does not count."""
    parameters = sorted((op for op in computation.ops if op.opcode == "parameter"), key=lambda op: op.index or 0)
    views = iter(given)
    return {op.name: [next(views, Buffer(shape, outside=True)) for shape in op.shapes] for op in parameters}


def _element(given: list[Buffer], op: Op) -> list[Buffer]:
    """One element of a tuple. Of nested tuples the text gives the leaves only, so its shape decides."""
    index = op.index or 0
    if len(op.shapes) == 1 and index < len(given) and given[index].shape.dims == op.shapes[0].dims:
        return [given[index]]
    return [next((b for b in given[index:] if b.shape.dims == shape.dims), Buffer(shape, outside=True)) for shape in op.shapes]


def _updated_in_place(fused: Computation) -> Iterator[tuple[int, int]]:
    """(result, operand) of a fusion that hands that operand on, or ends in a dynamic-update-slice of it."""
    root = fused.by_name.get(fused.root)
    if root is None:
        return
    for number, name in enumerate(root.operands if root.opcode == "tuple" else (fused.root,)):
        end = fused.source(name)
        if end is not None and end.opcode == "dynamic-update-slice":
            end = fused.source(end.operands[0])
        if end is not None and end.opcode == "parameter" and end.index is not None:
            yield number, end.index


def _in_place(op: Op) -> bool:
    return "kind=kLoop" in op.attributes or op.opcode in ("add", "multiply", "subtract", "convert", "select", "copy")
