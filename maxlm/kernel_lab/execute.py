"""Simulate the scalar core of a kernel: addresses, conditions, branches. Every bundle is counted as often as a TPU issues it, and waits for
copies between HBM and VMEM are timed.
"""

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from maxlm.base.errors import UserError
from maxlm.hardware.chips import LANES
from maxlm.kernel_lab.bundles import Code, Instruction

DELAY = 4  # bundles after a branch that are issued all the same: as many as libtpu leaves empty there
DELAYS = {"TPU7x": 6}  # where they are others; there one empty bundle stands for all that are left empty at the end of a block
MOST_BUNDLES = 10**8  # a kernel that issues more does not end
GRANULE = 32  # bytes, in which copies are counted

_COPIES = ("dma.hbm_to_vmem", "dma.vmem_to_hbm", "dma.general")
_THREAD = re.compile(r"^\[thread:\S*\] *")  # before the first operand of a copy, or in its place
_NAMED = re.compile(r"[sp]\d+( |$)")  # a name of memory may follow
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b & 31),
    "sshra": lambda a, b: a >> (b & 31),
    "sshrl": lambda a, b: (a & 0xFFFFFFFF) >> (b & 31),
    "srem": lambda a, b: (a & 0xFFFFFFFF) % b,
    "smin": min,
    "smax": max,
    "scalar_lea": operator.add,
    "por": operator.or_,
    "pand": operator.and_,
    "pxor": operator.xor,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
}


@dataclass(frozen=True)
class Run:
    """Counts of one core. `cycles`: one a bundle, or the busiest matrix unit's cycles if more, without waits for memory.

    `moved`: bytes between HBM and VMEM. `waited`: cycles in which nothing is issued until they are there.
    """

    bundles: int
    units: Counter[str]
    moved: int
    waited: int

    @property
    def cycles(self) -> int:
        """Lower bound of the cycles."""
        return max(self.bundles, self.matrix)

    @property
    def matrix(self) -> int:
        """Busy cycles of the busiest matrix unit."""
        return max((count for unit, count in self.units.items() if unit.startswith("mxu")), default=0)


def execute(code: Code, operands: Sequence[np.ndarray], bytes_a_cycle: float = math.inf, device_kind: str = "") -> Run:
    """Run `code` with these first operands, the scalars it branches on. Values from vectors are taken to be 0. Copies run one after
    another at `bytes_a_cycle`, without latency. `device_kind`: the one that it was compiled for.

    Raises UserError for an unknown instruction and for a kernel that does not end.
    """
    core = _Core(code, operands, bytes_a_cycle, DELAYS.get(device_kind, DELAY))
    while core.at < len(code.bundles):
        core.step()
    units: Counter[str] = Counter()
    issued = list(itertools.accumulate(core.issued[:-1]))
    for number, times in enumerate(issued):
        for unit, count in code.units[number].items() if times else ():
            units[unit] += times * count
    return Run(sum(issued), units, core.memory.moved, math.ceil(core.memory.waited))


class _Memory:
    """Copies in flight between HBM and VMEM: the arrival time of each flag, and the cycles waited."""

    def __init__(self, bytes_a_cycle: float) -> None:
        self.bytes_a_cycle, self.moved, self.waited, self.free = bytes_a_cycle, 0, 0.0, 0.0
        self.arrivals: dict[int, float] = {}

    def send(self, flag: int, granules: int, issued: int) -> None:
        """Start a copy at cycle `issued`, after the copies before it; `flag` is raised when its last granule has arrived."""
        self.moved += granules * GRANULE
        self.free = max(self.free, issued + self.waited) + granules * GRANULE / self.bytes_a_cycle
        self.arrivals[flag] = self.free

    def wait(self, flag: int, issued: int) -> None:
        """Stall until `flag` is raised."""
        self.waited += max(self.arrivals.get(flag, 0.0) - issued - self.waited, 0.0)


