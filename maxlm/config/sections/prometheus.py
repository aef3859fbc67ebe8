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

    port: Annotated[int, Strict(), Field(ge=1, le=65535)]  # port to listen at
    host: Annotated[Text, AfterValidator(_ip_address)] = "127.0.0.1"  # address to listen at; there is no password


CAPABILITY = Capability(key="prometheus", observers=("maxlm.telemetry.prometheus:PrometheusObserver",))
