"""Checks of a whole config by the rules of the table. Each problem says field, value, rule and fix."""

import math
from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from maxlm.base.errors import ConfigError, Problem
from maxlm.base.paths import check_run_name
from maxlm.config import axes
from maxlm.config.capability import divisors_text, value_of
from maxlm.config.schema import Config
from maxlm.config.sections import cluster
from maxlm.config.sections.mesh import MeshConfig
from maxlm.config.sections.start_from import StartFromConfig
from maxlm.config.table import inert, problems, weights_kinds
from maxlm.hardware.chips import Chip
from maxlm.hardware.topologies import Topology, either


def check(config: Config, sources: Mapping[str, str] | None = None, *, any_mesh: bool = False) -> None:
    """Raise ConfigError for the first rule that `config` breaks. Needs no device: a `cluster` section says how many there will be.

    `any_mesh`: do not check the mesh against that cluster. `sources`: a person has written the settings, so that one without effect and
    others that only a person would get wrong are refused, too.
    """
    origins = sources or {}
    _refuse(problems(config, "rules"), origins)
    _refuse(_weights(config.train.start_from), origins)
    check_run_name(config.run.name, origins.get("run.name", ""))
    if config.cluster is not None:
        topology = topology_of(config, origins.get("cluster.topology", ""))
        check_chip(config, topology.chip, origins)
        if not any_mesh:
            check_full_mesh(config, topology.devices, origins)
    if sources is not None:  # a program may set what only a later change of the config will read
        _refuse((*_without_effect(config), *problems(config, "written_rules")), origins)


def _without_effect(config: Config) -> Iterator[Problem]:
    """Settings that are not at their defaults and that nothing reads, since the run would not do what its config says."""
    for field, why, use in inert(config):
        path, _, name = field.rpartition(".")
        section = value_of(config, path)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            text = value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value
            usual = "the default settings" if isinstance(default, BaseModel) else "null" if default is None else default
            yield field, text, f"does nothing, since {why}", f"leave it at {usual}, its default, or {use}"


def topology_of(config: Config, source: str = "") -> Topology:
    """The machine of the `cluster` section, all slices. Raises ConfigError for a topology that does not exist."""
    assert config.cluster is not None, "asked about a cluster that the config does not name"
    return cluster.topology_of(config.cluster, config.mesh.slices, source)


def _weights(start: StartFromConfig | None) -> Iterator[Problem]:
    if start is not None and start.weights not in weights_kinds():
        yield "train.start_from.weights", start.weights, "is no kind of weights", f"use {either(weights_kinds())}"


def check_chip(config: Config, chip: Chip, sources: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for the first rule of this kind of chip that `config` breaks."""
    _refuse(problems(config, "chip_rules", chip=chip), sources or {})


def check_full_mesh(config: Config, n_devices: int, sources: Mapping[str, str] | None = None) -> dict[str, int]:
    """`check_devices` of all hosts together, with the rules that only a mesh of fewer hosts may break."""
    sizes = check_devices(config, n_devices, sources)
    _refuse(problems(config, "full_mesh_rules", sizes=sizes), sources or {})
    return sizes


def _refuse(found: Iterable[Problem], sources: Mapping[str, str]) -> None:
    for field, value, rule, fix in found:
        raise ConfigError(field, value, rule, fix, sources.get(field, ""))


def resolve_mesh(mesh: MeshConfig, n_devices: int) -> dict[str, int]:
    """Axis name -> size with -1 filled in. Raises ConfigError unless the product is `n_devices`."""
    sizes = mesh.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and n_devices % fixed == 0:
        sizes[free[0]] = n_devices // fixed
    if math.prod(sizes.values()) != n_devices:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "1"
        rule = f"the product of the axes must be the number of devices, {n_devices}"
        fix = "set one axis to -1 for whatever is left, and let the others divide the devices"
        fix += f", or try it on a CPU with --devices {fixed}" if n_devices == 1 and not free else ""
        raise ConfigError("mesh", product, rule, fix)
    crossing = sizes[mesh.across_slices]
    if crossing % mesh.slices:
        rule = f"must divide mesh.{mesh.across_slices} = {crossing}, the axis that crosses slices"
        raise ConfigError("mesh.slices", mesh.slices, rule, "change one of them")
    return sizes


def check_devices(config: Config, n_devices: int | None, sources: Mapping[str, str] | None = None) -> dict[str, int]:
    """Mesh axis -> size for `n_devices`. Raises ConfigError where a size does not divide the dimension it splits.

    `n_devices`: None if it is not known. An axis of -1 then counts as 1: a size that does not divide is wrong for every larger mesh, too.
    """
    sizes = config.mesh.sizes()
    partial = n_devices is None and -1 in sizes.values()
    if partial:
        sizes = {axis: max(size, 1) for axis, size in sizes.items()}
    else:
        sizes = resolve_mesh(config.mesh, n_devices or math.prod(sizes.values()))
    _refuse(_divides(config, sizes, partial=partial), sources or {})
    return sizes


def _divides(config: Config, sizes: Mapping[str, int], *, partial: bool) -> Iterator[Problem]:
    """Mesh axes that do not divide a dimension they split: by the rules of the sections, unless `partial`, and by the table of axes."""
    if not partial:
        yield from problems(config, "mesh_rules", sizes=sizes)
    for field, size, logical in axes.dims(config):
        before: list[str] = []
        for axis in logical.mesh:
            if size % math.prod(sizes[name] for name in (*before, axis)):
                others = " x ".join(f"mesh.{name} = {sizes[name]}" for name in before if sizes[name] > 1)
                reason = f" ({logical.reason})" if logical.reason else ""
                rule = f"{f'times {others} ' if others else ''}does not divide {field} = {size}{reason}"
                yield f"mesh.{axis}", sizes[axis], rule, f"use {divisors_text(axes.largest(config, axis, sizes))}"
                break
            before.append(axis)
