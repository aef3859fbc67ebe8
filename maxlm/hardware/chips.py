"""Peak arithmetic, memory and links of each accelerator, as `facts.toml` states them with their sources, and measured speeds of a CPU.

No data sheet states a CPU's small matmuls, transposing copies, functions, and first use of memory. No jax here.
"""

import bisect
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MatmulSpeed(_Record):
    """Speed of matmuls with a shortest side of this length."""

    side: Annotated[int, Field(gt=0)]
    flops: Rate  # FLOP/s


Speeds = Annotated[tuple[MatmulSpeed, ...], Field(min_length=1)]


class CpuSpeeds(_Record):
    """Measured speeds that decide the time of a small model's step on a CPU, in addition to speeds of a large matmul and a large copy."""

    matmuls: Speeds  # shortest side first
    transposed_matmuls: Speeds  # the same of matmuls that read their left operand transposed
    transposed_bytes_per_s: Rate  # read and written by a copy that transposes
    fresh_bytes_per_s: Rate  # memory that the system hands out, at its first write
    function_s: Seconds  # an exponential of one number
    op_s: Seconds  # an operation on one number


def matmul_flops_per_s(speeds: Sequence[MatmulSpeed], side: int) -> float:
    """FLOP/s of a matmul with shortest side `side`: a power law between two measured ones; beyond the last as that one, below the
    first in proportion to the side.
    """
    if side >= speeds[-1].side:
        return speeds[-1].flops
    if side <= speeds[0].side:
        return speeds[0].flops * max(1, side) / speeds[0].side
    above = bisect.bisect_right([speed.side for speed in speeds], side)
    low, high = speeds[above - 1], speeds[above]
    share = math.log(side / low.side) / math.log(high.side / low.side)
    return low.flops * (high.flops / low.flops) ** share


GPU_MEMORY_SHARE = 0.92  # of a GPU's memory that our runs let jax take; jax's own default is 0.75. NCCL and CUDA live on the rest

GIB = 2**30
LANES = 128  # numbers side by side in a vector register of a TPU (docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm)
MOST_VMEM_BYTES = 128 * 2**20  # of a TPU chip of any kind (jax-ml.github.io/scaling-book, part 2)
HOP_S = 1e-6  # latency from a TPU to its neighbour (jax-ml.github.io/scaling-book, part 3)
DCN_S = 1e-5  # latency from a slice to another: two hosts and the switches between them. Assumed
SWITCH_S = 1e-5  # latency of an NCCL collective over NVLink, however small. Assumed
HBM_LATENCY_S = 2e-6  # of a read from HBM, an upper bound: XLA charges the smallest copy 1.3 microseconds

MatmulFormat = Literal["bf16", "int8", "e4m3", "e5m2"]  # of both operands of a matmul
PEAK_NAMES: Mapping[MatmulFormat, str] = {"bf16": "bf16", "int8": "int8", "e4m3": "fp8", "e5m2": "fp8"}  # as vendors state peaks

# Speed of a kernel relative to the count of its machine code, which is a lower bound of its time where the matrix unit limits: XLA states
# 1.4% to 2.6% more cycles for large matmuls than the kernel lab counts (docs/lab/benchmarks.md), and 5.5% for one on one core of a v5p. The
# largest is taken for everybody's attention, grouped and gated kernels on all chips; kernels that only round have their counted cycles.
COUNTED = 0.948

WORTH = 1.1  # least of these speeds with which quantizing operands pays for itself


@dataclass(frozen=True)
class Achieved:
    """Shares of a GPU's stated peaks that large operations reached on one machine (`maxlm plan --calibrate`); None: not measured."""

    matmul: float | None = None  # of the bf16 peak
    hbm: float | None = None  # of the stated bandwidth
    links: float | None = None  # of the NVLink bandwidth one way, by an all-gather and a reduce-scatter
    source: str = ""  # machine and date


@dataclass(frozen=True)
class AttentionShare:
    """Share of peak of attention kernels by the length of a sequence: `limit` / (1 + `tokens` / length), one pair for each pass.

    A longer sequence has fewer blocks that the diagonal cuts, and less of what a block of queries takes once.
    """

    forward: tuple[float, float]  # (limit, tokens)
    backward: tuple[float, float]

    def at(self, length: float, *, backward: bool) -> float:
        """Share of the bf16 peak, of FLOPs over the pairs that masks leave, at `length` tokens: what was counted, times `COUNTED`."""
        limit, tokens = self.backward if backward else self.forward
        return COUNTED * limit / (1 + tokens / length)


@dataclass(frozen=True)
class GroupedShares:
    """Grouped matmuls of tokamax by part: share of the bf16 peak, rows that a boundary adds, speed of 8 bits relative to bf16."""

    forward: tuple[float, int, float]
    by_transpose: tuple[float, int, float]
    transposed_dw: tuple[float, int, float]


@dataclass(frozen=True)
class Reached:
    """Shares of peak that programs for a TPU reach, as `facts.toml` explains them; the defaults are assumed for chips without an entry."""

    attention: AttentionShare = AttentionShare((0.801, 1909), (0.964, 1045))  # v5p's, of which v4 has the matrix units
    our_attention: AttentionShare = AttentionShare((1.0, 825), (0.995, 666))
    tokamax_attention: AttentionShare | None = None  # None: as `attention`
    predicted_matmul: float = 0.88
    scheduled_matmul: tuple[float, float] = (0.9, 0.5)
    rounding_cycles: tuple[float, float] = (0.0, 0.0)
    group_edges: tuple[int, int] = (128, 300)
    library_edges: tuple[int, int] = (512, 1000)
    tokamax_grouped: GroupedShares | None = None  # None: as `library_edges`


