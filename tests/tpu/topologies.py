"""TPUs that are not there: their devices, for compiling."""

import os

import pytest

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def devices(topology: str):
    """Of a slice as the compiler names it; skips the test where libtpu is not installed."""
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu, which exists for Linux on x86-64")
    from jax.experimental import topologies

    options = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
