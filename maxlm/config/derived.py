"""Configs derived from another: for fewer hosts, and for a model that is only computed with.

For fewer hosts: a smaller mesh and more microbatches, so that the global batch, its samples and the losses stay the same. The unit is a
host, or a whole slice of TPUs (`mesh.slices`): links of a slice lead through all of its hosts. Without training: what `maxlm eval` and
`maxlm generate` need, on a mesh of their own.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxlm.base.errors import ConfigError, UserError, show
from maxlm.config import rules
from maxlm.config.axes import divisors
from maxlm.config.loader import COMMAND_LINE, validate
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.diloco import DilocoConfig, shards_of
from maxlm.config.sections.mesh import MeshConfig
from maxlm.config.sections.train import TrainConfig

Settings = Mapping[str, Mapping[str, Any]]  # by section


def command_line(overrides: Sequence[str], sections: Sequence[str], refusal: str) -> dict[str, dict[str, Any]]:
    """The settings `section.name=value` of a command line, by section. Raises UserError with the reason `refusal` for any other text."""
    found: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if section not in sections or not dot or not equals:
            raise UserError(f"{show(text)}{refusal}")
        value = value.strip()
        found[section][name] = int(value) if value.removeprefix("-").isdecimal() and len(value) < 20 else value
    return found


def without_training(model: ModelConfig, seq_len: int, devices: int, chosen: Settings, inherited: Settings | None = None) -> Config:
    """The config of `model` with a row of `seq_len` tokens on each of so many devices, and the settings `chosen` on a command line.

    `inherited`: settings of the training, which `chosen` overrides. No other setting of the training is read, so none of its rules can
    refuse a mesh that has nothing to do with it. Raises ConfigError.
    """
    sections = {name: {**(inherited or {}).get(name, {}), **settings} for name, settings in chosen.items()}
    values: dict[str, Any] = {
        "model": model.model_dump(mode="json"),
        "data": {"store": "unused", "seq_len": seq_len},
        "train": {"steps": 1, "global_batch": devices, "loss_chunks": 1},
        **sections,
    }
    sources = {f"{section}.{name}": COMMAND_LINE for section, settings in chosen.items() for name in settings}
    config = validate(values, sources)
    rules.check(config, sources)
    return config


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
