"""Run directory `run.dir`/`run.name`/ and the names of its files."""

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from maxlm.base.atomic import write_text
from maxlm.base.errors import ConfigError, setting_error
from maxlm.base.paths import check_run_name

PROFILE_PAGE = "profile.html"  # in the folder of a traced step
PROBE_BYTES = 1 << 20  # written and removed again to test the disk


class _Entry:
    """A file or folder of a run directory, as an attribute that is its path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Only the primary process writes."""

    path: Path
    primary: bool

    config = _Entry("config.yml")
    model = _Entry("model.yml")  # only of a model that was imported or averaged, and not trained here
    metrics = _Entry("metrics.jsonl")
    routing = _Entry("routing.jsonl")
    events = _Entry("events.jsonl")
    heartbeat = _Entry("heartbeat.json")
    lengths = _Entry("watchdog.json")  # of steps, saves, waits for data: the watchdog's limits follow from them
    supervisor = _Entry("supervisor.jsonl")  # the one file that the supervisor writes, and not the primary process
    alerts = _Entry("alerts.json")  # when alerts were sent, which limits their number
    log = _Entry("log.txt")
    report = _Entry("report.html")
    tensorboard = _Entry("tensorboard")
    checkpoints = _Entry("checkpoints")
    evaluations = _Entry("evaluations")
    samples = _Entry("samples.jsonl")  # texts that the model has written
    profiles = _Entry("profile")  # a folder for each traced step
    roll_backs = _Entry("roll_backs.json")  # where training went back, and the batches that were left out
    integrity = _Entry("integrity.json")  # findings of the checks for silent corruption
    unhealthy_hosts = _Entry("unhealthy_hosts.json")  # for schedulers: hosts with a device that was named there

    @classmethod
    def create(cls, dir: str | Path, name: str, *, primary: bool = True) -> "RunDirectory":
        """Check `name`; on the primary process make the folder in `dir` and check that it is writable.

        Raises ConfigError (`run.name`, `run.dir`) and leaves nothing behind. An existing run is opened unchanged.
        """
        check_run_name(name)
        run = cls(Path(dir) / name, primary)
        if primary:
            _make_writable(run.path, str(dir))
            run._clean()
        return run

    def config_until(self, step: int) -> Path:
        """The config that was replaced when the run continued from `step` with another."""
        return self.path / f"config-until-{step}.yml"

    def replaced_configs(self) -> list[int]:
        """Steps at which configs were replaced, increasing."""
        numbers = (path.stem.rpartition("-")[2] for path in self.path.glob("config-until-*.yml"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def trained_again(self, step: int) -> None:
        """Note that steps after `step` are trained again, with the present config: others were replaced at `step` at the latest."""
        newer = [self.config_until(number) for number in self.replaced_configs() if number > step]
        if newer and not self.config_until(step).exists():
            newer.pop(0).replace(self.config_until(step))
        for path in newer:
            path.unlink()

    def _clean(self) -> None:
        """Remove temporary files of a process that was killed while writing; no other process writes here now."""
        files = (self.config, self.metrics, self.routing, self.heartbeat, self.alerts, self.report)
        names = (*files, self.lengths, self.roll_backs, self.integrity, self.unhealthy_hosts)
        for temporary in [*self.path.glob(".probe-*"), *(file for path in names for file in self.path.glob(f".{path.name}.*"))]:
            temporary.unlink(missing_ok=True)

    def write_config(self, yaml_text: str) -> None:
        """Write the resolved config atomically, on the primary process. Raises OSError."""
        if self.primary:
            write_text(self.config, yaml_text)


def _make_writable(path: Path, dir: str) -> None:
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]  # deepest first
    try:
        path.mkdir(parents=True, exist_ok=True)
        _probe(path / f".probe-{os.getpid()}")
    except OSError as error:
        with contextlib.suppress(OSError):  # a folder that another process has filled meanwhile
            for folder in missing:
                folder.rmdir()
        raise unwritable(error, "run.dir", dir) from error


def _probe(path: Path) -> None:
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # a full disk may fail only here
    finally:
        path.unlink(missing_ok=True)


def unwritable(error: OSError, field: str, folder: str) -> ConfigError:
    """Error for a folder, named by the setting `field`, that cannot be written."""
    kind = setting_error(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return kind(field, folder, "is on a full disk (not even 1 MiB can be written)", f"free space or choose another {field}")
    if isinstance(error, FileExistsError | NotADirectoryError):
        return kind(field, folder, f"{error.filename} is a file, not a folder", f"choose another {field} or run.name")
    return kind(field, folder, f"cannot be written ({error.strerror or error})", f"make it writable or choose another {field}")
