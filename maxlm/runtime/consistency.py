"""Checks before training that all hosts run the same code, config and data on the devices that the config names, with shared storage."""

import contextlib
import hashlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

import maxlm
from maxlm.config import Config, UserError, rules
from maxlm.config.errors import UnavailableError, as_user_error
from maxlm.config.paths import is_remote
from maxlm.runtime.cluster_env import process_label
from maxlm.runtime.host_allgather import allgather_lines

SHARED_SECONDS = 10  # that a network file system may take to show a new file


def digest(text: str) -> str:
    """Return twelve hex digits of `text`'s sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_digest(folder: Path | None = None) -> str:
    """Digest of all Python files of maxlm, its kernels included: their names and contents."""
    root = folder or Path(maxlm.__file__).parent
    files = sorted({*root.rglob("*.py"), *(root / "kernels").rglob("*.py")})  # rglob does not follow that folder if it is a link
    return digest("\n".join(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files))


def require_equal(facts: Mapping[str, str], problem: UserError | None = None) -> None:
    """Compare `facts`, name -> value with the same names everywhere, across all processes.

    `problem`: why this process cannot go on, if it cannot; the others must not wait for it.

    Raises:
        UserError: in all processes alike, naming the host that cannot go on, or that differs from the others, and in what.
        UnavailableError: if the first host that cannot go on has raised one.
    """
    if jax.process_count() == 1:
        if problem is not None:
            raise problem
        return
    unavailable = isinstance(problem, UnavailableError)
    answers = allgather_lines("\n".join([socket.gethostname(), str(unavailable), str(problem or ""), *facts.values()]))
    hosts = [process_label(lines[0], number) for number, lines in enumerate(answers)]
    for host, lines in zip(hosts, answers, strict=True):
        if lines[2]:
            raise (UnavailableError if lines[1] == str(True) else UserError)(f"{host}: {lines[2]}")
    for index, name in enumerate(facts, start=3):
        values = [lines[index] for lines in answers]
        ((usual, count), *_) = Counter(values).most_common()
        odd = [number for number, value in enumerate(values) if value != usual]
        if odd:
            raise UserError(
                f"{', '.join(hosts[number] for number in odd[:4])}{' and others' if len(odd) > 4 else ''}: {name} is {values[odd[0]]}, "
                f"and {usual} on {count} other{'s' if count > 1 else ''}, such as {hosts[values.index(usual)]}; "
                "give all hosts the same code, config and data."
            )


def require_same(name: str, find: Callable[[], str]) -> None:
    """Compare what `find`, which waits for no other process, returns in all of them. Raises UserError in all, also if it raises in one."""
    found, problem = "", None
    try:
        found = find()
    except (UserError, OSError) as error:
        problem = as_user_error(error)
    require_equal({name: found}, problem)


def check_shared(folder: str, field: str) -> None:
    """Check that all hosts see `folder`, which need not exist yet, on one file system: process 0 creates a small file that they look for.

    Buckets are shared by nature. Raises UserError in all processes, naming a host that does not see it; nothing is left behind.
    """
    if jax.process_count() == 1 or is_remote(folder):
        return
    name = ""
    if jax.process_index() == 0:
        parent = next(parent for parent in (Path(folder).absolute(), *Path(folder).absolute().parents) if parent.is_dir())
        with contextlib.suppress(OSError):  # a folder that is not writable is reported where it is created
            probe = parent / f".shared-{os.getpid()}-{time.time_ns()}"
            probe.touch()
            name = str(probe)
    name = allgather_lines(name)[0][0]
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
        require_equal({}, problem)
    finally:
        if name and jax.process_index() == 0:
            Path(name).unlink(missing_ok=True)


def check_devices(config: Config, devices: Sequence[jax.Device]) -> None:
    """Raise UserError unless `devices`, of all processes, match the number and kind that `cluster.topology` names, if it is set."""
    if config.cluster is None:
        return
    topology = rules.topology_of(config)
    kinds = Counter(device.device_kind for device in devices)
    if len(devices) == topology.devices and set(kinds) <= set(topology.chip.device_kinds):
        return
    expected = f"{topology.devices} x {topology.chip.device_kinds[0]}"
    actual = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
    slices = f" on each of {topology.slices} slices" if topology.slices > 1 else ""
    raise UserError(
        f"cluster.topology = {config.cluster.topology}{slices} is {expected}, and this run has {actual}: "
        "train on that machine, or set cluster=null to train on these devices."
    )
