"""Joining the processes of one run, and making sure that they are about to do the same."""

import contextlib
import functools
import ipaddress
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from maxlm.config.errors import ExitCode, UnavailableError, UserError
from maxlm.runtime import cluster_env, roll_call
from maxlm.runtime.accelerators import find_accelerators
from maxlm.runtime.cluster_env import Place
from maxlm.runtime.deadline import Stopped
from maxlm.runtime.host_allgather import words
from maxlm.runtime.line import shared_secret
from maxlm.runtime.signals import beside_preemption_service

HANG_SECONDS = (
    120  # after which jax's own heartbeat ends all processes, naming nobody; asked every half of it, so never before the roll call's
)
INITIALIZE_SECONDS = 30  # for jax to do what all are there for
JOIN_SECONDS = 120  # hosts of a pod start that far apart
SHARED_SECONDS = 10  # that a network file system may take to show a new file


@dataclass(frozen=True)
class Cluster:
    """What this process has joined: in words, and the host of each process by number."""

    description: str
    hosts: tuple[str, ...]


@contextlib.contextmanager
def joined(named: Mapping[str, str], say: Callable[[str], None], seconds: float = JOIN_SECONDS) -> Iterator[Cluster]:
    """Within it this process is one of the cluster it was started in; to be entered before any device is touched.

    If one process raises, or is lost, all end, and do not leave this block: with exit code 1, that of a UserError, STOPPED by a signal, or
    HOST_LOST, and a line that says why.

    Args:
        named: what the command line says of the cluster, see `cluster_env.find`.
        say: is told, before waiting for the others, what was found, and where.
        seconds: to wait for them.

    Raises:
        UserError: the cluster is incomplete or unreachable.
    """
    accelerators = {one.kind for one in find_accelerators()}
    on_tpu = "tpu" in accelerators and "TPU_SKIP_MDS_QUERY" not in os.environ
    n_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    place = cluster_env.find(named, os.environ, functools.cache(cluster_env.metadata) if on_tpu else lambda name: None, n_gpus)
    if place is None:
        yield Cluster("one process", (socket.gethostname(),))
        return
    secret = shared_secret(os.environ)
    say(f"joining as {place}")
    meeting = roll_call.meet(place, seconds, secret, say)
    try:
        _initialize(place, meeting.local_addresses() if place.process == 0 else set(), say)
        yield Cluster(str(place), meeting.hosts)
    except BaseException as error:
        expected = isinstance(error, UserError | Stopped)
        line = str(error) if expected else f"{meeting.name()} crashed: {_first_line(error)}"
        code = error.exit_code if isinstance(error, UserError | Stopped) else ExitCode.CRASHED
        if expected:
            sys.stderr.write(f"maxlm: {line}\n")
        else:
            traceback.print_exc()
        sys.stdout.flush()
        meeting.part(line, code)
        os._exit(code)  # an orderly exit would wait for the others
    else:
        meeting.part()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _initialize(place: Place, reached_at: Collection[str], say: Callable[[str], None]) -> None:
    """Start jax's own service beside the roll call; `reached_at`: addresses of this host at which the others reached process 0."""
    host, port = cluster_env.host_and_port(place.address)
    address, bind = _join(host, port + 1), None
    if len(reached_at) == 1 and "%" not in (
        only := next(iter(reached_at))
    ):  # where all others look for it, whatever its name leads to here
        address = bind = _join(only, port + 1)
    for one in filter(_is_public, reached_at):
        say(
            f"warning: jax's own service listens at {_join(one, port + 1)}, a public address, and takes part with anybody: "
            "use a private network, or have a firewall close that port to all but the hosts of this run."
        )
    with beside_preemption_service():
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=place.count,
            process_id=place.process,
            local_device_ids=place.devices,
            cluster_detection_method="deactivate",  # jax's own would give each process of a Slurm node a single GPU
            initialization_timeout=INITIALIZE_SECONDS,
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=HANG_SECONDS,
        )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_public(address: str) -> bool:
    return ipaddress.ip_address(address).is_global


def agree(facts: Mapping[str, str], problem: UserError | None = None) -> None:
    """Compare what all processes are about to run: `facts` is name -> value, the same names everywhere.

    `problem`: why this process cannot go on, if it cannot; the others must not wait for it.

    Raises:
        UserError: in all processes alike, naming the host that cannot go on, or that differs from the others, and in what.
        UnavailableError: if the first host that cannot go on has met one.
    """
    if jax.process_count() == 1:
        if problem is not None:
            raise problem
        return
    may_pass = isinstance(problem, UnavailableError)
    said = words("\n".join([socket.gethostname(), str(may_pass), str(problem or ""), *facts.values()]))
    hosts = [cluster_env.called(lines[0], number) for number, lines in enumerate(said)]
    for host, lines in zip(hosts, said, strict=True):
        if lines[2]:
            raise (UnavailableError if lines[1] == str(True) else UserError)(f"{host}: {lines[2]}")
    for index, name in enumerate(facts, start=3):
        values = [lines[index] for lines in said]
        ((usual, count), *_) = Counter(values).most_common()
        odd = [number for number, value in enumerate(values) if value != usual]
        if odd:
            raise UserError(
                f"{', '.join(hosts[number] for number in odd[:4])}{' and others' if len(odd) > 4 else ''}: {name} is {values[odd[0]]}, "
                f"and {usual} on {count} other{'s' if count > 1 else ''}, such as {hosts[values.index(usual)]}; "
                "give all hosts the same code, config and data."
            )


def check_shared(folder: str, field: str) -> None:
    """Whether all hosts see `folder`, which need not be there yet, on one file system: process 0 leaves a small file that they look for.

    Buckets are shared by nature. Raises UserError in all processes, naming a host that does not see it; nothing is left behind.
    """
    if jax.process_count() == 1 or "://" in folder:
        return
    name = ""
    if jax.process_index() == 0:
        there = next(parent for parent in (Path(folder).absolute(), *Path(folder).absolute().parents) if parent.is_dir())
        with contextlib.suppress(OSError):  # a closed door is told where it is tried for good
            probe = there / f".shared-{os.getpid()}-{time.time_ns()}"
            probe.touch()
            name = str(probe)
    name = words(name)[0][0]
    problem = None
    until = time.monotonic() + SHARED_SECONDS
    while name and not Path(name).exists():
        if time.monotonic() > until:
            problem = UserError(
                f"{field} = {folder}: checkpoints go there, and this host does not see what process 0 writes there; "
                "set checkpoint.dir to a folder of a file system that all hosts share, or to gs://."
            )
            break
        time.sleep(0.2)
    try:
        agree({}, problem)
    finally:
        if name and jax.process_index() == 0:
            Path(name).unlink(missing_ok=True)
