"""Going on without hosts that stay away (`elastic`): who may, on which mesh, and how the run grows back."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import maxlm
from maxlm.base.errors import ConfigError
from maxlm.cluster import progress_file
from maxlm.cluster.cluster import Cluster, ClusterPlace
from maxlm.cluster.coordinator import RendezvousError
from maxlm.cluster.environment import HOSTS
from maxlm.cluster.quorum import Quorum, candidates
from maxlm.config import Config, UserError, derived
from maxlm.config.loader import dump
from maxlm.config.rules import resolve_mesh
from maxlm.config.sections.elastic import ElasticConfig
from maxlm.config.sections.mesh import MeshConfig
from maxlm.run.consistency import code_digest, digest, machine_facts
from maxlm.telemetry.goodput import Part
from maxlm.training import fits

Say = Callable[[str], None]


def quorum_of(config: Config, say: Say, place: ClusterPlace) -> Quorum | None:
    """Rules by which processes of a cluster go on without others; None if they all wait, with a line why if `elastic` is set.

    Raises ConfigError: fewer hosts are configured than are needed at least.
    """
    settings, count = config.elastic, place.spec.count
    if settings is None:
        return None
    slices = config.mesh.slices
    together = count // slices if slices > 1 else place.spec.together
    devices = derived.devices_of(config) or (None if place.devices is None else place.devices * count)
    if problem := _not_possible(count, together, slices, devices):
        say(f"elastic: {problem}, so all hosts wait for one that is lost")
        return None
    hosts_together = together if slices > 1 else 1
    hosts = count // together * hosts_together
    if settings.min_hosts > hosts:
        rule = f"is more than the {hosts} hosts that this run was started on"
        raise ConfigError("elastic.min_hosts", settings.min_hosts, rule, f"use 1 to {hosts}")
    assert devices is not None, "said to be a problem"
    units = count // together
    found = functools.cache(lambda left: derived.on_fewer(config, units, devices // units, left) is not None)
    quorum = Quorum(
        count,
        together,
        settings.min_hosts * together // hosts_together,
        found,
        settings.wait_s,
        settings.grow_after_s,
        digest(f"{maxlm.__version__} {code_digest()} {sorted(machine_facts().items())} {dump(config)}"),
        frozenset(progress_file.current().absent_before or ()),
    )
    alone = len(candidates(place.spec, together)) == 1
    _describe(quorum, units, say if place.spec.process == 0 else lambda line: None, alone=alone)
    return quorum


def _not_possible(count: int, together: int, slices: int, devices: int | None) -> str:
    if slices > 1 and count % slices:
        return f"mesh.slices = {slices} does not divide the {count} processes"
    if together == count:
        return "all processes are of one slice or node, of which none can be spared"
    if devices is None:
        return "the number of devices is not known before all have joined; give every mesh axis a size, or set cluster.topology"
    return "" if devices % (count // together) == 0 else f"{devices} devices are not split evenly over {count // together} hosts"


def _describe(quorum: Quorum, units: int, say: Say, *, alone: bool) -> None:
    """One line on what can be lost, so that a mesh that has no smaller one is noticed before a host is."""
    sizes = [left for left in range(1, units) if quorum.fits(left) and quorum.allows(range(left * quorum.together))]
    unit = "hosts" if quorum.together == 1 else f"groups of {quorum.together} processes"
    if not sizes:
        say(f"elastic: no mesh of fewer than {units} {unit} keeps the global batch and a majority, so all wait for one that is lost")
        return
    first = f"; process 0 must be there, since the names of the other hosts are not known (set {HOSTS})" if alone else ""
    say(f"elastic: can go on with {', '.join(map(str, sizes))} of {units} {unit} after {quorum.wait_s:g} s{first}")


def waiting_part(settings: ElasticConfig | None) -> Part:
    """Part of the ledger that waiting for hosts is in: `elastic`, a change of hosts, from the second start of an elastic run on."""
    return "elastic" if settings is not None and progress_file.current().absent_before is not None else "wait_hosts"


def on_present(config: Config, here: Cluster) -> Config:
    """`config` for the processes that have joined: on a smaller mesh if some are absent."""
    if not here.absent or here.quorum is None:
        return config
    together, devices = here.quorum.together, jax.device_count()
    left = len(here.hosts) // together
    smaller = derived.on_fewer(config, here.configured // together, devices // left, left)
    if smaller is None:  # its devices are not those that were counted before
        raise UserError(
            f"elastic: {devices} devices on {len(here.hosts)} of {here.configured} processes make no mesh: set cluster.topology."
        )
    memory = smaller.memory_checkpoints
    if memory is not None and memory.domains is not None and here.group is not None and max(here.group.configured) < len(memory.domains):
        present = memory.model_copy(update={"domains": tuple(memory.domains[number] for number in here.group.configured)})
        return smaller.model_copy(update={"memory_checkpoints": present})
    return smaller


def summary(asked: MeshConfig, smaller: MeshConfig, microbatches: tuple[int, int], here: Cluster) -> str:
    """One line: which hosts are absent, and how the mesh `asked` for changes. `microbatches`: with all hosts, and without these."""
    devices = jax.device_count()
    before, after = resolve_mesh(asked, devices * here.configured // len(here.hosts)), resolve_mesh(smaller, devices)
    axes = [f"mesh.{axis} {before[axis]} -> {after[axis]}" for axis in before if before[axis] != after[axis]]
    parts = f"train.microbatches {microbatches[0]} -> {microbatches[1]}"
    return f"elastic: going on without {names(here.absent)}: {', '.join(axes)}, {parts}; the global batch and its samples are the same"


@contextlib.contextmanager
def waiting_if_too_large(here: Cluster) -> Iterator[None]:
    """If the smaller mesh does not hold the run, have all wait for the absent hosts after all: that input is not wrong."""
    try:
        yield
    except fits.TooLargeError as error:
        if not here.absent:
            raise
        progress_file.record(hosts=())  # as if the others had not come, so that the supervisor tries again for ever
        raise RendezvousError(f"elastic: without {names(here.absent)}, {error}") from None


def facts(mesh: MeshConfig, microbatches: int, here: Cluster) -> dict[str, Any]:
    """Data of the start event: the absent processes, and the mesh and microbatches without them."""
    if not here.absent:
        return {}
    sizes = {axis: size for axis, size in resolve_mesh(mesh, jax.device_count()).items() if size > 1}
    return {"elastic": {"absent": list(here.absent), "mesh": sizes, "microbatches": microbatches}}


def names(labels: Sequence[str], most: int = 4) -> str:
    """The first labels, and the number of the others."""
    more = f" and {len(labels) - most} others" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more
