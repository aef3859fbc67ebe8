"""Configs for fewer hosts: a smaller mesh and more microbatches, so that the global batch, its samples and the losses stay the same.

The unit is a host, or a whole slice of TPUs (`mesh.slices`): links of a slice lead through all of its hosts.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping

from maxlm.base.errors import ConfigError
from maxlm.config import rules
from maxlm.config.axes import divisors
from maxlm.config.schema import Config
from maxlm.config.sections.diloco import DilocoConfig, shards_of
from maxlm.config.sections.mesh import MeshConfig
from maxlm.config.sections.train import TrainConfig

SHRINKING = ("data", "fsdp")  # axes that split only the batch and the state


def devices_of(config: Config) -> int | None:
    """Devices that `config` is for, all hosts together; None if neither its mesh nor its `cluster` section says."""
    sizes = config.mesh.sizes().values()
    if -1 not in sizes:
        return math.prod(sizes)
    return None if config.cluster is None else rules.topology_of(config).devices


def on_fewer(config: Config, units: int, devices: int, left: int) -> Config | None:
    """`config` for `left` of `units` equal hosts or slices of `devices` each: one axis smaller, all that a checkpoint must share the same.

    A device's microbatch holds no more rows than before. `config` itself if all are left; None if there is no such mesh. The axis is that
    across slices, else the one that is -1, else `data`, else `fsdp`.
    """
    if left == units:
        return config
    full = rules.check_devices(config, units * devices)
    for axis in _shrinking(config.mesh, full):
        if full[axis] * left % units == 0:
            sizes = {**full, axis: full[axis] * left // units}
            for microbatches in _microbatches(config.train, config.diloco, full, sizes):
                smaller = _with(config, sizes, microbatches, left)
                with contextlib.suppress(ConfigError):
                    rules.check(smaller)
                    rules.check_devices(smaller, left * devices)
                    return smaller
    return None


def _shrinking(mesh: MeshConfig, full: Mapping[str, int]) -> list[str]:
    """Axes to make smaller, the best first."""
    if mesh.slices > 1:
        return [mesh.across_slices] if mesh.across_slices in SHRINKING else []
    order = sorted(SHRINKING, key=lambda axis: mesh.sizes()[axis] != -1)  # stable: `data` before `fsdp`
    return [axis for axis in order if full[axis] > 1]


def _microbatches(train: TrainConfig, diloco: DilocoConfig | None, full: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[int]:
    """Numbers of microbatches that leave a device no more rows at a time than on the `full` mesh, ascending."""
    batch, shards = train.global_batch, shards_of(diloco, sizes)
    if batch % shards:
        return
    rows, most = batch // shards, batch // train.microbatches // shards_of(diloco, full)
    yield from (number for number in divisors(rows) if rows // number <= most)


def _with(config: Config, sizes: Mapping[str, int], microbatches: int, left: int) -> Config:
    by_slices = config.mesh.slices > 1
    changes = {
        "mesh": config.mesh.model_copy(update={**sizes, "slices": left if by_slices else 1}),
        "train": config.train.model_copy(update={"microbatches": microbatches}),
        "cluster": config.cluster if by_slices else None,  # part of a slice or of a cluster is no topology
    }
    return config.model_copy(update=changes)
