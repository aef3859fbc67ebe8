"""Topologies such as `v5p:4x4x4` and `h100:16x8`: chips, hosts, and the dims along which links close to a ring; also by the names under
which clouds rent them, such as `v5p-128` and `a3-megagpu-8g`. No jax here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from maxlm.hardware.chips import CHIPS, Chip, facts

CHIPS_PER_HOST = 4  # TPU VMs hold 2x2; a v5e or v6e VM may hold 1 or 8, which the compiler does not need to know

_MOST_GPUS = 2**17
_A_NODE = 8  # GPUs of a DGX or HGX node, which the NVLink switches of the node join
_CLOUD_NAMES = {"v5litepod": "v5e", "v5lite": "v5e"}  # Cloud TPU's own names of a chip
_FACTS = {chip["name"]: chip for chip in facts()["chip"]}
# Machine types of clouds -> topology. Sources (2026): docs.cloud.google.com/compute/docs/gpus, docs.cloud.google.com/tpu/docs,
# docs.aws.amazon.com/ec2/latest/instancetypes/ac.html, learn.microsoft.com/azure/virtual-machines/sizes/overview.
MACHINE_TYPES = {machine: f"{name.lower()}:{shape}" for name, chip in _FACTS.items() for machine, shape in chip.get("machines", {}).items()}
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16", "16x16x24", "16x20x28")
_NODES = ("1x1", "1x2", "1x4", *(f"{2**power}x{_A_NODE}" for power in range(12)))


class TopologyError(ValueError):
    """A topology that does not exist: `rule` is what is wrong with the name, `fix` what to write instead."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule}; {fix}")
        self.rule, self.fix = rule, fix


