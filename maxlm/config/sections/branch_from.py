"""A run that continues another run's checkpoint."""

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import LocalPath, Positive, Section
from maxlm.config.part import ObjectiveFacts


class BranchFromConfig(Section):
    """Another run's checkpoint that this run continues as if it were its own: weights, optimizer, schedule, place in the data order.

    The other run is read only, and may go on meanwhile. No effect once this run has a checkpoint of its own.
    """

    path: LocalPath
    """Folder of the run that is continued."""
    step: Positive
    """Step of the checkpoint at which this run branches off. Unit: updates."""


def _problems(
    branch: BranchFromConfig, total_steps: int, decay_steps: int, objective_kind: str | None, objective_facts: ObjectiveFacts
) -> Problems:
    """A run that continues another's checkpoint, and its decay."""
    if branch.step >= total_steps:
        rule = f"is not before the end of this run, step {total_steps}, which counts the updates before the branch too"
        yield "train.branch_from.step", branch.step, rule, f"use train.steps={branch.step} plus the updates of the branch"
    if decay_steps and total_steps - decay_steps < branch.step < total_steps:
        rule = f"is after step {total_steps - decay_steps}, at which a decay of {decay_steps} updates begins in a run of {total_steps}"
        rule += ": the rate would jump"
        fix = f"use optimizer.decay_steps={total_steps - branch.step} at most, or an earlier checkpoint"
        yield "train.branch_from.step", branch.step, rule, fix
    if objective_facts.reference:
        rule = f"names no reference model: with objective.kind = {objective_kind} the reference is the model which a run starts from"
        yield "train.branch_from", "set", rule, "use train.start_from"


CAPABILITY = Capability(key="train.branch_from", rules=(_problems,), opening=("maxlm.training.start_from:BranchOff",))
