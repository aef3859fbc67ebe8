"""Checks before training that all hosts run the same code, libraries, flags, config and data on the devices that the config names, with
shared storage.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

import maxlm
from maxlm.base.paths import is_remote, open_regular, read_file
from maxlm.cluster import agree
from maxlm.config import UserError
from maxlm.config.sections.cluster import ClusterConfig, topology_of
from maxlm.hardware.xla_flags import VIRTUAL_DEVICES

SHARED_SECONDS = 10  # that a network file system may take to show a new file

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that hold options of the compiler and the TPU's runtime
FLAG_FILE_BYTES = 2**26  # of a file that an option names, which are compared
# Variables that change the compiled program or the order of a sum: jax's, and of NVIDIA's libraries TF32 and the choice of an algorithm.
VARIABLES = re.compile(
    r"JAX_\w+|TF_XLA_FLAGS|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|CUDNN_\w+"
    r"|NCCL_(ALGO|PROTO|\w*NCHANNELS|\w*CTAS|NTHREADS|BUFFSIZE|\w*ENABLE)"
)
# Words in the names of variables and options by which hosts may differ: numbers of processes and devices, addresses, logs and caches.
OF_ONE_HOST = {
    *("process", "processes", "id", "ids", "coordinator", "address", "port", "ports", "visible"),
    *("cache", "dump", "log", "logs", "logging", "logtostderr", "vmodule", "traceback", "profiler"),
}
# Distributions that compute, or compile programs that compute.
LIBRARIES = re.compile(
    r"jax(lib|-(cuda|rocm)\d+-(plugin|pjrt))?|libtpu|flax|optax|orbax-checkpoint|grain|tensorstore|numpy|ml[-_]dtypes|tokenizers|nvidia-.+"
)


def digest(text: str) -> str:
    """Return twelve hex digits of `text`'s sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_digest(folder: Path | None = None) -> str:
    """Digest of all Python files of maxlm, its kernels included: their names and contents."""
    root = folder or Path(maxlm.__file__).parent
    files = sorted({*root.rglob("*.py"), *(root / "kernels").rglob("*.py")})  # rglob does not follow that folder if it is a link
    return digest("\n".join(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files))


def machine_facts() -> dict[str, str]:
    """Versions of the libraries and of Python, compiler flags and environment variables that decide what a process computes, by name.

    `XLA_FLAGS` that name a file stand for the options in it, and of an option given twice the last counts, as for XLA. An option with
    a file as its value counts by its content, such as results of autotuning: hosts may keep it in different places.
    """
    facts = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for distribution in importlib.metadata.distributions():
        if (name := distribution.name) and LIBRARIES.fullmatch(name.lower()):
            facts.setdefault(name.lower(), distribution.version)  # of two on the path, the first is imported
    for name, value in os.environ.items():
        if name in FLAGS:
            facts |= {f"{name} {option}": given for option, given in _options(value) if _compared(option)}
        elif VARIABLES.fullmatch(name) and value and _compared(name):
            facts[name] = value
    return facts


def _options(value: str) -> Iterator[tuple[str, str]]:
    """Names and values of the options in `value`, or in the file that it names."""
    if value and not value.lstrip().startswith("-"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            value = read_file(value).decode()
    try:
        options = shlex.split(value)
    except ValueError:  # an open quote
        options = value.split()
    for option in options:
        name, _, given = option.partition("=")
        if f"{name}=" != VIRTUAL_DEVICES:
            yield name, _content(given) or given or "true"


def _content(path: str) -> str:
    """Size and digest of the first FLAG_FILE_BYTES of a regular file; "" for anything else."""
    if not path:
        return ""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return f"a file of {size:,} bytes, {hashlib.sha256(file.read(FLAG_FILE_BYTES)).hexdigest()[:12]}"
    return ""


def _compared(name: str) -> bool:
    return not OF_ONE_HOST & set(re.split(r"[_-]+", name.lower()))


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
    name = agree.agree(name)[0]
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
        agree.require_equal({}, problem)
    finally:
        if name and jax.process_index() == 0:
            Path(name).unlink(missing_ok=True)


def check_devices(cluster: ClusterConfig | None, slices: int, devices: Sequence[jax.Device]) -> None:
    """Raise UserError unless `devices`, of all processes, match the number and kind that `cluster.topology` names, if it is set."""
    if cluster is None:
        return
    topology = topology_of(cluster, slices)
    kinds = Counter(device.device_kind for device in devices)
    if len(devices) == topology.devices and set(kinds) <= set(topology.chip.device_kinds):
        return
    expected = f"{topology.devices} x {topology.chip.device_kinds[0]}"
    actual = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
    each = f" on each of {topology.slices} slices" if topology.slices > 1 else ""
    raise UserError(
        f"cluster.topology = {cluster.topology}{each} is {expected}, and this run has {actual}: "
        "train on that machine, or set cluster=null to train on these devices."
    )
