"""A topology's name says what it says: chips, hosts, rings; and a name that means nothing is answered with one that does."""

import math
import subprocess
import sys

import pytest

from maxlm.hardware.chips import CHIPS
from maxlm.hardware.topologies import MACHINE_TYPES, TopologyError, accelerator, is_tpu, near, parse


@pytest.mark.parametrize(
    ("name", "slices", "chips", "devices", "hosts"),
    [
        ("v5p:4x4x4", 1, 64, 64, 16),
        ("v4:4x4x8", 1, 128, 128, 32),
        ("v5e:16x16", 2, 512, 512, 128),
        ("v5e:1x1", 1, 1, 1, 1),
        ("v6e:2x4", 1, 8, 8, 2),
        ("tpu7x:2x2x1", 1, 4, 8, 1),
        ("v5p:16x20x28", 1, 8960, 8960, 2240),
        ("H200:2x8", 1, 16, 16, 2),
        ("a100-80gb:3x4", 1, 12, 12, 3),
    ],
)
def test_chips_devices_and_hosts(name, slices, chips, devices, hosts):
    topology = parse(name, slices)
    assert (topology.chips, topology.devices, topology.hosts) == (chips, devices, hosts)
    assert topology.name == name.lower()
    assert parse(topology.name, slices) == topology


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5p:4x4x4", (True, True, True)),
        ("v5p:4x4x8", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),  # half a cube: no optical switch to go through
        ("v4:2x2x1", (False, False, False)),
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),
        ("v6e:8x8", (False, False)),
        ("h100:1x8", (False, False)),
    ],
)
def test_which_dims_close_to_rings(name, wraps):
    assert parse(name).wraps == wraps


@pytest.mark.parametrize(
    ("name", "rule", "fix"),
    [
        ("v9z:4x4", "no chip 'v9z'", "as in v5p:4x4x4"),
        ("v5:4x4", "no chip 'v5'", "v5e"),
        ("", "no chip ''", "tpu7x"),
        ("v5p", "a colon and 3 sizes", "v5p:4x4x4"),
        ("v5p:4x4", "3 sizes", "v5p:4x4x4"),
        ("v5e:4x4x4", "2 sizes", "v5e:4x4"),
        ("v5e:0x4", "2 sizes", "v5e:4x4"),
        ("v5e:-4x4", "2 sizes", "v5e:4x4"),
        ("v5e:٤x4", "2 sizes", "v5e:4x4"),
        ("h100:8", "nodes and GPUs a node", "h100:2x8"),
        ("h100:1x2x8", "nodes and GPUs a node", "h100:2x8"),
        ("a100:2x8", "no chip 'a100'", "a100-80gb or a100-40gb"),
        ("h100:1x16", "16 GPUs a node, and NVLink joins 8", "h100:2x8"),
        ("h200:1x4096", "4,096 GPUs a node", "h200:2x8"),
        ("b200:1x73", "joins 72", "b200:2x8"),
        ("b200:99999x8", "131,072 are the most", "b200:2x8"),
        ("v5p:3x5x7", "hosts of 2x2", "v5p:4x4x8"),
        ("v5e:1x2", "hosts of 2x2", "v5e:2x2"),
        ("v5e:8x32", "side above 16", "v5e:16x16"),
        ("v6e:32x32", "a v6e pod has 256", "v6e:16x16"),
        ("v5p:64x64x64", "a v5p pod has 8,960", "v5p:16x20x28"),
        ("v5p-129", "no v5p-129 is rented", "v5p-64, v5p-128, v5p-256"),
        ("v5litepod-512", "no v5litepod-512 is rented", "v5litepod-256"),
        ("v6e-3", "no v6e-3 is rented", "v6e-4"),
        ("h100x12", "no h100x12 is rented", "h100x8, h100x16"),
        ("a100x8", "no machine 'a100x8'", "a100-40gbx8 or a100-80gbx8"),
        ("a3-mega-8g", "no machine 'a3-mega-8g'", "a3-megagpu-8g"),
        ("p5.48xlage", "no machine 'p5.48xlage'", "p5.48xlarge"),
        ("v5p-0", "no chip 'v5p-0'", "v5p-128"),
    ],
)
def test_a_wrong_name_is_answered_with_a_right_one(name, rule, fix):
    with pytest.raises(TopologyError) as caught:
        parse(name)
    assert rule in caught.value.rule
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5p-128", "v5p:4x4x4"),  # TensorCores, two a chip
        ("V4-32", "v4:2x2x4"),
        ("tpu7x-16", "tpu7x:2x2x2"),
        ("v5litepod-16", "v5e:4x4"),  # chips
        ("v5e-16", "v5e:4x4"),
        ("v6e-256", "v6e:16x16"),
        ("v6e-8", "v6e:2x4"),
        ("h100x8", "h100:1x8"),
        ("h100x4", "h100:1x4"),
        ("H200-16", "h200:2x8"),
        ("b200x1024", "b200:128x8"),
        ("a100-80gbx24", "a100-80gb:3x8"),
        ("a3-highgpu-8g", "h100:1x8"),
        ("Standard_ND96isr_H100_v5", "h100:1x8"),
        ("p5en.48xlarge", "h200:1x8"),
    ],
)
def test_topologies_by_the_names_under_which_they_are_rented(name, topology):
    assert parse(name).name == topology


def test_every_rented_name_is_a_topology():
    assert all(parse(name).name == topology for name, topology in MACHINE_TYPES.items())


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if is_tpu(chip)], ids=lambda chip: chip.name)
def test_a_tpu_topology_and_its_name_lead_to_each_other(chip):
    for name in near(chip, 1, most=100):
        assert parse(accelerator(parse(name))).name == name


def test_a_shape_that_is_not_rented_has_no_name():
    """v5p-128 is 4x4x4: a machine of that name would have other links than 2x4x8."""
    assert accelerator(parse("v5p:2x4x8")) is None
    assert accelerator(parse("h100:1x8")) is None


def test_gpus_have_nodes_and_no_slices():
    with pytest.raises(TopologyError, match=r"mesh.slices = 2; write h200:4x8, and mesh.slices=1"):
        parse("h200:2x8", 2)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("wanted", [1, 7, 64, 100, 5000, 10**6])
def test_what_is_offered_exists_and_is_near(chip, wanted):
    offered = near(chip, wanted)
    sizes = [parse(name).chips for name in offered]
    assert sizes == sorted(sizes)
    assert len(offered) == 3
    everything = near(chip, wanted, most=100)
    closest = min((parse(name).chips for name in everything), key=lambda size: abs(math.log(size / wanted)))
    assert closest in sizes


def test_names_need_no_jax():
    code = "import sys, maxlm.hardware.topologies; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
