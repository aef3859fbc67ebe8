"""Schedule of the pipeline over `mesh.stage`."""

from typing import Literal

from maxlm.config.capability import Capability
from maxlm.config.fields import Positive, Section


class PipelineConfig(Section):
    """Schedule of the pipeline over `mesh.stage`. Absent: 1f1b with one chunk."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of forward and backward passes of the microbatches. 1f1b: a stage alternates between them, and holds activations of a few
    microbatches (arXiv 2104.04473); gpipe: all forward passes first, with the activations of every microbatch (arXiv 1811.06965).
    """
    chunks: Positive = 1
    """Parts of the depth that each stage computes, far apart (interleaved schedule, arXiv 2104.04473); bubbles are shorter by this factor.
    Unit: parts.
    """


CAPABILITY = Capability(key="pipeline")
