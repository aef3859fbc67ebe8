"""Figures for Prometheus."""

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field, Strict

from maxlm.base import paths
from maxlm.config.capability import Capability
from maxlm.config.fields import Section, Text


def _ip_address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        paths.refuse("be an IP address of this machine", "use 127.0.0.1 for programs on this machine, or 0.0.0.0 for all that reach it")


class PrometheusConfig(Section):
    """Figures, events and the ledger of the run at http://HOST:PORT/metrics of process 0, for Prometheus."""

    port: Annotated[int, Strict(), Field(ge=1, le=65535)]
    """Port at which process 0 serves the metrics. Unit: port number."""
    host: Annotated[Text, AfterValidator(_ip_address)] = "127.0.0.1"
    """IP address at which process 0 serves the metrics, without a password; 0.0.0.0: on all networks of the machine."""


CAPABILITY = Capability(key="prometheus", observers=("maxlm.telemetry.prometheus:PrometheusObserver",))
