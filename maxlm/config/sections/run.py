"""Output of the run."""

from maxlm.config.capability import Capability
from maxlm.config.fields import Bool, LocalPath, Positive, Section, Text
from maxlm.config.sections.alerts import AlertsConfig
from maxlm.config.sections.profile import ProfileConfig


class RunConfig(Section):
    """Output of the run, in `dir`/`name`/."""

    name: Text = "run"
    """Name of the run, and of its folder in `dir`. Default: the file name of the config."""
    dir: LocalPath = "runs"
    """Folder that holds the folders of runs."""
    log_every: Positive = 1
    """Updates between two records of metrics. Unit: updates."""
    tensorboard: Bool = True
    """Write event files for TensorBoard into the folder of the run."""
    alerts: AlertsConfig | None = None
    """Alerts for a person by a command or a webhook; null: none are sent."""
    profile: ProfileConfig | None = None
    """Traces of a few steps of the run, each reduced to a page in `profile/` of its folder; null: none are taken."""


CAPABILITY = Capability(key="run")
