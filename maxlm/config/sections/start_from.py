"""A run that begins with the parameters of another run, or of an imported model."""

from maxlm.config.capability import Capability
from maxlm.config.fields import Count, LocalPath, Section


class StartFromConfig(Section):
    """Parameters to begin with, from a run or an imported model; the optimizer and the schedule begin anew."""

    path: LocalPath
    """Folder of the run or of the imported model."""
    step: Count | None = None
    """Step of the checkpoint that is read; null: the newest. Unit: updates."""
    weights: str = "raw"
    """Weights that are read. raw: the parameters; or the name of an average of them that the run keeps, such as ema."""


CAPABILITY = Capability(key="train.start_from", opening=("maxlm.training.start_from:StartFrom",))
