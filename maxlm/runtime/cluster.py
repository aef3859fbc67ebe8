"""Joining the processes of one run: rendezvous, then jax's distributed service; orderly end of all when one ends."""

import contextlib
import functools
import ipaddress
import os
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from maxlm.config.errors import ExitCode, UserError
from maxlm.config.transient import message_line
from maxlm.runtime import cluster_env, progress_file, rendezvous
from maxlm.runtime.accelerators import find_accelerators
from maxlm.runtime.cluster_env import ProcessSpec
from maxlm.runtime.deadline import Stopped
from maxlm.runtime.message_socket import shared_secret
from maxlm.runtime.process_group import ProcessGroup
from maxlm.runtime.signals import beside_preemption_service

# Timeout of jax's own heartbeat, which ends all processes and names none. It is sent every half of it, so the process group's comes first.
JAX_HEARTBEAT_SECONDS = 120
INITIALIZE_SECONDS = 30  # for jax's service, once all processes are present
JOIN_SECONDS = 120  # hosts of a pod start that far apart


@dataclass(frozen=True)
class Cluster:
    """The cluster that this process has joined: a description, the host of each process by number, and the others unless it is alone."""

    description: str
    hosts: tuple[str, ...]
    group: ProcessGroup | None = None

    @property
    def local_processes(self) -> int:
        """Number of processes on this host, which share its memory."""
        return self.hosts.count(self.hosts[jax.process_index()])


@contextlib.contextmanager
def joined(named: Mapping[str, str], say: Callable[[str], None], seconds: float = JOIN_SECONDS) -> Iterator[Cluster]:
    """Join the cluster that this process was started in, for the length of the block; enter it before any device is used.

    If one process raises, or is lost, all end without leaving the block: with exit code 1, that of a UserError, STOPPED by a signal, or
    HOST_LOST, and a line with the reason.

    `named`: settings of the command line, see `cluster_env.find`; `say`: prints how this process joins, before it waits for the others up
    to `seconds`. Raises UserError: the cluster is incomplete or unreachable.
    """
    accelerators = {one.kind for one in find_accelerators()}
    on_tpu = "tpu" in accelerators and "TPU_SKIP_MDS_QUERY" not in os.environ
    n_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    spec = cluster_env.find(named, os.environ, functools.cache(cluster_env.metadata) if on_tpu else lambda name: None, n_gpus)
    if spec is None:
        yield Cluster("one process", (socket.gethostname(),))
        return
    progress_file.record(process=spec.process)
    secret = shared_secret(os.environ)
    say(f"joining as {spec}")
    group = rendezvous.join(spec, seconds, secret, say)
    try:
        _initialize(spec, group.local_addresses() if spec.process == 0 else set(), say)
        yield Cluster(str(spec), group.hosts, group)
    except BaseException as error:
        expected = isinstance(error, UserError | Stopped)
        reason = str(error) if expected else f"{group.own_label()} crashed: {message_line(error)}"
        code = error.exit_code if isinstance(error, UserError | Stopped) else ExitCode.CRASHED
        if expected:
            sys.stderr.write(f"maxlm: {reason}\n")
        else:
            traceback.print_exc()
        sys.stdout.flush()
        group.leave(reason, code)
        progress_file.record_error(reason)
        os._exit(code)  # an orderly exit would wait for the others
    else:
        group.leave()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, for libraries that print there (gloo prints its connections); print nothing of ours meanwhile."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _initialize(spec: ProcessSpec, reached_at: Collection[str], say: Callable[[str], None]) -> None:
    """Start jax's own service one port above; `reached_at`: addresses of this host at which the others reached process 0."""
    host, port = cluster_env.host_and_port(spec.address)
    address, bind = _join(host, port + 1), None
    local = [_join(one, port + 1) for one in reached_at if "%" not in one]
    if len(reached_at) == len(local) == 1:  # all others use this address, whatever the host's name resolves to here
        address = bind = local[0]
    for one in reached_at:
        if ipaddress.ip_address(one).is_global:
            say(
                f"warning: jax's own service listens at {_join(one, port + 1)}, a public address, and accepts any peer: "
                "use a private network, or have a firewall close that port to all but the hosts of this run."
            )
    with beside_preemption_service():
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=spec.count,
            process_id=spec.process,
            local_device_ids=spec.devices,
            cluster_detection_method="deactivate",  # jax's own would give each process of a Slurm node a single GPU
            initialization_timeout=INITIALIZE_SECONDS,
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=JAX_HEARTBEAT_SECONDS,
        )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