class _Core:
    """Registers, SMEM and the pending branch of one core."""

    def __init__(self, code: Code, operands: Sequence[np.ndarray], bytes_a_cycle: float, delay: int) -> None:
        self.code, self.delay = code, delay
        self.starts = frozenset(code.regions.values())
        self.arrays = [operand for operand in operands if operand.size > 1]
        self.numbers = {place: int(operand.item()) for place, operand in enumerate(operands) if operand.size == 1}  # come in registers
        self.issued = [0] * (len(code.bundles) + 1)  # each time more often than the bundle before
        self.registers: dict[str, float] = {}
        self.smem: dict[int, int] = {}
        self.bases: dict[str, int] = {}
        self.at, self.jump = 0, (math.inf, 0)  # (bundle after which, where to)
        self.left, self.copied = MOST_BUNDLES, 0
        self.memory = _Memory(bytes_a_cycle)
        self.acting = [[instruction for instruction in bundle if _acts(instruction)] for bundle in code.bundles]
        self.quiet = list(range(len(code.bundles)))  # up to where nothing acts
        for number in reversed(range(len(code.bundles))):
            if not self.acting[number]:
                self.quiet[number] = number + 1 if number + 1 == len(code.bundles) else self.quiet[number + 1]

    def step(self) -> None:
        """Issue one bundle that acts, or all until the next that does: all of it is read before any of it is written."""
        number = self.at
        self.at = max(number + 1, int(min(self.quiet[number], self.jump[0] + 1)))
        self.issued[number] += 1
        self.issued[self.at] -= 1
        self.left -= self.at - number
        if self.left < 0:
            raise UserError(f"A kernel does not end within {MOST_BUNDLES:,} bundles: its scalars are not those that it was made for.")
        writes = [(i, 0 if i.opcode.startswith("dma") else self.value(i)) for i in self.acting[number] if self.holds(i.guard)]
        for instruction, value in writes:
            if instruction.opcode == "sbr.rel":
                self.jump = (self.last_issued(number), int(value))
            elif instruction.opcode == "sst":
                self.smem[self.address(instruction.operands[0])] = int(value)
            elif instruction.opcode.endswith("to_smem"):
                self.copy(instruction)
            elif instruction.opcode in _COPIES:
                _, size, _, flag = [operand for text in instruction.operands if (operand := _THREAD.sub("", text))][:4]
                self.memory.send(int(self.read(flag)), int(self.read(size)), MOST_BUNDLES - self.left)
            elif instruction.opcode == "dma.done.wait":
                self.memory.wait(int(self.read(instruction.operands[0])), MOST_BUNDLES - self.left)
            elif instruction.result:
                self.registers[instruction.result] = value
        if self.at > self.jump[0]:
            self.at, self.jump = self.jump[1], (math.inf, 0)

    def last_issued(self, branch: int) -> int:
        """The last bundle after a branch that is issued all the same."""
        if self.delay > DELAY:
            for number in range(branch + 1, branch + self.delay):
                if not self.code.bundles[number] and (number - 1 in self.code.ends or number + 1 in self.starts):
                    return number
        return branch + self.delay

    def holds(self, guard: str) -> bool:
        """True if the predicate register `guard` is set, or cleared with a `!` before its name; an empty guard always holds."""
        return not guard or bool(self.registers.get(guard.lstrip("!"), 0)) != guard.startswith("!")

    def value(self, instruction: Instruction) -> float:
        """Compute the result of a scalar instruction. Raises UserError for an opcode without an entry here."""
        name, _, kind = instruction.opcode.partition(".")
        operands = instruction.operands
        if name == "scmp":
            a, b = (self.read(operand) for operand in operands)
            if ".u32" in instruction.opcode:
                a, b = (int(x) & 0xFFFFFFFF for x in (a, b))
            return int(getattr(operator, kind.split(".")[0])(a, b))  # eq, ne, lt, le, gt or ge
        if name in _ARITHMETIC:
            a, b = (int(self.read(operand)) for operand in operands)
            if kind == "u32" and name in ("smin", "smax"):
                a, b = a & 0xFFFFFFFF, b & 0xFFFFFFFF
            return _signed(_ARITHMETIC[name](a, b))
        match name:
            case "smov" | "pmov" | "sst" | "int_to_ptr":
                return self.read(operands[-1].split("] ")[-1])
            case "pneg":
                return 1 - int(self.read(operands[0]))
            case "scalar_select":
                return self.read(operands[1] if self.holds(operands[0]) else operands[2])
            case "sld":
                return self.smem.get(self.address(operands[0]), 0)
            case "sbr":
                return self.code.regions[int(operands[-1].split("$region")[-1])]
            case "inlined_call_operand":
                index = int(next((part for part in operands if "index: " in part), "index: -1").split()[-1])
                return self.numbers.get(index, 0)
            case "spop":
                return self.registers.get(operands[0], 0)
        raise UserError(f"The kernel lab lacks the scalar instruction {instruction.opcode}.")

    def read(self, operand: str) -> float:
        """Value of an operand: a register (0 before its first write), an address in brackets, or a literal."""
        if _NAMED.match(operand):
            return self.registers.get(operand.split(maxsplit=1)[0], 0)
        if operand.startswith("["):
            return self.address(operand)
        number = float(operand.split(maxsplit=1)[0])
        return _signed(int(number)) if number.is_integer() else number

    def address(self, operand: str) -> int:
        """The address of an operand such as [smem:[#allocation6 + s4]]: allocations lie far apart, registers hold addresses or offsets."""
        place = operand.split("[", 1)[-1].removeprefix("smem:").strip("[]")
        return sum(self._term(part) for part in place.split("]")[0].split(" + "))

    def _term(self, part: str) -> int:
        if part.startswith("#"):
            return self.bases.setdefault(part, (len(self.bases) + 1) * 2**16)
        return int(part[1:], 16) if part.startswith("$") else int(self.read(part))

    def copy(self, instruction: Instruction) -> None:
        """A kernel begins by copying its scalars into SMEM, in order: rows of whole lanes, small integers of several rows to a word."""
        if self.copied == len(self.arrays):
            raise UserError(f"A kernel reads more than the {self.copied} arrays of scalars that the kernel lab was given for it.")
        array = self.arrays[self.copied]
        self.copied += 1
        rows, packed = array.reshape(-1, array.shape[-1]), 4 // array.dtype.itemsize
        padded = np.zeros((-(-len(rows) // packed) * packed, -(-rows.shape[1] // LANES) * LANES), array.dtype)
        padded[: len(rows), : rows.shape[1]] = rows
        values = np.ascontiguousarray(padded.reshape(-1, packed, padded.shape[1]).swapaxes(1, 2)).view(np.int32)
        target = int(self.read(instruction.operands[2]))
        for offset, value in enumerate(values.ravel().tolist()):
            self.smem[target + offset] = value


def _acts(instruction: Instruction) -> bool:
    """True if the scalar core must run it to find the control flow."""
    if instruction.opcode.startswith(("shalt", "sfence", "vsync", "sphi")):
        return False  # a phi shares the register of what flows into it
    if instruction.opcode in ("sbr.rel", "sst", "dma.done.wait", *_COPIES) or instruction.opcode.endswith("to_smem"):
        return True
    return (instruction.result[:1] in ("s", "p") or instruction.opcode.startswith("srem")) and not instruction.opcode.startswith("v")


def _signed(number: int) -> int:
    """The 32-bit integer that these bits are."""
    return (number + 2**31) % 2**32 - 2**31
