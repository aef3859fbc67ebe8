"""The machine that runs this process. No jax here."""

import contextlib
import os
import sys
from pathlib import Path

FROM_SUPERVISOR = (  # variables by which a supervisor talks to the run that it starts, and to nothing that this starts in turn
    "MAXLM_PROGRESS_FILE",  # path of the file in which the run records its progress, after the supervisor has begun it
    "MAXLM_PARENT",  # descriptor of a pipe that is closed when the launcher exits
)


def environment_of_commands() -> dict[str, str]:
    """Environment for a command that a run starts: without what its supervisor told it, which would be taken for the command's own."""
    return {name: value for name, value in os.environ.items() if name not in FROM_SUPERVISOR}


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory this process may use: the machine's, or less where a container has a limit; None if the system does not state it."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for limit in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        try:
            text = (root / limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def available_memory() -> int | None:
    """Bytes of memory that could be given to programs now; None if the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def in_memory(folder: Path) -> bool:
    """True if `folder` lies on a file system in memory."""
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
        inside = [(len(place), kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
        return max(inside)[1] in ("tmpfs", "ramfs") if inside else False
    return False


def process_namespace() -> str:
    """The system within which a process number means a process: the boot, and the namespace of process numbers; "" if it is not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """Return when a living process began, as the kernel counts; "" if there is none. Tells it from a later one of the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def in_bytes(count: float) -> str:
    """Format bytes: 3.1 TB."""
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} EB" if count < 1e9 else f"{count:.1e} EB"


def python_command(*words: str) -> list[str]:
    """A command of this Python. It finds modules in the current directory only where this process does: `maxlm` does not, since a folder
    in which it is started, such as a downloaded run, may hold a yaml.py.
    """
    try:
        here = os.path.realpath(".")
        searched = any(os.path.realpath(entry or ".") == here for entry in sys.path)
    except OSError:  # the directory is gone
        searched = False
    return [sys.executable, *([] if searched else ["-P"]), *words]
