"""Figures to trackio."""

import re
from typing import Annotated

from pydantic import AfterValidator

from maxlm.base import paths
from maxlm.config.capability import Capability
from maxlm.config.fields import Section, Text


def _project(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", value) or value.startswith("registry-"):  # trackio names a file by these characters
        paths.refuse("be letters, digits, `-` and `_`, 100 at most, and not start with `registry-`", "choose a name such as llama-8b")
    return value


class TrackioConfig(Section):
    """Log figures to trackio too: to its database on this machine, which `trackio show` opens, and with TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL in the environment to a server.
    """

    project: Annotated[Text, AfterValidator(_project)]
    """Name of the project in trackio."""


CAPABILITY = Capability(key="trackio", observers=("maxlm.telemetry.trackio_observer:TrackioObserver",))
