"""Alerts for a person."""

import re
from typing import Annotated

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from maxlm.base import paths
from maxlm.config.capability import Capability
from maxlm.config.fields import Positive, Section, Text


def _variable(value: str) -> str:
    """The name of an environment variable. Not shown where it is none, since it may be the secret itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", value):
        rule = "be the name of an environment variable, not the address itself, which config.yml and the report would show"
        fix = "write `export ALERTS_URL=https://...` where the run is started, and ALERTS_URL here"
        raise PydanticCustomError("setting", "must {rule}", {"rule": rule, "fix": fix, "hidden": True})
    return value


class AlertsConfig(Section):
    """Alerts for a person: a JSON object on the standard input of `command`, or sent to a webhook by POST. At least one is set."""

    command: tuple[Text, ...] = ()
    """Program and its arguments, which gets each alert as a JSON object on its standard input; no shell reads them. Empty: no command."""
    webhook: Annotated[Text, AfterValidator(_variable)] | None = None
    """Name of the environment variable that holds the address of the webhook, which is a secret; null: no webhook."""
    per_hour: Positive = 6
    """Most alerts of one cause; further ones are only counted. Unit: alerts an hour."""

    @model_validator(mode="after")
    def _goes_somewhere(self) -> "AlertsConfig":
        if not self.command and self.webhook is None:
            paths.refuse("set command or webhook", "give one of them, or remove the section")
        return self


CAPABILITY = Capability(key="run.alerts", observers=("maxlm.telemetry.alerts:AlertObserver",))
