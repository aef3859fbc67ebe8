"""Sections about runs that look after themselves: trouble in training, hangs, copies in memory, lost hosts, wrong bits, alerts."""

import ipaddress
import itertools
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from maxlm.config import paths
from maxlm.config.fields import AtLeastOne, Bool, Count, Float, LocalPath, Positive, PositiveFloat, Section, Text


def _variable(value: str) -> str:
    """The name of an environment variable. Not shown where it is none, since it may be the secret itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", value):
        rule = "be the name of an environment variable, not the address itself, which config.yml and the report would show"
        fix = "write `export ALERTS_URL=https://...` where the run is started, and ALERTS_URL here"
        raise PydanticCustomError("setting", "must {rule}", {"rule": rule, "fix": fix, "hidden": True})
    return value


def _ip_address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        paths.refuse("be an IP address of this machine", "use 127.0.0.1 for programs on this machine, or 0.0.0.0 for all that reach it")


class AlertsConfig(Section):
    """Alerts for a person: a JSON object on the standard input of `command`, or sent to a webhook by POST. At least one is set."""

    command: tuple[Text, ...] = ()  # a program and its arguments; no shell reads them
    webhook: Annotated[Text, AfterValidator(_variable)] | None = None  # environment variable with the address, which is a secret
    per_hour: Positive = 6  # alerts of one cause at most; the others are counted

    @model_validator(mode="after")
    def _goes_somewhere(self) -> "AlertsConfig":
        if not self.command and self.webhook is None:
            paths.refuse("set command or webhook", "give one of them, or remove the section")
        return self


class ProfileConfig(Section):
    """Traces of a few steps of the run, each reduced to a page in `profile/` of its folder (docs/profile.md)."""

    at: Annotated[tuple[Positive, ...], Field(min_length=1)] = (100,)  # updates done before the first step of each trace
    steps: Annotated[int, Strict(), Field(ge=1, le=100)] = 3  # of a trace

    @model_validator(mode="after")
    def _apart(self) -> "ProfileConfig":
        if any(later - earlier <= self.steps for earlier, later in itertools.pairwise(self.at)):
            paths.refuse(
                f"name steps in increasing order, more than {self.steps} (steps of a trace) apart", "change `at`, or lower `steps`"
            )
        return self


class HealthConfig(Section):
    """Answers to trouble in training (docs/health.md). Absent: alarms, and exit code 4 where a run is beyond repair.

    Batches that a roll back leaves out are part of the data order: in every later checkpoint, and in `roll_backs.json` of the run.
    """

    # A loss or gradient norm `spreads` deviations above its recent median. skip: a single update at twice that is not applied; roll_back:
    # after `spike_steps` in a row, or when the loss has long been bad, training goes back before them, and leaves their batches out.
    spike: Literal["warn", "skip", "roll_back"] = "warn"
    not_finite: Literal["skip", "roll_back"] = "skip"  # such an update is never applied; roll_back: after ten in a row
    # A sudden change of the update/weight ratio or the gradient of a layer. None: these figures are not computed.
    layers: Literal["warn", "roll_back"] | None = None
    activations_every: Count = 100  # with `layers`: updates between two looks at activations, attention and weights; 0: none
    spreads: AtLeastOne = 8.0
    spike_steps: Annotated[int, Strict(), Field(ge=1, le=100)] = 5
    roll_backs: Count = 10  # in a run; one more ends it with exit code 4
    recent_roll_backs: Count = 3  # and in `recent_steps` steps
    recent_steps: Positive = 1000
    leave_out: tuple[Count, ...] = ()  # numbers of batches, from 0, that are not trained on


class MemoryCheckpointsConfig(Section):
    """Copies of the state in the memory of the hosts, which outlive a crash of the trainer."""

    every_steps: Positive | None = None  # None: by Daly's formula, from measured times and `mtbf_hours`
    folder: LocalPath = "/dev/shm"  # noqa: S108 -- of each host; a folder of its local disk outlives a reboot, too
    peer: Bool = True  # where there are several hosts: each one's copy is also in the memory of one in another failure domain
    # Failure domain of each process, such as its rack. None: slices, where there are several, else hosts.
    domains: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    # Mean time between failures of one host. Llama 3 (arXiv 2407.21783, 3.3.4): 466 interruptions in 54 days of 16,384 GPUs, 8 a host.
    mtbf_hours: PositiveFloat = 5700.0


class IntegrityConfig(Section):
    """Checks for silent corruption by a device. Copies of the state are compared before every save, too."""

    every_steps: Positive = 100  # between two comparisons of the copies of parameters and optimizer state
    replay_every: Positive | None = None  # steps after which devices repeat each other's work; None: never
    repeat_every: Positive | None = None  # steps after which an update is computed twice, from a copy of the state; None: never


class WatchdogConfig(Section):
    """Seconds without progress after which a run counts as hung: it shows where, ends with 5, and `maxlm launch` starts it again.

    Time in which the process did not run counts for nothing. None: learned from the run (docs/watchdog.md).
    """

    enabled: Bool = True
    step_seconds: PositiveFloat | None = None  # at least, for a step
    step_factor: AtLeastOne = 20.0  # or so many times the 99th percentile of step times, if that is longer
    data_seconds: PositiveFloat | None = None  # for a batch
    save_seconds: PositiveFloat | None = None  # for a save, also in the background
    eval_seconds: PositiveFloat | None = None  # between two batches of an evaluation
    startup_seconds: PositiveFloat = 7200.0  # compilation, up to the end of the first step; a restore at most
    interpreter_seconds: PositiveFloat = 300.0  # in which no Python thread runs, because C code holds the interpreter's lock
    slow_share: Annotated[Float, Field(gt=0, lt=1)] = 0.2  # of a step's time by which a host that is named as slow is behind the others


class PrometheusConfig(Section):
    """Figures, events and the ledger of the run at http://HOST:PORT/metrics of process 0, for Prometheus."""

    port: Annotated[int, Strict(), Field(ge=1, le=65535)]
    host: Annotated[Text, AfterValidator(_ip_address)] = "127.0.0.1"  # address to listen at; there is no password


class ElasticConfig(Section):
    """Going on without hosts that stay away, on a smaller mesh at the same global batch, until they return."""

    # Fewer never go on; nor do fewer than half of the configured hosts, or half of them without process 0.
    min_hosts: Annotated[int, Strict(), Field(ge=1, le=15_000)]
    wait_s: PositiveFloat = 300.0  # that hosts are waited for
    grow_after_s: PositiveFloat = 600.0  # that a smaller run is left alone before hosts that came back may join it