@dataclass(frozen=True)
class Topology:
    """One slice or several alike. `sides`: chips along each dim of a slice; of GPUs, which have no slices, nodes and GPUs a node."""

    chip: Chip
    sides: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """Name of one slice, of TPUs as the compiler has it: v5p:4x4x4."""
        return f"{self.chip.name.lower()}:{'x'.join(map(str, self.sides))}"

    @property
    def is_tpu(self) -> bool:
        """True for TPUs, False for GPUs."""
        return is_tpu(self.chip)

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.sides) * self.slices

    @property
    def devices(self) -> int:
        """jax devices of all slices: a tpu7x chip is two."""
        return self.chips * self.chip.devices_per_chip

    @property
    def hosts(self) -> int:
        """Virtual machines, all slices, at 4 chips each; of GPUs, nodes."""
        return max(1, self.chips // CHIPS_PER_HOST) if self.is_tpu else self.sides[0]

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each dim, True if its links close to a ring.

        v4, v5p and tpu7x are cubes of 4x4x4 joined by optical switches, which close every dim of a slice made of whole cubes; v5e and v6e
        are a pod of 16x16 with joined edges, so a dim closes only where it has all 16 (jax-ml.github.io/scaling-book, part 2).
        """
        if not self.is_tpu:
            return (False,) * len(self.sides)
        if len(self.sides) == 2:
            return tuple(side == 16 for side in self.sides)
        return (all(side % 4 == 0 for side in self.sides),) * len(self.sides)


def parse(name: str, slices: int = 1) -> Topology:
    """The topology called `name`, in any case: chip and shape, or a name under which it is rented (`rented`). Raises TopologyError, with
    similar names, for an unknown one.
    """
    known = {chip.name.lower(): chip for chip in CHIPS}
    chip_name, colon, shape = (name if ":" in name else rented(name) or name).partition(":")
    chip = known.get(chip_name.lower())
    if chip is None:
        near = get_close_matches(chip_name.lower(), known, n=3, cutoff=0.4) or list(known)
        example = "v5p:4x4x4 or v5p-128" if is_tpu(known[near[0]]) else f"{near[0]}:2x{_A_NODE} or {near[0]}x{_A_NODE}"
        raise TopologyError(f"no chip {chip_name!r} is known", f"use {either([known[key].name.lower() for key in near])}, as in {example}")
    sides = [int(side) for side in shape.split("x") if side.isascii() and side.isdigit() and len(side) < 9]
    count = 3 if is_tpu(chip) and chip.ici_links == 6 else 2  # a torus has two links a dim
    if not colon or len(sides) != len(shape.split("x")) or len(sides) != count or 0 in sides:
        example = f"{chip.name.lower()}:{'x'.join('4' * count) if is_tpu(chip) else f'2x{_A_NODE}'}"
        sizes = f"{count} sizes" if is_tpu(chip) else "2 sizes, nodes and GPUs a node,"
        raise TopologyError(f"must be a chip, a colon and {sizes} with `x` between them", f"write it as in {example}")
    topology = Topology(chip, tuple(sides), slices)
    if topology.is_tpu:
        _check_shape(topology)
    else:
        _check_nodes(topology)
    return topology


def accelerator(topology: Topology) -> str | None:
    """Name of one slice on Cloud TPU, such as v5p-128 for v5p:4x4x4; None for a GPU and for a shape that no such name means."""
    if topology.name not in _lent(topology.chip) or not topology.is_tpu:
        return None
    return _rented_name(topology.name)


def rented(name: str) -> str | None:
    """Topology that clouds rent as `name`, in any case: an accelerator type of Cloud TPU (v5p-128: the number counts TensorCores, as for
    v4 and tpu7x; chips for v5litepod-16 and v6e-16), GPUs by chip and number (h100x8) or a machine type (a3-megagpu-8g). None if `name` is
    of another kind. Raises TopologyError, with the nearest names, for a size or a machine type that does not exist.
    """
    lower = name.strip().lower()
    if lower in MACHINE_TYPES:
        return MACHINE_TYPES[lower]
    chips = {chip.name.lower(): chip for chip in CHIPS}
    family, size = match.groups() if (match := re.fullmatch(r"(\w[\w-]*?)[-x]([1-9][0-9]{0,6})", lower, re.ASCII)) else ("", "0")
    chip = chips.get(_CLOUD_NAMES.get(family, family))
    if chip is not None:
        return _of_size(chip, name, int(size))
    same = [other for other in chips if family and other.startswith(f"{family}-")]  # a100x8, without its memory
    close = [f"{other}x{size}" for other in same] or get_close_matches(lower, MACHINE_TYPES, n=3, cutoff=0.7)
    if not close:
        return None
    raise TopologyError(f"no machine {name!r} is known", f"use {either(close)}")


def _of_size(chip: Chip, name: str, size: int) -> str:
    """Topology of `size` cores or chips, as `name` counts them. Raises TopologyError if none is rented."""
    found = next((topology for topology in _lent(chip) if _size(topology) == size), None)
    if found is None and not is_tpu(chip) and size % _A_NODE == 0:
        found = f"{chip.name.lower()}:{size // _A_NODE}x{_A_NODE}"
    if found is None:
        nearest = [_rented_name(topology) for topology in near(chip, size // _FACTS[chip.name].get("cores", 1))]
        raise TopologyError(f"no {name} is rented", f"near it there are {', '.join(nearest)}")
    return found


def _rented_name(topology: str) -> str:
    """Name with the size: v5p-128, v5litepod-16, h100x8."""
    chip = topology.partition(":")[0]
    separator = "-" if any(name.lower() == chip and "pod" in facts for name, facts in _FACTS.items()) else "x"
    return f"{'v5litepod' if chip == 'v5e' else chip}{separator}{_size(topology)}"


def _size(topology: str) -> int:
    """Number in the rented name of `topology`: TensorCores of v4, v5p and tpu7x, chips of others."""
    chip, _, shape = topology.partition(":")
    return _count(shape) * next((facts.get("cores", 1) for name, facts in _FACTS.items() if name.lower() == chip), 1)


def _lent(chip: Chip) -> list[str]:
    """Topologies of `chip` that are rented, smallest first."""
    return near(chip, 1, most=100)


def near(chip: Chip, chips: int, most: int = 3) -> list[str]:
    """Names of topologies of `chip`, nearest in size to `chips`, smallest first: those that Cloud TPU lends; of GPUs, nodes of up to 8,
    alone or a power of two of them.
    """
    shapes = (
        [shape for shape in (_FLAT if chip.ici_links == 4 else _DEEP) if _count(shape) <= _FACTS[chip.name]["pod"]]
        if is_tpu(chip)
        else _NODES
    )
    nearest = sorted(shapes, key=lambda shape: abs(math.log(_count(shape) / max(chips, 1))))[:most]
    return [f"{chip.name.lower()}:{shape}" for shape in sorted(nearest, key=_count)]


def _check_shape(topology: Topology) -> None:
    chip, sides = topology.chip, topology.sides
    fix = f"near it there are {', '.join(near(chip, math.prod(sides)))}"
    if math.prod(sides) > _FACTS[chip.name]["pod"]:
        raise TopologyError(f"has {math.prod(sides):,} chips, and a {chip.name} pod has {_FACTS[chip.name]['pod']:,}", fix)
    single = set(sides) == {1} and len(sides) == 2
    if not single and (sides[0] % 2 or sides[1] % 2):
        raise TopologyError("cannot be made of hosts of 2x2 chips", fix)
    if len(sides) == 2 and max(sides) > 16:
        raise TopologyError(f"has a side above 16, and a {chip.name} pod is 16x16", fix)


def _check_nodes(topology: Topology) -> None:
    chip, (nodes, gpus) = topology.chip.name.lower(), topology.sides
    if topology.slices > 1:
        rule = f"is of GPUs, which have no slices, and mesh.slices = {topology.slices}"
        raise TopologyError(rule, f"write {chip}:{nodes * topology.slices}x{gpus}, and mesh.slices=1")
    if gpus > (most := _FACTS[topology.chip.name].get("most_a_node", _A_NODE)):
        rule = f"has {gpus:,} GPUs a node, and NVLink joins {most} of {chip} at most"
        raise TopologyError(rule, f"write nodes before GPUs a node, as in {chip}:2x{_A_NODE}")
    if topology.chips > _MOST_GPUS:
        raise TopologyError(f"has {topology.chips:,} GPUs, and {_MOST_GPUS:,} are the most", f"write it as in {chip}:2x{_A_NODE}")


def is_tpu(chip: Chip) -> bool:
    """True for a TPU; all other known chips are NVIDIA's GPUs."""
    return chip.device_kinds[0].startswith("TPU")


def is_cpu(chip: Chip) -> bool:
    """True for a CPU, which has measured peaks (`maxlm.cost.prediction`)."""
    return chip.name == "cpu"


def _count(shape: str) -> int:
    return math.prod(int(side) for side in shape.split("x"))


def either(choices: Sequence[str]) -> str:
    """`a, b or c`."""
    return ", ".join(choices[:-1]) + f" or {choices[-1]}" if len(choices) > 1 else choices[0]
