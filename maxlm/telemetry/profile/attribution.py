"""Time of a trace: by part of the model and phase, gaps, communication, the host. Bounded memory."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from maxlm.telemetry.profile.intervals import NONE, Spans, Times, self_times, settled, spans, union
from maxlm.telemetry.profile.programs import METADATA_PLANE, Instruction, Program, programs_of
from maxlm.telemetry.profile.scopes import COLLECTIVES, COPIES, OTHER_PROGRAMS, UNKNOWN, Phase, is_collective, phase_of, scope_of
from maxlm.telemetry.profile.xplane import EventKind, Events, Line, Plane, Trace

# N events of a block, R rows: different operations

HOST_MARK = "maxlm:"  # begins the names of what the training loop marks on the host
HOST_PLANE = "/host:CPU"
_TPU, _GPU = re.compile(r"^/device:TPU:\d+$"), re.compile(r"^/device:GPU:\d+")
_STREAM = re.compile(r"^Stream", re.IGNORECASE)
_HELD = 4 << 20  # events of a line that may wait for the end of one they are nested in
_DRAWN = 200_000  # events of the trace for a viewer, the longest
_COPY = re.compile(r"^(?:copy|bitcast|transpose|slice|dynamic-slice|dynamic-update-slice|Memcpy|Memset|wrapped_copy)", re.IGNORECASE)
_MEMORY = re.compile(r"^Mem(?:cpy|set)")  # of GPUs; events of no program
GAP_BOUNDS = (10**6, 10**7, 10**8, 10**9)  # picoseconds, between classes of gaps
LONGEST_GAPS = 12
_STATS = ("hlo_op", "program_id", "hlo_module", "kernel_details")  # the last only of kernels of GPUs


class Op(NamedTuple):
    """An operation of a program."""

    name: str
    opcode: str
    where: str
    scope: str
    phase: Phase
    program: str


@dataclass
class Drawn:
    """Events for a trace viewer: the longest, by device and line."""

    track: list[str] = field(default_factory=list)  # names of tracks
    start: list[np.ndarray] = field(default_factory=list)
    length: list[np.ndarray] = field(default_factory=list)
    row: list[np.ndarray] = field(default_factory=list)
    on: list[np.ndarray] = field(default_factory=list)  # numbers of tracks
    left_out: int = 0
    shortest: int = 0  # picoseconds; events that are no longer are left out

    def add(self, track: str, start_N: Times, length_N: Times, row_N: np.ndarray) -> None:
        """Add events of one track; beyond twice the limit only the longest stay."""
        if self.shortest:
            long = length_N > self.shortest
            self.left_out += len(long) - int(np.count_nonzero(long))
            start_N, length_N, row_N = start_N[long], length_N[long], row_N[long]
        if not self.track or self.track[-1] != track:
            self.track.append(track)
        for held, new in zip(self._all(), (start_N, length_N, row_N, np.full(len(row_N), len(self.track) - 1)), strict=True):
            held.append(new)
        if sum(map(len, self.row)) > 2 * _DRAWN:
            self.shorten()

    def shorten(self) -> None:
        """Keep the longest events."""
        for held in self._all():
            held[:] = [np.concatenate(held)] if held else []
        if self.row and len(self.row[0]) > _DRAWN:
            longest = np.argpartition(self.length[0], -_DRAWN)[-_DRAWN:]
            self.left_out += len(self.row[0]) - _DRAWN
            self.shortest = int(self.length[0][longest].min())
            for held in self._all():
                held[0] = held[0][longest]

    def _all(self) -> tuple[list[np.ndarray], ...]:
        return self.start, self.length, self.row, self.on


@dataclass
class Device:
    """One device, or all threads of the CPU. Times in picoseconds."""

    name: str
    window: int = 0  # from the first operation to the end of the last
    busy: int = 0  # any operation runs
    compute: int = 0  # one that is no collective
    communication: int = 0  # a collective
    gaps: list[tuple[int, int]] = field(default_factory=list)  # number and time of gaps, by GAP_BOUNDS
    longest_gaps: list[tuple[int, int]] = field(default_factory=list)  # start and end
    idle_beside: dict[str, int] = field(default_factory=dict)  # what the loop does on the host -> time of it in gaps
    own: dict[int, int] = field(default_factory=dict)  # row -> time of the operation itself, of all its events
    count: dict[int, int] = field(default_factory=dict)

    @property
    def exposed(self) -> int:
        """Communication without compute at the same time."""
        return self.busy - self.compute

    def add_times(self, compute: Spans, communication: Spans, host: Mapping[str, Spans]) -> None:
        """Sum up when it ran what."""
        busy = union(compute, communication)
        gaps = busy.gaps()
        length_M = gaps.end_M - gaps.start_M
        self.busy, self.compute, self.communication = busy.total, compute.total, communication.total
        self.window = int(busy.end_M[-1] - busy.start_M[0]) if len(busy.start_M) else 0
        for low, high in itertools.pairwise((0, *GAP_BOUNDS, np.inf)):
            inside = length_M[(length_M >= low) & (length_M < high)]
            self.gaps.append((len(inside), int(inside.sum())))
        longest = np.argpartition(-length_M, LONGEST_GAPS)[:LONGEST_GAPS] if len(length_M) > LONGEST_GAPS else range(len(length_M))
        self.longest_gaps = [(int(gaps.start_M[i]), int(gaps.end_M[i])) for i in longest]
        self.idle_beside = {name: marked.clipped_total(gaps) for name, marked in host.items()}


@dataclass
class Profile:
    """All that a trace tells, ready for a page. `host`: when the loop did what it marks, by name."""

    devices: list[Device] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)  # by row
    drawn: Drawn = field(default_factory=Drawn)
    host: dict[str, Spans] = field(default_factory=dict)
    memory: list[tuple[int, int]] = field(default_factory=list)  # (picoseconds, bytes) of the fullest allocator, in order of time
    is_cpu: bool = False

    @property
    def is_gpu(self) -> bool:
        """True for a trace of GPUs."""
        return any(device.name.startswith("GPU:") for device in self.devices)

    @property
    def own(self) -> dict[int, int]:
        """Time of every row on all devices."""
        total: dict[int, int] = {}
        for device in self.devices:
            for row, time in device.own.items():
                total[row] = total.get(row, 0) + time
        return total

    def table(self) -> dict[str, dict[Phase, int]]:
        """Time of all devices by scope and phase."""
        found: dict[str, dict[Phase, int]] = {}
        for row, time in self.own.items():
            op = self.ops[row]
            phases = found.setdefault(op.scope, {})
            phases[op.phase] = phases.get(op.phase, 0) + time
        return found

    @property
    def attributed(self) -> float | None:
        """Share of device time with a known place in the step; None without any."""
        table = self.table()
        total = sum(sum(phases.values()) for phases in table.values())
        unknown = sum(sum(table.get(scope, {}).values()) for scope in (UNKNOWN, COPIES))
        return 1 - unknown / total if total else None


class _Rows:
    """Numbers of operations, by what the events of a plane say of theirs."""

    def __init__(self, ops: list[Op], programs: Mapping[int, Program], plane: Plane) -> None:
        self._ops, self._programs, self._plane = ops, programs, plane
        self._known: dict[tuple[int, ...], int] = {}
        self._by_op: dict[Op, int] = {op: row for row, op in enumerate(ops)}
        self.stats = tuple(key if (key := plane.stat_id(name)) is not None else -1 for name in _STATS)

    def numbers(self, events: Events, named: bool) -> np.ndarray:
        """The row of every event; -1 of those that are no operation. `named`: events carry the stats of their operation."""
        columns = [events.metadata_N]
        if named:
            columns += [events.stats[key] if key >= 0 else np.full(len(events.metadata_N), -1) for key in self.stats]
            columns[-1] = np.minimum(columns[-1], 0)  # not what it says, which differs by kernel
        keys: list[tuple[int, ...]] = [()]
        code_N = np.zeros(len(events.metadata_N), np.int64)
        for column in columns:
            values, inverse_N = _dense(column)
            used, code_N = _dense(code_N * len(values) + inverse_N) if len(keys) > 1 or keys[0] else (np.arange(len(values)), inverse_N)
            keys = [(*keys[code // len(values)], int(values[code % len(values)])) for code in used]
        rows = np.array([self._row(key, named) for key in keys], np.int64)
        return rows[code_N]

    def _row(self, key: tuple[int, ...], named: bool) -> int:
        if key not in self._known:
            op = self._op(key, named)
            if op is None:
                self._known[key] = -1
            else:
                self._known[key] = self._by_op.setdefault(op, len(self._ops))
                if self._known[key] == len(self._ops):
                    self._ops.append(op)
        return self._known[key]

    def _op(self, key: tuple[int, ...], named: bool) -> Op | None:
        kind = self._plane.kinds.get(key[0], EventKind(""))
        name, where = _instruction_name(kind), _place(str(kind.stats.get("tf_op") or ""))
        number, module, title, opcode = kind.stats.get("program_id"), "", name, str(kind.stats.get("hlo_category") or "")
        if named:
            names = self._plane.stat_names
            if max(key[1], key[4]) < 0 and not _MEMORY.match(name):
                return None
            name, number, module = names.get(key[1], name), key[2], names.get(key[3], "")
        program = self._program(number, module)
        found = program.instructions.get(name) if program is not None else None
        found = found or Instruction("", "")
        where, opcode = where or found.where, found.opcode or opcode
        scope, label = scope_of(where), program.name if program is not None else module
        if is_collective(name, opcode) or is_collective(title):
            scope = COLLECTIVES
        elif scope == UNKNOWN and (_COPY.search(name) or _COPY.search(opcode)):
            scope = COPIES
        return Op(name if name == title else f"{name} {title}", opcode, where, scope, phase_of(where), label)

    def _program(self, number: Any, module: str) -> Program | None:
        if isinstance(number, int) and number in self._programs:
            return self._programs[number]
        named = module.partition("(")[0]
        return next((program for program in self._programs.values() if named and program.name == named), None)


def _instruction_name(kind: EventKind) -> str:
    """`fusion.12` of an event of that name, or of one that is named by its whole line, `%fusion.12 = ...`."""
    return kind.display_name or kind.name.split(" = ")[0].lstrip("%")


def _place(tf_op: str) -> str:
    """The op_name of `op_name:type`; op_names of several operations together hold colons, too."""
    place, _, kind = tf_op.rpartition(":")
    return place if place and not set("/()") & set(kind) else tf_op


def _dense(values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As np.unique with its inverse; small numbers without sorting."""
    low, high = int(values_N.min(initial=0)), int(values_N.max(initial=0))
    if high - low > 4 * len(values_N) + 1000:
        unique, inverse_N = np.unique(values_N, return_inverse=True)
        return unique, inverse_N
    present = np.zeros(high - low + 1, bool)
    present[values_N - low] = True
    unique = np.flatnonzero(present)
    place = np.cumsum(present) - 1
    return unique + low, place[values_N - low]


