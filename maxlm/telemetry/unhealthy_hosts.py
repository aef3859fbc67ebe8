"""Hosts with a device that was found to hold or compute wrong bits, as a run directory names them to schedulers and to later starts."""

import json

from maxlm.base.paths import read_file
from maxlm.telemetry.run_dir import RunDirectory

STRIKES = 2  # findings that name one device, after which its host is to be replaced


def to_replace(run: RunDirectory) -> dict[str, str]:
    """Host -> why it is to be replaced, by `unhealthy_hosts.json`; {} if there is none, or none that can be read."""
    try:
        hosts = json.loads(read_file(run.unhealthy_hosts))["hosts"]
        return {
            str(host): f"{run.unhealthy_hosts} marks host {host} as unhealthy ({mark['strikes']} findings; {mark['reason']})"
            for host, mark in hosts.items()
            if mark["strikes"] >= STRIKES
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
