"""Joining the processes of one run, and making sure that they are about to do the same."""

import contextlib
import functools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from maxlm.config.errors import UserError
from maxlm.runtime import places
from maxlm.runtime.accelerators import find_accelerators
from maxlm.runtime.places import Place
from maxlm.runtime.together import words

HEARTBEAT_SECONDS = 30  # after which a process that says nothing is held to be lost; jax's own is 100
JOIN_SECONDS = 120  # hosts of a pod start that far apart
SHARED_SECONDS = 10  # that a network file system may take to show a new file


def join(named: Mapping[str, str], say: Callable[[str], None], seconds: float = JOIN_SECONDS) -> str:
    """Join the cluster this process was started in, before any device is touched; says in words what was found, and where.

    `named`: what the command line says of it, see `places.find`; `say`: is told, before waiting for the others, what was found;
    `seconds`: to wait for them.
    Raises UserError for an incomplete or unreachable cluster.
    """
    accelerators = {one.kind for one in find_accelerators()}
    on_tpu = "tpu" in accelerators and "TPU_SKIP_MDS_QUERY" not in os.environ
    n_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    place = places.find(named, os.environ, functools.cache(places.metadata) if on_tpu else lambda name: None, n_gpus)
    if place is None:
        return "one process"
    say(f"joining as {place}")
    _initialize(place, seconds)
    return str(place)


def _initialize(place: Place, seconds: float) -> None:
    began = time.monotonic()
    if place.process > 0:
        _reach(place, seconds)
    try:
        jax.distributed.initialize(
            coordinator_address=place.address,
            num_processes=place.count,
            process_id=place.process,
            local_device_ids=place.devices,
            cluster_detection_method="deactivate",  # jax's own would give each process of a Slurm node a single GPU
            initialization_timeout=max(1, int(seconds - (time.monotonic() - began))),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        waited = time.monotonic() - began
        raise UserError(f"this is {place}, and after {waited:.0f} s not all had joined: {str(error).splitlines()[0]}") from error


def _reach(place: Place, seconds: float) -> None:
    """Waits until process 0 listens. Raises UserError saying which address did not answer, how, and for how long."""
    host, _, port = place.address.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.1, min(5.0, until - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise UserError(
                    f"this is {place}, and {place.address} did not answer for {seconds:.0f} s ({error.strerror or error}): "
                    "see that process 0 was started, that every host knows that name, and that no firewall closes the port."
                ) from error
            time.sleep(0.2)


def agree(facts: Mapping[str, str], problem: str = "") -> None:
    """Compare what all processes are about to run: `facts` is name -> value, the same names everywhere.

    `problem`: why this process cannot go on, if it cannot; the others must not wait for it.

    Raises:
        UserError: in all processes alike, naming the host that cannot go on, or that differs from the others, and in what.
    """
    if jax.process_count() == 1:
        if problem:
            raise UserError(problem)
        return
    said = words("\n".join([socket.gethostname(), problem, *facts.values()]))
    hosts = [f"{lines[0]} (process {number})" for number, lines in enumerate(said)]
    for host, lines in zip(hosts, said, strict=True):
        if lines[1]:
            raise UserError(f"{host}: {lines[1]}")
    for index, name in enumerate(facts, start=2):
        values = [lines[index] for lines in said]
        ((usual, count), *_) = Counter(values).most_common()
        odd = [number for number, value in enumerate(values) if value != usual]
        if odd:
            raise UserError(
                f"{', '.join(hosts[number] for number in odd[:4])}{' and others' if len(odd) > 4 else ''}: {name} is {values[odd[0]]}, "
                f"and {usual} on {count} other{'s' if count > 1 else ''}, such as {hosts[values.index(usual)]}; "
                "give all hosts the same code, config and data."
            )


def hosts() -> list[str]:
    """The name of each process's host."""
    return [socket.gethostname()] if jax.process_count() == 1 else [lines[0] for lines in words(socket.gethostname())]


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
    problem = ""
    until = time.monotonic() + SHARED_SECONDS
    while name and not Path(name).exists():
        if time.monotonic() > until:
            problem = (
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