def profile_of(trace: Trace) -> Profile:
    """Reduce a trace. Raises UserError for one that is damaged."""
    profile, programs = Profile(), programs_of(trace)
    planes = [plane for plane in trace.planes if _TPU.match(plane.name) or _GPU.match(plane.name)]
    host = [plane for plane in trace.planes if plane.name == HOST_PLANE]
    profile.is_cpu = not planes
    for plane in host:
        _read_host(trace, plane, profile)
    for plane in planes or host:
        device = _device(trace, plane, profile, programs)
        if device.own:
            profile.devices.append(device)
    profile.drawn.shorten()
    _split_programs(profile)
    return profile


def _device(trace: Trace, plane: Plane, profile: Profile, programs: Mapping[int, Program]) -> Device:
    device, rows = Device("CPU" if plane.name == HOST_PLANE else plane.name.removeprefix("/device:")), _Rows(profile.ops, programs, plane)
    compute, communication = [], []
    for line, asynchronous in _lines(plane):
        for start_N, end_N, row_N in _settled(trace, line, rows, named=not _TPU.match(plane.name)):
            own_N, leaf_N = self_times(start_N, end_N)
            if _GPU.match(plane.name):
                leaf_N[:] = True  # a kernel may begin before the one ahead of it in its stream ends, and holds none
            moves = np.array([profile.ops[row].scope == COLLECTIVES for row in range(len(profile.ops))], bool)
            comm_N = moves[row_N]
            if not asynchronous:
                _add(device.own, row_N, own_N)
                _add(device.count, row_N, np.ones(len(row_N), np.int64))
                compute.append(spans(start_N[leaf_N & ~comm_N], end_N[leaf_N & ~comm_N]))
            communication.append(spans(start_N[comm_N], end_N[comm_N]))
            profile.drawn.add(f"{device.name} {line.name}".strip(), start_N, end_N - start_N, row_N)
    device.add_times(union(*compute, NONE), union(*communication, NONE), profile.host)
    return device


