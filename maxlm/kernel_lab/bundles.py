"""Parse the final machine code that libtpu dumps: bundles, each issued by one core of a TPU in one cycle."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DUMPS = ("final_bundles", "final_hlo-static-per-bundle-utilization", "post-delay-converter")  # code, slots, allocations
DUMPED = re.compile(rf"\d+-(?P<operation>.+)-\d+-(?P<dump>{'|'.join(DUMPS)})\.txt")  # how libtpu calls these files

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0) +(?:L[BHE]|P[BF]|CT)? *: *>* *\{", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_END = re.compile(r"(?<!/)End region \d+")
_INSTRUCTION = re.compile(r"(?:%(?P<result>\S+) = )?(?P<opcode>[a-z_]\w*(?:\.\w+)*)(?P<operands>.*)", re.DOTALL)
_VALUE = re.compile(r"\b[spv]\d+_([spv]\d+)\b")
_REMAINDER = re.compile(r"\bsdivrem(\.\w+ [^;}]*?)/\* kRem \*/")  # only the comment says which of both is popped
_GUARD = re.compile(r"\((!?)%(\w+)(?:, %\w+)?\)")  # the value in brackets lies in the register of the result

_ALLOCATION = re.compile(r"space=(vmem|smem), size = (\w+), offset = (\w+), scoped")
SPILLS = "VSTORE:SPILL"  # the slot for registers that do not fit


@dataclass(frozen=True)
class Instruction:
    """One slot of a bundle: `result` as register (s5, p0, v61; empty without one), run if `guard` (p3 or !p3; empty: always) holds."""

    opcode: str
    result: str
    guard: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """A kernel: its bundles in order, the bundle where each numbered region starts, and how many slots of each kind a bundle fills.

    `ends`: bundles where a region ends. `capacity`: slots of each kind that a bundle has. `memory`: bytes that the kernel takes of vmem
    and smem.
    """

    bundles: tuple[tuple[Instruction, ...], ...]
    regions: dict[int, int]
    slots: tuple[tuple[int, ...], ...]
    capacity: Mapping[str, int]
    memory: Mapping[str, int]
    ends: frozenset[int]

    @cached_property
    def units(self) -> tuple[Counter[str], ...]:
        """Slots that every bundle fills, and the cycles for which it keeps each matrix unit (`mxu0`) busy."""
        return tuple(self._units(bundle, slots) for bundle, slots in zip(self.bundles, self.slots, strict=True))

    @cached_property
    def _wide(self) -> bool:
        """True for two matrix units of 256 by 256, which take two rows a cycle; else four of 128 by 128, which take one."""
        return not any(instruction.opcode.endswith(("mxu2", "mxu3")) for bundle in self.bundles for instruction in bundle)

    def _units(self, bundle: tuple[Instruction, ...], slots: tuple[int, ...]) -> Counter[str]:
        counts = Counter({name: filled for name, filled in zip(self.capacity, slots, strict=True) if filled})
        # Rows that enter a wide unit, 16 of them, of 8 bits 32; or that leave a narrow one, 8: integers at twice the rate.
        rows = {"vmatprep.mubr": 8} if self._wide else {"vpop.f32.mrf": 8, "vpop.s32.mrf": 4}
        for instruction in bundle:
            for name, cycles in rows.items():
                if instruction.opcode.startswith(name):
                    counts[instruction.opcode.rsplit(".", 1)[-1]] += cycles
        return counts


def write_to(folder: str) -> None:
    """Make libtpu, which reads this when it is loaded, write the machine code of all that it compiles to `folder`."""
    dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={'|'.join(DUMPS)}"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}"


def written(paths: Iterable[Path]) -> dict[str, dict[str, Path]]:
    """Files of each operation's machine code by `DUMPS`, the last of each."""
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in sorted(paths):
        if match := DUMPED.fullmatch(path.name):
            found[match["operation"]][match["dump"]] = path
    return found


def load(paths: Mapping[str, Path]) -> Code:
    """The code in files by `DUMPS`, as `written` finds them."""
    return read(*(paths[dump].read_text(encoding="utf-8") for dump in DUMPS))


def read(text: str, utilization: str, allocations: str) -> Code:
    """The kernel in `text`, a file that libtpu's `final_bundles` dump wrote, and in two more, named as the other `DUMPS` are."""
    starts = list(_BUNDLE.finditer(text))
    bundles, regions, ends = [], {}, set()
    for number, start in enumerate(starts):
        body = text[start.end() : starts[number + 1].start() if number + 1 < len(starts) else len(text)]
        for region in _REGION.findall(body):
            regions[int(region)] = number
        if _END.search(body):
            ends.add(number)
        slots = _COMMENT.sub("", _REMAINDER.sub(r"srem\1", body)).strip().removesuffix("}").split(";;")
        bundles.append(tuple(_instruction(slot.strip()) for slot in slots if slot.strip()))
    _, names, capacity, _, *rows = utilization.strip().splitlines()
    filled = tuple(tuple(map(int, row.split())) for row in rows)
    memory: Counter[str] = Counter()
    for space, size, offset in _ALLOCATION.findall(allocations):
        memory[space] = max(memory[space], int(size, 0) + int(offset, 0))
    slots_of_each = dict(zip(names.split(", "), map(int, capacity.split()), strict=True))
    return Code(tuple(bundles), regions, filled, slots_of_each, memory, frozenset(ends))


def _instruction(text: str) -> Instruction:
    match = _INSTRUCTION.match(text)
    if match is None:
        raise ValueError(f"no instruction: {text!r}")
    operands = match["operands"]
    guard = _GUARD.search(operands)
    if guard is not None and match["opcode"] != "scalar_select":
        operands = operands[: guard.start()] + operands[guard.end() :]
    named = f"{guard[1]}{_register(guard[2])}" if guard else ""
    queued = match["opcode"].startswith("srem")  # its result is popped by its name
    result = _register(match["result"]) if match["result"] and ("_" in match["result"] or queued) else ""
    parts = (part.strip().replace("%", "") for part in operands.split(",") if part.strip())
    return Instruction(match["opcode"], result, named, tuple(_VALUE.sub(r"\1", part) for part in parts))


def _register(name: str) -> str:
    """The register of a value such as s123_s4."""
    return name.rsplit("_", 1)[-1]
