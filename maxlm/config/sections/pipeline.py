"""Schedule of the pipeline over `mesh.stage`."""

from typing import Literal

from maxlm.config.capability import Capability
from maxlm.config.fields import Positive, Section


class PipelineConfig(Section):
    """Schedule of the pipeline over `mesh.stage`. Absent: 1f1b with one chunk."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # gpipe keeps activations of every microbatch
    chunks: Positive = 1  # parts of the depth that a stage computes, far apart: as many times shorter bubbles (interleaved)


CAPABILITY = Capability(key="pipeline")
