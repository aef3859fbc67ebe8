"""Every machine under configs/clusters/ is what its name says: chips, shape and memory."""

import math
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from maxlm.config import load, rules
from maxlm.config.schema import ClusterConfig
from maxlm.hardware.chips import CHIPS, GIB

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CLUSTERS = sorted((CONFIGS / "clusters").glob("*.yml"))
CORES_A_CHIP = {"v4": 2, "v5p": 2, "tpu7x": 2}  # Cloud TPU counts TensorCores in the names of these, chips in all others
CLOUD_NAME = {"v5e": "v5litepod"}  # where Cloud TPU's accelerator type is not the chip's name

each_cluster = pytest.mark.parametrize("path", CLUSTERS, ids=[path.stem for path in CLUSTERS])


def read_cluster(path: Path) -> ClusterConfig:
    """The `cluster` section of a file, which must hold nothing else."""
    values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    assert list(values) == ["cluster"]
    return ClusterConfig(**values["cluster"])


def chip_and_count(path: Path) -> tuple[str, int]:
    """(chip, how many) by the file's name: v5p-128 has 64 chips of v5p, h200x8 has 8 of h200."""
    chip, count = re.fullmatch(r"(v\d\w?|tpu7x|[hb]\d{3})[-x](\d+)", path.stem).groups()
    return chip, int(count) // CORES_A_CHIP.get(chip, 1)


@each_cluster
def test_topology_has_the_chips_of_the_name(path):
    chip, shape = read_cluster(path).topology.split(":")
    sides = [int(side) for side in shape.split("x")]
    assert (chip, math.prod(sides)) == chip_and_count(path)
    assert len(sides) == (3 if chip in ("v4", "v5p", "tpu7x") else 2)


@each_cluster
def test_accelerator_is_cloud_tpus_name(path):
    chip, cores = re.fullmatch(r"(\w+?)[-x](\d+)", path.stem).groups()
    expected = None if chip[0] in "hb" else f"{CLOUD_NAME.get(chip, chip)}-{cores}"
    assert read_cluster(path).accelerator == expected


@each_cluster
def test_comment_states_the_chips_and_their_memory(path):
    comment = path.read_text(encoding="utf-8").splitlines()[0]
    name, count = chip_and_count(path)
    stated = re.match(r"# ([\d,]+) (?:TPU|NVIDIA) (\w+)\b.*?, (\d+) (GiB|GB) of HBM each", comment)
    chips, kind, memory, unit = stated.groups()
    (chip,) = [chip for chip in CHIPS if chip.name.lower() == name]
    assert (int(chips.replace(",", "")), kind.lower()) == (count, name)
    assert int(memory) * (GIB if unit == "GiB" else 10**9) == chip.hbm_bytes


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "runs").glob("*.yml")))
def test_shipped_run_loads_and_its_mesh_fits_its_cluster(name):
    config = load(f"runs/{name}").config
    if config.cluster is not None:
        devices = rules.topology_of(config).devices
        assert math.prod(rules.check_devices(config, devices).values()) == devices
