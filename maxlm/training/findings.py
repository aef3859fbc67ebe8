"""Findings of the checks for silent corruption: which device, on which host, how often. Kept in the run directory across attempts.

`integrity.json` holds every finding, the strikes of each device and the element by which a device may still be found.
`unhealthy_hosts.json` is for schedulers: the hosts with a device that was named, and nothing else.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jax.sharding import Mesh
from pydantic import BaseModel

from maxlm.base.atomic import write_text
from maxlm.base.paths import read_file
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.unhealthy_hosts import STRIKES
from maxlm.training.replicas import Element

log = logging.getLogger(__name__)

KEPT = 100  # findings in the file, the newest


@dataclass(frozen=True)
class DeviceName:
    """A device as a person, or a scheduler, can find it."""

    id: int
    host: str
    process: int
    local: int  # number of the device on its host
    coords: tuple[int, ...]  # in the torus; () where there is none

    @property
    def key(self) -> str:
        """Name that stays the same when the run is started again."""
        return f"{self.host}:{self.local}"

    def __str__(self) -> str:
        at = f", at {self.coords}" if self.coords else ""
        return f"device {self.id} (host {self.host}, process {self.process}, its device {self.local}{at})"


def device_names(mesh: Mesh, hosts: Sequence[str]) -> tuple[DeviceName, ...]:
    """The devices in the order of `mesh.devices.flat`. `hosts`: of each process."""
    seen: dict[str, int] = {}
    names = {}
    for device in sorted(mesh.devices.flat, key=lambda device: device.id):
        host = hosts[device.process_index]
        seen[host] = seen.get(host, -1) + 1
        coords = tuple(getattr(device, "coords", None) or ())
        names[device.id] = DeviceName(device.id, host, device.process_index, seen[host], coords)
    return tuple(names[device.id] for device in mesh.devices.flat)


@dataclass(frozen=True)
class Unsettled:
    """Copies of which one is wrong, as they were at `step`: once training has come there again, `element` says which."""

    step: int
    element: Element
    devices: tuple[str, ...] = ()  # keys, in the order of the positions


class Record(BaseModel):
    """Content of `integrity.json`."""

    findings: list[dict[str, Any]] = []
    strikes: dict[str, int] = {}  # by key of the device
    hosts: dict[str, dict[str, Any]] = {}  # hosts with a device that a finding names
    unsettled: Unsettled | None = None


class Findings:
    """All findings of a run. Every process has the same; the primary one writes them."""

    def __init__(self, record: Mapping[str, Any], run: RunDirectory) -> None:
        """`record`: what `read` returned on process 0."""
        self._run, self.record = run, Record.model_validate(record)

    def add(self, step: int, reason: str, named: Sequence[DeviceName], suspects: Sequence[DeviceName]) -> None:
        """Add a finding: a strike for each device that is `named`, none for suspects."""
        record, now = self.record, round(time.time(), 3)
        devices = {"named": [asdict(device) for device in named], "suspects": [asdict(device) for device in suspects]}
        record.findings = [*record.findings, {"time": now, "step": step, "reason": reason, **devices}][-KEPT:]
        for device in named:
            strikes = record.strikes[device.key] = record.strikes.get(device.key, 0) + 1
            host = record.hosts.setdefault(device.host, {"devices": [], "since": now, "strikes": 0})
            host["devices"] = sorted({*host["devices"], device.local})
            host |= {"strikes": max(host["strikes"], strikes), "last": now, "reason": reason}
        self.write()

    def struck_out(self, named: Sequence[DeviceName]) -> list[DeviceName]:
        """Devices among `named` on hosts that are to be replaced."""
        return [device for device in named if self.record.strikes.get(device.key, 0) >= STRIKES]

    def write(self) -> None:
        """Write both files. A failure is logged: the run goes on with what is in memory."""
        if not self._run.primary:
            return
        try:
            write_text(self._run.integrity, self.record.model_dump_json(indent=1) + "\n")
            if self.record.hosts:
                write_text(self._run.unhealthy_hosts, json.dumps({"hosts": self.record.hosts}, indent=1) + "\n")
        except OSError as error:
            log.warning("the findings cannot be written: %s", error)


def read(run: RunDirectory) -> dict[str, Any]:
    """The record of earlier attempts; {} if there is none, or none that can be read, which is logged."""
    try:
        return Record.model_validate_json(read_file(run.integrity)).model_dump(mode="json")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, and is begun anew: %s", run.integrity, error)
        return {}
