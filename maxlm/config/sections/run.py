"""Output of the run."""

from maxlm.config.capability import Capability
from maxlm.config.fields import Bool, LocalPath, Positive, Section, Text
from maxlm.config.sections.alerts import AlertsConfig
from maxlm.config.sections.profile import ProfileConfig


class RunConfig(Section):
    """Output of the run, in `dir`/`name`/."""

    name: Text = "run"  # derived: the config's file name
    dir: LocalPath = "runs"  # folder of runs
    log_every: Positive = 1  # steps between two records
    tensorboard: Bool = True  # write event files for TensorBoard
    alerts: AlertsConfig | None = None
    profile: ProfileConfig | None = None


CAPABILITY = Capability(key="run")
