"""Check that the devices are those of the config's `cluster` section."""

from collections import Counter
from collections.abc import Sequence

import jax

from maxlm.config import Config, UserError, rules


def check_cluster(config: Config, devices: Sequence[jax.Device]) -> None:
    """Raise UserError unless `devices`, of all processes, are as many and of the kind that `cluster.topology` promises, if it is set."""
    if config.cluster is None:
        return
    topology = rules.topology_of(config)
    kinds = Counter(device.device_kind for device in devices)
    if len(devices) == topology.devices and set(kinds) <= set(topology.chip.device_kinds):
        return
    promised = f"{topology.devices} x {topology.chip.device_kinds[0]}"
    here = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
    slices = f" on each of {topology.slices} slices" if topology.slices > 1 else ""
    raise UserError(
        f"cluster.topology = {config.cluster.topology}{slices} is {promised}, and here is {here}: "
        "train on that machine, or set cluster=null to train on what is here."
    )
