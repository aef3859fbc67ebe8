"""The machine that a run is for."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import model_validator

from maxlm.base.errors import ConfigError
from maxlm.config.capability import Capability, Inert, Problems
from maxlm.config.fields import PositiveFloat, Section, Text
from maxlm.hardware import topologies
from maxlm.hardware.topologies import Topology, TopologyError


class ClusterConfig(Section):
    """The machine that a run is for: planning compiles for it, training checks that it has it."""

    topology: Text
    """Chips of the machine, as the compiler names them: v5p:4x4x4 for TPUs, nodes x GPUs a node as in h100:16x8 for GPUs. Rented names such
    as v5p-128 are translated.
    """
    accelerator: Text | None = None
    """Name under which the cloud rents the machine, such as v5p-128 or a3-megagpu-8g. Default: derived from the topology for TPUs."""
    network_gbit_per_s: PositiveFloat | None = None
    """Bandwidth of the network between nodes or slices, for each chip in each direction; null: as stated in maxlm/hardware/facts.toml.
    Unit: Gbit/s.
    """

    @model_validator(mode="before")
    @classmethod
    def _translate_rented_names(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("topology"), str):
            return values
        name, given = values["topology"], values.get("accelerator")
        with contextlib.suppress(topologies.TopologyError):  # the rules refuse it, with the file it is from
            topology = topologies.parse(name)
            machine = name.lower() if name.lower() in topologies.MACHINE_TYPES and not topology.is_tpu else topologies.accelerator(topology)
            return {**values, "topology": topology.name, "accelerator": machine if given is None else given}
        return values


def topology_of(cluster: ClusterConfig, slices: int, source: str = "") -> Topology:
    """The machine of this section, all slices. Raises ConfigError for a topology that does not exist."""
    try:
        topology = topologies.parse(cluster.topology, slices)
    except TopologyError as error:
        raise ConfigError("cluster.topology", cluster.topology, error.rule, error.fix, source) from None
    network = cluster.network_gbit_per_s
    if network is None:
        return topology
    return replace(topology, chip=replace(topology.chip, dcn_bytes_per_s=network * 1e9 / 8))


def _accelerator(cluster: ClusterConfig, mesh_slices: int) -> Problems:
    if cluster.accelerator is None:
        return
    name, topology = cluster.accelerator, topology_of(cluster, mesh_slices)
    try:
        machine = topologies.parse(name)
    except TopologyError as error:
        yield "cluster.accelerator", name, error.rule, f"{error.fix}, or null"
        return
    same = machine.chip.name == topology.chip.name and machine.sides[-1] == topology.sides[-1]  # of GPUs: the nodes are alike
    if not (machine.name == topology.name if topology.is_tpu else same):
        rule = f"is {machine.name}, and cluster.topology = {cluster.topology}"
        right = topologies.accelerator(topology)
        yield "cluster.accelerator", name, rule, f"use {right}, or null" if right is not None else "use null"


def _inert(cluster: ClusterConfig, mesh_slices: int) -> Iterator[Inert]:
    topology = topologies.parse(cluster.topology, mesh_slices)
    if (topology.slices if topology.is_tpu else topology.hosts) == 1:
        unit = "slice" if topology.is_tpu else "node"
        yield Inert("cluster.network_gbit_per_s", f"{topology.name} is one {unit}, which no network leaves", f"name several {unit}s")


CAPABILITY = Capability(key="cluster", written_rules=(_accelerator,), inert=_inert)
