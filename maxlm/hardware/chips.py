"""Peak arithmetic, memory and links of each accelerator, with the source of every figure. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from maxlm.hardware.cpu_speeds import CpuSpeeds

GIB = 2**30
GPU_MEMORY_SHARE = 0.92  # of a GPU's memory that our runs let jax take; jax's own default is 0.75. NCCL and CUDA live on the rest

LANES = 128  # numbers side by side in a vector register of a TPU (docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm)
MOST_VMEM_BYTES = 128 * 2**20  # of a TPU chip of any kind (jax-ml.github.io/scaling-book, part 2)
HOP_S = 1e-6  # latency from a TPU to its neighbour (jax-ml.github.io/scaling-book, part 3)
DCN_S = 1e-5  # latency from a slice to another: two hosts and the switches between them. Assumed
SWITCH_S = 1e-5  # latency of an NCCL collective over NVLink, however small. Assumed
HBM_LATENCY_S = 2e-6  # of a read from HBM, an upper bound: XLA charges the smallest copy 1.3 microseconds

_BOOK = "jax-ml.github.io/scaling-book (parts 2 and 12, read August 2026)"
_CLOUD = "docs.cloud.google.com/tpu/docs"

MatmulFormat = Literal["bf16", "int8", "e4m3", "e5m2"]  # of both operands of a matmul
PEAK_NAMES: Mapping[MatmulFormat, str] = {"bf16": "bf16", "int8": "int8", "e4m3": "fp8", "e5m2": "fp8"}  # as vendors state peaks

# Speed of a large matmul (4096 x 4096 x 4096) relative to bf16: cycles that the machine code of libtpu 0.0.42.1 issues, waits for HBM
# included (low_precision_speed.md). XLA's own estimates may differ: 1.28 for int8 on v6e, 0.96 on tpu7x. By those estimates, as nothing was
# counted: v4, v5e, floats of v5p; e5m2 on tpu7x is taken to be as fast as e4m3.
COMPILED_SPEEDS: Mapping[str, Mapping[MatmulFormat, float]] = {
    "v4": {"int8": 0.90, "e4m3": 0.84, "e5m2": 0.84},
    "v5e": {"int8": 1.99, "e4m3": 0.97, "e5m2": 1.99},
    "v5p": {"int8": 1.96, "e4m3": 0.97, "e5m2": 1.97},
    "v6e": {"int8": 1.91, "e4m3": 0.51, "e5m2": 0.99},
    "tpu7x": {"int8": 0.52, "e4m3": 1.92, "e5m2": 1.92},
}
WORTH = 1.1  # least of these speeds with which quantizing operands pays for itself


@dataclass(frozen=True)
class Achieved:
    """Shares of a GPU's stated peaks that large operations reached on one machine (`maxlm plan --calibrate`); None: not measured."""

    matmul: float | None = None  # of the bf16 peak
    hbm: float | None = None  # of the stated bandwidth
    links: float | None = None  # of the NVLink bandwidth one way, by an all-gather and a reduce-scatter
    source: str = ""  # machine and date


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
    achieved: Achieved = Achieved()
    cpu: CpuSpeeds | None = None  # of a CPU, as measured

    @property
    def hbm_bytes_per_s_per_device(self) -> float:
        """Bytes/s of memory of what jax calls a device."""
        return self.hbm_bytes_per_s / self.devices_per_chip

    @property
    def dcn_bytes_per_s_per_device(self) -> float:
        """Bytes/s between slices or nodes of what jax calls a device: those of a chip share its network."""
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
        published = {"bf16": self.peak_bf16_flops, "int8": self.peak_int8_ops, "fp8": self.peak_fp8_flops}
        return published[PEAK_NAMES[format]] or self.peak_bf16_flops

    def peak_flops_per_device(self, format: MatmulFormat) -> float:
        """`peak_flops` of what jax calls a device."""
        return self.peak_flops(format) / self.devices_per_chip

    def matmul_speed(self, format: MatmulFormat) -> float:
        """Speed of a large matmul in `format` relative to bf16: as compiled where that is known, else the ratio of the published peaks."""
        return COMPILED_SPEEDS.get(self.name, {}).get(format, self.peak_flops(format) / self.peak_bf16_flops)

    @property
    def hbm_bytes_per_device(self) -> int:
        """Bytes of memory of what jax calls a device."""
        return self.hbm_bytes // self.devices_per_chip


_A100 = Chip(
    name="A100-40GB",
    device_kinds=("NVIDIA A100-SXM4-40GB",),
    peak_bf16_flops=312e12,
    peak_int8_ops=624e12,
    hbm_bytes=40_000_000_000,
    hbm_bytes_per_s=1.555e12,
    ici_bytes_per_s_per_link=2.5e10,
    ici_links=12,
    dcn_bytes_per_s=2.5e10,
    source="NVIDIA A100 data sheet (SXM4); DGX A100 (200 Gbit/s a GPU)",
    driver_bytes=42_331_013_120,
)
_H100 = Chip(
    name="H100",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    peak_bf16_flops=989e12,
    peak_int8_ops=1979e12,
    peak_fp8_flops=1979e12,
    hbm_bytes=80_000_000_000,
    hbm_bytes_per_s=3.35e12,
    ici_bytes_per_s_per_link=2.5e10,
    ici_links=18,
    dcn_bytes_per_s=5e10,
    source="NVIDIA H100 data sheet (SXM5, without sparsity); DGX H100 (400 Gbit/s a GPU)",
    driver_bytes=84_942_979_072,
)

