"""Correction factors that a machine measured: they change what they measure and nothing else, and only on the chip that they are of."""

import json
from pathlib import Path

import pytest

from maxlm.base.errors import UserError
from maxlm.config.loader import load
from maxlm.config.rules import topology_of
from maxlm.cost.advice import _not_calibrated
from maxlm.cost.calibration import FIELD, calibrated, of_config, read
from maxlm.cost.mesh_links import node_links
from maxlm.cost.network import Network
from maxlm.cost.pricing import GpuPricing
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read as read_program

FACTORS = {"matmul": 0.6, "hbm": 0.5, "links": 0.4}
MEASURED = {
    "matmul_dtype": "bfloat16",
    "matmul_size": 8192,
    "matmul_flops": 593.4e12,
    "hbm_bytes_per_s": 1.7e12,
    "all_gather_bytes_per_s": 1.8e11,
    "reduce_scatter_bytes_per_s": 1.9e11,
}
FILE = {
    "chip": "H100",
    "device_kind": "NVIDIA H100 80GB HBM3",
    "devices": 8,
    "machine": "node7",
    "date": "2026-11-25",
    "versions": {"jax": "0.10.2"},
    "measured": MEASURED,
    "factors": FACTORS,
}
MATMUL = """HloModule m, is_scheduled=true

ENTRY %main (l: bf16[4096,8192], r: bf16[8192,4096]) -> bf16[4096,4096] {
  %l = bf16[4096,8192]{1,0} parameter(0)
  %r = bf16[8192,4096]{1,0} parameter(1)
  ROOT %d = bf16[4096,4096]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.fixture
def file(tmp_path):
    def write(**changes):
        path = tmp_path / "factors.json"
        path.write_text(json.dumps({**FILE, **changes}), encoding="utf-8")
        return path

    return write


def test_factors_replace_the_assumed_shares(file):
    topology = calibrated(parse("h100:2x8"), file())
    chip, module = topology.chip, read_program(MATMUL)
    pricing = GpuPricing(module, chip)
    (computation,) = module.computations.values()
    (dot,) = (op for op in computation.ops if op.opcode == "dot")
    assert pricing.seconds(dot, computation) == pytest.approx(2 * 4096 * 8192 * 4096 / (0.6 * 989e12), rel=0.02)
    assert pricing.hbm == pytest.approx(0.5 * 3.35e12)
    inside, between = ({"fsdp": 8}, {"data": 2, "fsdp": 1})
    for sizes, ratio in ((inside, 0.8 / 0.4), (between, 1.0)):
        (axis, size) = next((axis, size) for axis, size in sizes.items() if size > 1)
        links = {axis: node_links({"data": 2, "fsdp": 8}, topology)[axis]}
        new, old = (Network(one, sizes, links).seconds("all-gather", 2**32, (axis,), size) for one in (chip, parse("h100:2x8").chip))
        assert new / old == pytest.approx(ratio, rel=0.02), "NVLink was measured, the network between nodes was not"


@pytest.mark.parametrize(
    ("topology", "changes", "said"),
    [
        ("h200:1x8", {}, "measured on NVIDIA H100 80GB HBM3, and h200:1x8 is made of H200"),
        ("v5p:2x2x2", {}, "priced by shares counted for TPUs"),
        ("h100:1x8", {"chip": None, "device_kind": "cpu", "factors": None}, "measured on cpu"),
        ("h100:1x8", {"factors": None}, "is made of H100"),
        ("h100:1x8", {"factors": {**FACTORS, "matmul": 0}}, "factors.matmul"),
        ("h100:1x8", {"factors": {**FACTORS, "hbm": 3.0}}, "factors.hbm"),
        ("h100:1x8", {"factors": {"matmul": 0.5}}, "factors.hbm"),
        ("h100:1x8", {"speed": 1}, "speed"),
    ],
)
def test_factors_that_do_not_belong_are_refused_in_a_line(file, topology, changes, said):
    with pytest.raises(UserError, match=said) as caught:
        calibrated(parse(topology), file(**changes))
    assert "\n" not in str(caught.value) and "--calibration" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"chip": "H100"}'])
def test_what_is_no_calibration_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="write the file with `maxlm plan --calibrate`") as caught:
        calibrated(parse("h100:1x8"), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "configs" / "calibrations").glob("*.json")), ids=lambda path: path.stem
)
def test_measurements_that_are_shipped_are_those_of_their_chip(path):
    assert calibrated(parse(f"{path.stem}:1x1"), path).chip.achieved.matmul == read(path).factors.matmul


def test_a_config_names_its_calibration(file):
    needed = ("data.store=none", "data.seq_len=1024", "train.steps=10", "train.global_batch=64")
    settings, names = (*needed, "mesh.fsdp=8", f"cost.calibration={file()}"), ("h100:1x8", "v5e:2x4", "h200:1x8")
    gpu, tpu, other = (load("models/gpt2-124m", (*settings, f"cluster.topology={name}"), assume=True).config for name in names)
    corrected = of_config(gpu.cost, topology_of(gpu))
    assert corrected == calibrated(topology_of(gpu), file())
    assert of_config(tpu.cost, topology_of(tpu)) == topology_of(tpu), "its times rest on counted shares"
    with pytest.raises(UserError, match=f"^{FIELD} .* was measured on NVIDIA H100 80GB HBM3, and h200:1x8 is made of H200"):
        of_config(other.cost, topology_of(other))
    (said,), (plain,) = (list(_not_calibrated(one)) for one in (corrected, topology_of(gpu)))
    assert "corrected by what was measured (node7, 2026-11-25)" in said and "not measured on your machine (maxlm plan --calibrate)" in plain
