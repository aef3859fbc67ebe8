"""Going on without hosts that stay away."""

from typing import Annotated

from pydantic import Field, Strict

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import PositiveFloat, Section
from maxlm.config.sections.mesh import MeshConfig


class ElasticConfig(Section):
    """Going on without hosts that stay away, on a smaller mesh at the same global batch, until they return."""

    min_hosts: Annotated[int, Strict(), Field(ge=1, le=15_000)]
    """Fewest hosts that the run goes on with; it never goes on with fewer than half of the configured hosts, or with just half of them
    without process 0. Unit: hosts.
    """
    wait_s: PositiveFloat = 300.0
    """Time for which absent hosts are waited for before the run goes on without them. Unit: seconds."""
    grow_after_s: PositiveFloat = 600.0
    """Time for which a smaller run is left alone before hosts that came back may join it. Unit: seconds."""


def _problems(elastic: ElasticConfig, model_balances_microbatches: bool, mesh: MeshConfig) -> Problems:
    """Settings that would change the losses, or leave no smaller mesh, when hosts are lost."""
    if model_balances_microbatches:
        rule = "is a loss of a whole microbatch, and with elastic there are more and smaller ones while hosts are absent"
        yield "model.moe.router.balance_over", "batch", rule, "use sequence, or remove elastic"
    if mesh.slices > 1 and mesh.across_slices == "stage":
        rule = "leaves no part of the model to do without, so the loss of a slice ends the run as without elastic"
        yield "mesh.across_slices", "stage", rule, "use data or fsdp, or remove elastic"


CAPABILITY = Capability(key="elastic", rules=(_problems,))
