"""Words for the parts of a machine, by platform: chip and ICI for TPUs, GPU and NVLink for GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from maxlm.hardware.chips import Chip
from maxlm.hardware.topologies import is_tpu


@dataclass(frozen=True)
class Vocabulary:
    """`chip`: a chip, as one buys it; `chips`: several; `links`: by the kinds of `maxlm.cost.network.Traffic.link`."""

    chip: str
    chips: str
    host: str
    links: Mapping[str, str] = field(default_factory=dict)

    def counted(self, number: int) -> str:
        """`8 chips`, `1 GPU`."""
        return f"{number:,} {self.chip if number == 1 else self.chips}"

    def hosts(self, number: int) -> str:
        """`2 hosts`, `1 node`."""
        return f"{number:,} {self.host}{'s' if number != 1 else ''}"


_TPU = Vocabulary("chip", "chips", "host", MappingProxyType({"ici": "ICI", "dcn": "DCN", "host": "host"}))
_GPU = Vocabulary("GPU", "GPUs", "node", MappingProxyType({"ici": "NVLink", "dcn": "network", "host": "PCIe"}))


def vocabulary(chip: Chip) -> Vocabulary:
    """The words for machines of `chip`."""
    return _TPU if is_tpu(chip) else _GPU