def _lines(plane: Plane) -> Iterator[tuple[Line, bool]]:
    """Lines of operations, and True for asynchronous ones: their time is no device time."""
    for line in plane.lines:
        if _TPU.match(plane.name):
            if line.name in ("XLA Ops", "Async XLA Ops"):
                yield line, line.name != "XLA Ops"
        elif plane.name == HOST_PLANE or _STREAM.match(line.name):
            yield line, False


def _settled(trace: Trace, line: Line, rows: _Rows, *, named: bool) -> Iterator[tuple[Times, Times, np.ndarray]]:
    """(starts, ends, rows) of the operations of a line in order, cut where none is nested in one of another part."""
    empty = np.zeros(0, np.int64)
    held: tuple[np.ndarray, ...] = (empty, empty, empty)
    for events in trace.blocks(line, rows.stats if named else ()):
        row_N = rows.numbers(events, named)
        real = (row_N >= 0) & (events.length_N > 0)
        new = events.start_N[real], events.start_N[real] + events.length_N[real], row_N[real]
        held = tuple(np.concatenate(pair) for pair in zip(held, new, strict=True))
        if np.any(np.diff(held[0]) <= 0):
            order = np.lexsort((-held[1], held[0]))
            held = tuple(array[order] for array in held)
        done = settled(held[0], held[1]) or (len(held[0]) if len(held[0]) > _HELD else 0)
        if done:
            yield held[0][:done], held[1][:done], held[2][:done]
            held = tuple(array[done:] for array in held)
    if len(held[0]):
        yield held[0], held[1], held[2]