# Clocks: the published peak over the FLOPs a cycle of the matrix units (v4, v5p 2 x 4 and v5e 4 of 128 x 128; v6e and each core of tpu7x 4
# times 256 x 256 at 2 FLOPs). The first three agree with Google's (arXiv 2304.01433; docs.cloud.google.com/tpu/docs).
# Host links: v4 and v5e by the book (part 2); v5p and v6e as libtpu's own scheduler counts (read off how much compute it puts between the
# start and the end of a copy). That of tpu7x is not published: v6e's is assumed.
# Host memory (docs.cloud.google.com/tpu/docs): 192 GB for 4 chips of v5e, 1,536 GiB for 8 of v6e.
# Peaks of int8 and fp8: the pages of the bf16 peaks; of GPUs without sparsity (B200: half of the sheet's figures, which are with it).
# Link speeds of TPUs are the book's, which is what collectives reach: 0.9 of Google's nominal figure
# (v5p: 1,200 GB/s a chip, over 6 links and both ways).
CHIPS: tuple[Chip, ...] = (
    Chip(
        name="v4",
        device_kinds=("TPU v4",),
        peak_bf16_flops=275e12,
        peak_int8_ops=275e12,
        hbm_bytes=32 * GIB,
        hbm_bytes_per_s=1.2e12,
        ici_bytes_per_s_per_link=4.5e10,
        ici_links=6,
        dcn_bytes_per_s=6.25e9,
        source=f"{_CLOUD}/v4; links and DCN: {_BOOK}",
        clock_hz=1.05e9,
        host_bytes_per_s=1.6e10,
    ),
    Chip(
        name="v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        peak_bf16_flops=197e12,
        peak_int8_ops=393e12,
        hbm_bytes=16 * GIB,
        hbm_bytes_per_s=8.19e11,
        ici_bytes_per_s_per_link=4.5e10,
        ici_links=4,
        dcn_bytes_per_s=3.125e9,
        source=f"{_CLOUD}/v5e (6.4 Tbit/s of DCN for 256 chips); links: {_BOOK}",
        clock_hz=1.5e9,
        host_bytes_per_s=1.6e10,
        host_bytes=48e9,
    ),
    Chip(
        name="v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        peak_bf16_flops=459e12,
        peak_int8_ops=918e12,
        hbm_bytes=95 * GIB,
        hbm_bytes_per_s=2.765e12,
        ici_bytes_per_s_per_link=9e10,
        ici_links=6,
        dcn_bytes_per_s=6.25e9,
        source=f"{_CLOUD}/v5p (50 Gbit/s of DCN a chip); links: {_BOOK}",
        clock_hz=1.75e9,
        host_bytes_per_s=2.9e10,
    ),
    Chip(
        name="v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        peak_bf16_flops=918e12,
        peak_int8_ops=1836e12,
        hbm_bytes=32 * GIB,
        hbm_bytes_per_s=1.638e12,
        ici_bytes_per_s_per_link=9e10,
        ici_links=4,
        dcn_bytes_per_s=1.25e10,
        source=f"{_CLOUD}/v6e (100 Gbit/s of DCN a chip); links: {_BOOK}",
        matrix_unit=256,
        clock_hz=1.75e9,
        host_bytes_per_s=3.2e10,
        host_bytes=192 * GIB,
    ),
    Chip(
        name="tpu7x",
        device_kinds=("TPU7x",),
        peak_bf16_flops=2307e12,
        peak_fp8_flops=4614e12,
        hbm_bytes=192 * GIB,
        hbm_bytes_per_s=7.38e12,
        ici_bytes_per_s_per_link=9e10,
        ici_links=6,
        dcn_bytes_per_s=1.25e10,
        source=f"{_CLOUD}/tpu7x (100 Gbit/s of DCN a chip; two devices a chip); links: {_BOOK}",
        devices_per_chip=2,
        matrix_unit=256,
        clock_hz=2.2e9,
        host_bytes_per_s=3.2e10,
    ),
    _A100,
    replace(
        _A100,
        name="A100-80GB",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        hbm_bytes=80_000_000_000,
        hbm_bytes_per_s=2.039e12,
        driver_bytes=85_100_068_864,
    ),
    _H100,
    replace(
        _H100,
        name="H200",
        device_kinds=("NVIDIA H200",),
        hbm_bytes=141_000_000_000,
        hbm_bytes_per_s=4.8e12,
        source="NVIDIA H200 data sheet (SXM5, without sparsity); DGX H200 (400 Gbit/s a GPU)",
        driver_bytes=151_397_597_184,
    ),
    Chip(
        name="B200",
        device_kinds=("NVIDIA B200",),
        peak_bf16_flops=2250e12,
        peak_int8_ops=4500e12,
        peak_fp8_flops=4500e12,
        hbm_bytes=180_000_000_000,
        hbm_bytes_per_s=8e12,
        ici_bytes_per_s_per_link=5e10,
        ici_links=18,
        dcn_bytes_per_s=5e10,
        source="NVIDIA DGX B200 data sheet (1,000 W, without sparsity; 1,440 GB and 64 TB/s for 8 GPUs; 400 Gbit/s a GPU)",
        driver_bytes=191_514_411_008,
    ),
)

_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.device_kinds}


def chip_named(name: str) -> Chip:
    """The chip called `name`, in any case. Raises StopIteration for an unknown one: names come from our own tables."""
    return next(chip for chip in CHIPS if chip.name.lower() == name.lower())


def chip_of(device_kind: str) -> Chip | None:
    """The chip behind jax's `device.device_kind`; None if unknown: nothing is guessed.

    Only exact names count: "NVIDIA H100 PCIe", "NVIDIA H200 NVL" and a MIG slice start like a chip we know and are slower.
    """
    return _BY_KIND.get(device_kind)
