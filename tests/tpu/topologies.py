"""TPUs that are not there: their devices, for compiling, and steps that are scheduled for them."""

import os

import pytest

from maxlm.cost.step_cost import StepCost, program_cost
from maxlm.cost.verify import Compiler
from maxlm.hardware.topologies import Topology
from maxlm.hlo.parser import read
from maxlm.training.program import Program

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def devices(topology: str):
    """Of a slice as the compiler names it; skips the test where libtpu is not installed."""
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu, which exists for Linux on x86-64")
    from jax.experimental import topologies

    options = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def compiled(program: Program, topology: Topology, *, machine_code: bool = False) -> tuple[str, StepCost]:
    """The step of `program` and its cost; only scheduled unless `machine_code`, which takes most of a compilation."""
    with Compiler(machine_code=machine_code) as compiler:
        text = compiler.step(program, topology).text
    return text, program_cost(program, read(text), topology)
