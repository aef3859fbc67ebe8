"""Joining the processes of one run: rendezvous, then jax's distributed service; orderly end of all when one ends."""

import contextlib
import functools
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import jax

from maxlm.base.errors import ExitCode, UserError
from maxlm.base.transient import message_line
from maxlm.cluster import deadline, environment, progress_file, rendezvous
from maxlm.cluster.accelerators import find_accelerators
from maxlm.cluster.deadline import Stopped
from maxlm.cluster.environment import ProcessSpec, process_label, service_address
from maxlm.cluster.message_socket import shared_secret
from maxlm.cluster.process_group import ProcessGroup
from maxlm.cluster.quorum import Quorum
from maxlm.cluster.signals import beside_preemption_service
from maxlm.hardware.xla_flags import VIRTUAL_DEVICES

# Timeout of jax's own heartbeat, ten years: it is measured by the wall clock, so a clock that is set forward would end all processes, and
# name none. The process group does its work. A clock of process 0's host that is set back ends them all the same, as jax 0.10 takes the
# difference of unsigned numbers; `maxlm launch` says so.
JAX_HEARTBEAT_SECONDS = 10 * 365 * 86400
INITIALIZE_SECONDS = 30  # for jax's service, once all processes are present
SHOWN = 4  # processes named in a line
JOIN_SECONDS = 120  # hosts of a pod start that far apart


@dataclass(frozen=True)
class ClusterPlace:
    """Place of this process in its cluster before it joins; `devices`: its number of them, None if only jax can tell."""

    spec: ProcessSpec
    devices: int | None


QuorumOf = Callable[[ClusterPlace], Quorum | None]


@dataclass(frozen=True)
class Cluster:
    """The cluster that this process has joined: a description, and the host of each process by number. `absent`: labels of the
    `configured` processes without which it goes on by the rules of `quorum`.
    """

    description: str
    hosts: tuple[str, ...]
    configured: int = 1
    absent: tuple[str, ...] = ()
    quorum: Quorum | None = None
    group: ProcessGroup | None = None

    @property
    def local_processes(self) -> int:
        """Number of processes on this host, which share its memory."""
        return self.hosts.count(self.hosts[jax.process_index()])

    def ends_before(self) -> dict[str, str]:
        """Return how the attempt before ended at the processes that say so, by label, but for those that were done or
        stopped, or ended because of another one.
        """
        codes = {} if self.group is None else {self.group.label(number): code for number, code in self.group.codes_before.items()}
        of_others = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.HOST_LOST)
        return {label: progress_file.how_ended(code) for label, code in codes.items() if code not in of_others}

    def regrouping(self) -> str:
        """Why all processes are about to save and join anew; "" if they are not."""
        return "" if self.group is None else self.group.regrouping

    def when_larger(self, stop: Callable[[str], None]) -> None:
        """Once absent processes are back, at process 0: tell all processes that they join anew, and have `stop` called with the reason."""
        if self.group is None or self.group.returning is None:
            return
        group = self.group

        def grow(numbers: tuple[int, ...]) -> None:
            away = dict(zip(sorted(set(range(self.configured)) - set(group.configured)), self.absent, strict=True))
            back = [label for number, label in away.items() if number in numbers]
            progress_file.record(absent=tuple(number for number in away if number not in numbers))
            group.regroup(f"the return of {', '.join(back[:SHOWN])}{f' and {len(back) - SHOWN} others' if len(back) > SHOWN else ''}")
            stop(group.regrouping)

        self.group.returning.when_larger(grow)

    def finish(self, reason: str = "") -> None:
        """Tell processes that wait for their return that the run is done, or for which `reason` it would fail again."""
        if self.group is not None and self.group.returning is not None:
            self.group.returning.close(reason)


