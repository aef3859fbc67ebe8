"""The chip table: consistent with itself, and silent about what it does not know."""

import subprocess
import sys

import pytest

from maxlm.hardware.chips import CHIPS, LANES, MOST_VMEM_BYTES, chip_of
from maxlm.hardware.topologies import is_tpu
from maxlm.kernels import platform


@pytest.mark.parametrize(
    ("kind", "name", "tflops"),
    [
        ("TPU v4", "v4", 275),
        ("TPU v5 lite", "v5e", 197),
        ("TPU v5", "v5p", 459),
        ("TPU v5p", "v5p", 459),
        ("TPU v6 lite", "v6e", 918),
        ("TPU7x", "tpu7x", 2307),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 312),
        ("NVIDIA H100 80GB HBM3", "H100", 989),
        ("NVIDIA H200", "H200", 989),
        ("NVIDIA B200", "B200", 2250),
    ],
)
def test_known_kinds(kind, name, tflops):
    chip = chip_of(kind)
    assert chip is not None
    assert (chip.name, chip.peak_bf16_flops) == (name, tflops * 1e12)


@pytest.mark.parametrize(
    "kind",
    ["cpu", "", "TPU", "TPU v4 lite", "TPU v9", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "tpu v4"],
)
def test_unknown_kinds_are_not_guessed(kind):
    assert chip_of(kind) is None


def test_no_kind_names_two_chips():
    kinds = [kind for chip in CHIPS for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_a_tpu7x_device_is_half_a_chip():
    chip = chip_of("TPU7x")
    assert chip is not None
    assert chip.peak_bf16_flops_per_device == chip.peak_bf16_flops / 2
    assert chip.hbm_bytes_per_device * 2 == chip.hbm_bytes


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_memory_is_slower_than_arithmetic_and_links_slower_than_memory(chip):
    """A figure typed with a wrong power of ten breaks one of these orders of magnitude."""
    assert 100 < chip.peak_bf16_flops / chip.hbm_bytes_per_s < 700  # FLOPs a byte at the roofline's corner
    assert 1 < chip.hbm_bytes_per_s / (chip.ici_bytes_per_s_per_link * chip.ici_links) < 20
    assert 5 < chip.ici_bytes_per_s_per_link * chip.ici_links / chip.dcn_bytes_per_s < 100
    assert 5e-3 < chip.hbm_bytes / chip.hbm_bytes_per_s < 60e-3  # seconds to read all memory once
    assert chip.source


def test_the_table_needs_no_jax():
    code = "import sys, maxlm.hardware.chips; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_state_the_same_facts():
    """Kernels know nothing of maxlm, so they have facts of their own."""
    assert platform.LANES == LANES
    assert max(platform.VMEM_BYTES.values()) <= MOST_VMEM_BYTES
    wide = {kind for chip in CHIPS for kind in chip.device_kinds if chip.matrix_unit == 256}
    assert set(platform.WIDE) <= wide
    assert not wide & set(platform.VMEM_BYTES) - set(platform.WIDE)


def test_every_tpu_has_a_clock_and_a_host_link():
    """Seconds of a compiled program need both. The clock times FLOPs a cycle of whole matrix units is the peak."""
    for chip in filter(is_tpu, CHIPS):
        assert chip.clock_hz is not None and chip.host_bytes_per_s is not None
        units = chip.peak_bf16_flops / (2 * chip.matrix_unit**2 * chip.clock_hz)
        assert abs(units - round(units)) < 0.02 * units, chip.name