def _add(total: dict[int, int], row_N: np.ndarray, value_N: np.ndarray) -> None:
    sums = np.bincount(row_N, weights=value_N)
    for row in np.flatnonzero(np.bincount(row_N)):
        total[int(row)] = total.get(int(row), 0) + int(sums[row])


def _read_host(trace: Trace, plane: Plane, profile: Profile) -> None:
    """Read marks of the loop, calls of compiled functions, and allocations into `profile`."""
    marks = {key: kind.name for key, kind in plane.kinds.items() if kind.name.startswith((HOST_MARK, "PjitFunction("))}
    allocations = {key for key, kind in plane.kinds.items() if kind.name in ("MemoryAllocation", "MemoryDeallocation")}
    allocated = plane.stat_id("bytes_allocated") if allocations else None
    name = plane.stat_id("allocator_name")  # each device has one, and so has the host
    allocator, by_allocator = -1 if name is None else name, dict[int, list[tuple[int, int]]]()
    found: dict[str, list[Spans]] = {}
    for line in plane.lines if marks or allocations else ():
        for events in trace.blocks(line, () if allocated is None else (allocated, allocator)):
            end_N = events.start_N + events.length_N
            for key in marks.keys() & set(_dense(events.metadata_N)[0].tolist()):
                mine = events.metadata_N == key
                found.setdefault(marks[key], []).append(spans(events.start_N[mine], end_N[mine]))
            if allocated is not None:
                mine = np.isin(events.metadata_N, list(allocations)) & (events.stats[allocated] >= 0)
                columns = (array[mine].tolist() for array in (events.stats[allocator], events.start_N, events.stats[allocated]))
                for owner, when, size in zip(*columns, strict=True):
                    by_allocator.setdefault(owner, []).append((when, size))
    profile.host = {name: union(*several) for name, several in found.items()}
    profile.memory = sorted(max(by_allocator.values(), key=lambda held: max(size for _, size in held), default=[]))


def _split_programs(profile: Profile) -> None:
    """Put what other programs than the main one, which takes most time, do in a row of their own."""
    times: dict[str, int] = {}
    for row, time in profile.own.items():
        times[profile.ops[row].program] = times.get(profile.ops[row].program, 0) + time
    main = max(filter(None, times), key=lambda name: times[name], default="")
    for row, op in enumerate(profile.ops):
        if op.program not in (main, "") and op.scope != COLLECTIVES:
            profile.ops[row] = op._replace(scope=OTHER_PROGRAMS, phase="update")


__all__ = ["METADATA_PLANE", "Device", "Op", "Profile", "profile_of"]