@dataclass(frozen=True)
class Chip:
    """Peaks of one chip. A jax device is a chip, unless `devices_per_chip` is above 1: use the `*_per_device` figures.

    `hbm_bytes` is as the vendor states it (TPU: GiB; GPU: 10^9 bytes); the runtime reserves some of it. Links are stated one way:
    `ici` is the network inside a slice or node (TPU: inter-chip interconnect; GPU: NVLink), `dcn` the one between them (GPU: of DGX).
    """

    name: str
    device_kinds: tuple[str, ...]  # jax.Device.device_kind, exactly
    peak_bf16_flops: float  # FLOP/s, dense
    hbm_bytes: int
    hbm_bytes_per_s: float
    ici_bytes_per_s_per_link: float  # one way
    ici_links: int
    dcn_bytes_per_s: float  # out of a chip
    source: str
    devices_per_chip: int = 1
    matrix_unit: int = 128  # width of a TPU's matrix unit (docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm)
    clock_hz: float | None = None  # of a TensorCore
    host_bytes_per_s: float | None = None  # between a chip and its host, one way
    host_bytes: float | None = None  # host memory a chip, where Google's documentation states it
    driver_bytes: int | None = None  # GPU memory that NVIDIA's driver reports (A100, B200: XLA's target_config/specs)
    peak_int8_ops: float | None = None  # OP/s, dense; None where none is published
    peak_fp8_flops: float | None = None  # FLOP/s, dense, of e4m3 and e5m2; None where none is published
    speeds: Mapping[str, float] = field(default_factory=dict, hash=False)  # of compiled matmuls relative to bf16, by format
    reached: Reached = Reached()
    architecture: str = ""  # of a GPU
    achieved: Achieved = Achieved()
    cpu: CpuSpeeds | None = None  # of a CPU, as measured

    @property
    def hbm_bytes_per_s_per_device(self) -> float:
        """Bytes/s of memory of what jax calls a device."""
        return self.hbm_bytes_per_s / self.devices_per_chip

    @property
    def dcn_bytes_per_s_per_device(self) -> float:
        """Bytes/s between slices or nodes of what jax calls a device: devices of a chip share its network."""
        return self.dcn_bytes_per_s / self.devices_per_chip

    @property
    def host_bytes_per_s_per_device(self) -> float | None:
        """Bytes/s one way between host and what jax calls a device; None where they are not known."""
        return None if self.host_bytes_per_s is None else self.host_bytes_per_s / self.devices_per_chip

    @property
    def peak_bf16_flops_per_device(self) -> float:
        """FLOP/s of what jax calls a device."""
        return self.peak_bf16_flops / self.devices_per_chip

    def peak_flops(self, format: MatmulFormat) -> float:
        """Published peak of matmuls in `format`, in FLOP/s (int8: OP/s); bf16's where none is published."""
        return self._published_peak(format) or self.peak_bf16_flops

    def peak_name(self, format: MatmulFormat) -> str:
        """Name of the peak that `peak_flops` returns: `bf16` where none is published for `format`."""
        return PEAK_NAMES[format] if self._published_peak(format) else PEAK_NAMES["bf16"]

    def _published_peak(self, format: MatmulFormat) -> float | None:
        return {"bf16": self.peak_bf16_flops, "int8": self.peak_int8_ops, "fp8": self.peak_fp8_flops}[PEAK_NAMES[format]]

    def peak_flops_per_device(self, format: MatmulFormat) -> float:
        """`peak_flops` of what jax calls a device."""
        return self.peak_flops(format) / self.devices_per_chip

    def matmul_speed(self, format: MatmulFormat) -> float:
        """Speed of a large matmul in `format` relative to bf16: as compiled where that is known, else the ratio of the published peaks."""
        return self.speeds.get(format, self.peak_flops(format) / self.peak_bf16_flops)

    @property
    def hbm_bytes_per_device(self) -> int:
        """Bytes of memory of what jax calls a device."""
        return self.hbm_bytes // self.devices_per_chip


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """The document of facts about hardware."""
    return tomllib.loads(Path(__file__).with_name("facts.toml").read_text(encoding="utf-8"))


def _chip(row: Mapping[str, Any]) -> Chip:
    stated = {name: row[name] for name in (field.name for field in fields(Chip)) if name in row}
    reached = {name: _reached(value) for name, value in row.get("reached", {}).items()}
    return Chip(**{**stated, "device_kinds": tuple(row["device_kinds"]), "reached": Reached(**reached)})


def _reached(value: Any) -> Any:
    """A value of `reached`: lists are tuples, and a table is of attention or, with a gradient of weights, of grouped matmuls."""
    if isinstance(value, dict):
        kind = GroupedShares if "transposed_dw" in value else AttentionShare
        return kind(**{name: tuple(figures) for name, figures in value.items()})
    return tuple(value) if isinstance(value, list) else value


CHIPS = tuple(map(_chip, facts()["chip"]))
_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.device_kinds}


def chip_named(name: str) -> Chip:
    """The chip called `name`, in any case. Raises StopIteration for an unknown one: names come from our own tables."""
    return next(chip for chip in CHIPS if chip.name.lower() == name.lower())


def chip_of(device_kind: str) -> Chip | None:
    """The chip behind jax's `device.device_kind`; None if unknown: nothing is guessed.

    Only exact names count: "NVIDIA H100 PCIe", "NVIDIA H200 NVL" and a MIG slice start like a chip we know and are slower.
    """
    return _BY_KIND.get(device_kind)
