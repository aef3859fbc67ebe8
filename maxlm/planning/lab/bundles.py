"""Reads the machine code that libtpu prints last: bundles, each what one core of a TPU issues in one cycle."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0) +(?:L[BHE]|P[BF]|CT)? *: *>* *\{", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_INSTRUCTION = re.compile(r"(?:%(?P<result>\S+) = )?(?P<opcode>[a-z_]\w*(?:\.\w+)*)(?P<operands>.*)", re.DOTALL)
_VALUE = re.compile(r"\b[spv]\d+_([spv]\d+)\b")
_GUARD = re.compile(r"\((!?)%(\w+)(?:, %\w+)?\)")  # the value in brackets lies in the register of the result

# Opcode, up to its first letters, to the unit that runs it; the first that fits. A pop takes a result and costs no unit.
_UNITS = {
    "vmatmul": "matrix",
    "vmatpush": "weights",
    "vmatprep": "",
    "vdwg": "",
    "vpop.f32.mrf": "results",
    "vpop": "",
    "vpow2": "transcendental",
    "vrcp": "transcendental",
    "vlog2": "transcendental",
    "vtanh": "transcendental",
    "vrsqrt": "transcendental",
    "vxpose": "lanes",
    "vrot": "lanes",
    "vperm": "lanes",
    "vadd.xlane": "lanes",
    "vmax.xlane": "lanes",
    "vld": "load",
    "vst": "store",
    "vsync": "",
    "v": "vector",
    "dma": "",
    "s": "scalar",
    "p": "scalar",
}


@dataclass(frozen=True)
class Instruction:
    """One slot of a bundle: `result` as register (s5, p0, v61; empty without one), run if `guard` (p3 or !p3; empty: always) holds."""

    opcode: str
    result: str
    guard: str
    operands: tuple[str, ...]

    @property
    def unit(self) -> str:
        """What part of the core it keeps busy, empty if none; a spill is the copy of a register that did not fit."""
        unit = next((unit for start, unit in _UNITS.items() if self.opcode.startswith(start)), "")
        spilled = unit in ("load", "store") and any("_spill" in operand for operand in self.operands)
        return f"spill {unit}" if spilled else unit


@dataclass(frozen=True)
class Code:
    """A kernel: its bundles in order, and the bundle where each numbered region starts."""

    bundles: tuple[tuple[Instruction, ...], ...]
    regions: dict[int, int]

    @cached_property
    def units(self) -> tuple[Counter[str], ...]:
        """Instructions of every bundle by unit, and the cycles for which it keeps each matrix unit (`mxu0`) busy."""
        return tuple(self._units(bundle) for bundle in self.bundles)

    @cached_property
    def _wide(self) -> bool:
        """Whether the matrix units are two of 256 by 256, which take two rows a cycle; if not, four of 128 by 128, which take one."""
        return not any(instruction.opcode.endswith(("mxu2", "mxu3")) for bundle in self.bundles for instruction in bundle)

    def _units(self, bundle: tuple[Instruction, ...]) -> Counter[str]:
        counts = Counter(instruction.unit for instruction in bundle if instruction.unit)
        rows = "vmatprep.mubr" if self._wide else "vpop.f32.mrf"  # 16 rows that enter a wide unit, or 8 that leave a narrow one
        for instruction in bundle:
            if instruction.opcode.startswith(rows):
                counts[instruction.opcode.rsplit(".", 1)[-1]] += 8
        return counts


def read(text: str) -> Code:
    """The kernel in `text`, a file that libtpu's `final_bundles` dump wrote."""
    starts = list(_BUNDLE.finditer(text))
    bundles, regions = [], {}
    for number, start in enumerate(starts):
        body = text[start.end() : starts[number + 1].start() if number + 1 < len(starts) else len(text)]
        for region in _REGION.findall(body):
            regions[int(region)] = number
        slots = _COMMENT.sub("", body).strip().removesuffix("}").split(";;")
        bundles.append(tuple(_instruction(slot.strip()) for slot in slots if slot.strip()))
    return Code(tuple(bundles), regions)


def _instruction(text: str) -> Instruction:
    found = _INSTRUCTION.match(text)
    if found is None:
        raise ValueError(f"no instruction: {text!r}")
    operands = found["operands"]
    guard = _GUARD.search(operands)
    if guard is not None and found["opcode"] != "scalar_select":
        operands = operands[: guard.start()] + operands[guard.end() :]
    named = f"{guard[1]}{_register(guard[2])}" if guard else ""
    result = _register(found["result"]) if found["result"] and "_" in found["result"] else ""
    parts = (part.strip().replace("%", "") for part in operands.split(",") if part.strip())
    return Instruction(found["opcode"], result, named, tuple(_VALUE.sub(r"\1", part) for part in parts))


def _register(name: str) -> str:
    """The register of a value such as s123_s4."""
    return name.rsplit("_", 1)[-1]
