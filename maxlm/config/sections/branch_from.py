"""A run that continues another run's checkpoint."""

from maxlm.config.capability import Capability, Config, Problems
from maxlm.config.fields import LocalPath, Positive, Section


class BranchFromConfig(Section):
    """Another run's checkpoint that this run continues as if it were its own: weights, optimizer, schedule, place in the data order.

    The other run is read only, and may go on meanwhile. No effect once this run has a checkpoint of its own.
    """

    path: LocalPath  # the folder of the other run
    step: Positive  # of its checkpoint


def _problems(config: Config, branch: BranchFromConfig) -> Problems:
    """A run that continues another's checkpoint, and its decay."""
    total, decay = config.total_steps, config.decay_steps
    if branch.step >= total:
        rule = f"is not before the end of this run, step {total}, which counts the updates before the branch too"
        yield "train.branch_from.step", branch.step, rule, f"use train.steps={branch.step} plus the updates of the branch"
    if decay and total - decay < branch.step < total:
        rule = f"is after step {total - decay}, at which a decay of {decay} updates begins in a run of {total}: the rate would jump"
        fix = f"use optimizer.decay_steps={total - branch.step} at most, or an earlier checkpoint"
        yield "train.branch_from.step", branch.step, rule, fix
    rises = config.optimizer.ademamix is None or config.optimizer.ademamix.warmup_steps is None
    if config.optimizer.name == "ademamix" and rises:
        rule = "is not set, so that beta3 and alpha rise over the whole run, and a branch has another length"
        fix = "set it in the stable run and in the branch, to the same number"
        yield "optimizer.ademamix.warmup_steps", None, rule, fix
    if config.objective is not None and config.objective.kind == "dpo":
        rule = "has no reference of its own: that of objective.kind = dpo is the model which a run starts from"
        yield "train.branch_from", "set", rule, "use train.start_from"


CAPABILITY = Capability(key="train.branch_from", rules=(_problems,))