@contextlib.contextmanager
def joined(
    named: Mapping[str, str],
    say: Callable[[str], None],
    seconds: float = JOIN_SECONDS,
    quorum_of: QuorumOf = lambda place: None,
) -> Iterator[Cluster]:
    """Join the cluster that this process was started in, for the length of the block; enter it before any device is used.

    If one process raises, or is lost, all end without leaving the block: with exit code 1, the code of a UserError, STOPPED by a signal, or
    HOST_LOST, and a line with the reason.

    `named`: settings of the command line, see `environment.find`; `say`: prints how this process joins, before it waits for the others up
    to `seconds`. `quorum_of`: rules by which some go on without the others. Raises UserError: the cluster is incomplete or unreachable.
    """
    accelerators = {one.kind for one in find_accelerators()}
    on_tpu = "tpu" in accelerators and "TPU_SKIP_MDS_QUERY" not in os.environ
    n_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    spec = environment.find(named, os.environ, functools.cache(environment.metadata) if on_tpu else lambda name: None, n_gpus)
    if spec is None:
        yield Cluster("one process", (socket.gethostname(),))
        return
    progress_file.record(process=spec.process)
    secret = shared_secret(os.environ)
    gave_up = progress_file.current().gave_up
    say(f"joining as {spec}" + ("" if gave_up is None else ", only to tell the others that the launcher gives up"))
    quorum = quorum_of(ClusterPlace(spec, _count_devices(spec, accelerators, n_gpus)))
    if gave_up is not None and quorum is not None:
        raise UserError("the launcher of this process has given up; the others go on without it.")
    group = rendezvous.join(spec, seconds, secret, say, quorum)
    progress_file.record(hosts=group.hosts, numbers=group.configured, process=group.spec.process)
    if gave_up is not None:
        group.end_all(f"the launcher of {group.label(group.spec.process)} has given up: {gave_up}", ExitCode.HOST_LOST, None, final=True)
    try:
        now, absent = group.spec, sorted(set(range(spec.count)) - set(group.configured))
        if group.configured != tuple(range(spec.count)):
            _tell_slices(spec, group.configured, os.environ)
        if now.count > 1:
            _initialize(group)
        labels = tuple(process_label(spec.hosts[number], number) if spec.hosts else f"process {number}" for number in absent)
        codes = {str(number): code for number, code in group.codes_before.items()}
        progress_file.record(absent=tuple(absent), codes_before=codes)
        yield Cluster(str(now), group.hosts, spec.count, labels, quorum, group)
    except BaseException as error:
        expected = isinstance(error, UserError | Stopped)
        reason = str(error) if expected else f"{group.label(group.spec.process)} crashed: {message_line(error)}"
        code = error.exit_code if isinstance(error, UserError | Stopped) else ExitCode.CRASHED
        try:
            with contextlib.suppress(OSError, ValueError):  # whoever read the output may be gone
                if expected:
                    sys.stderr.write(f"maxlm: {reason}\n")
                else:
                    traceback.print_exc()
                sys.stdout.flush()
            group.leave(reason, code)
            progress_file.record_error(reason)
        finally:
            os._exit(code)  # an orderly exit would wait for the others
    else:
        group.leave()


def _count_devices(spec: ProcessSpec, accelerators: Collection[str], n_gpus: int) -> int | None:
    """Devices of this process, without jax; None for TPUs: `cluster.topology` gives their number."""
    if "tpu" in accelerators and os.environ.get("JAX_PLATFORMS", "tpu") != "cpu":
        return None
    if n_gpus and os.environ.get("JAX_PLATFORMS", "cuda") != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        n_visible = n_gpus if visible is None else len([one for one in visible.split(",") if one.strip()])
        return len(spec.devices) if spec.devices is not None else n_visible
    virtual = re.findall(rf"{VIRTUAL_DEVICES}(\d{{1,6}})", os.environ.get("XLA_FLAGS", ""))
    return int(virtual[-1]) if virtual else 1


def _tell_slices(spec: ProcessSpec, configured: Collection[int], environ: MutableMapping[str, str]) -> None:
    """Number the slices of a TPU that are left, as their processes are, for its runtime, which finds the configured ones in the metadata
    otherwise.
    """
    slices = list(dict.fromkeys(number // spec.together for number in configured))
    if environ.get("MEGASCALE_NUM_SLICES") or environ.get("TPU_WORKER_ID") or "Cloud TPU" in spec.launcher:
        environ["MEGASCALE_NUM_SLICES"] = str(len(slices))
        environ["MEGASCALE_SLICE_ID"] = str(slices.index(spec.process // spec.together))


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[TextIO]:
    """Redirect stdout to stderr, for libraries that print there (gloo: its connections); yields the real stdout for our own output."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            sys.stdout.flush()
            stdout.flush()
            os.dup2(stdout.fileno(), 1)


def _initialize(group: ProcessGroup) -> None:
    """Start jax's own service at process 0, and connect to it."""
    spec = group.spec
    with _without_proxies(os.environ), beside_preemption_service():
        jax.distributed.initialize(
            coordinator_address=service_address(spec.address),
            num_processes=spec.count,
            process_id=spec.process,
            local_device_ids=spec.devices,
            cluster_detection_method="deactivate",  # jax's own would give each process of a Slurm node a single GPU
            initialization_timeout=INITIALIZE_SECONDS,
            coordinator_bind_address=service_address(spec.address, group.service_bind),
            heartbeat_timeout_seconds=JAX_HEARTBEAT_SECONDS,
        )
    deadline.delay_aborts()


@contextlib.contextmanager
def _without_proxies(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Hide the variables by which gRPC would look for process 0 behind a proxy."""
    hidden = {name: environ.pop(name) for name in list(environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        environ.update(hidden)
