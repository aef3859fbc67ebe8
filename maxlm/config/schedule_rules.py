"""Rules of `train.branch_from`."""

from collections.abc import Iterator

from maxlm.config.errors import Problem
from maxlm.config.schema import Config


def problems(config: Config) -> Iterator[Problem]:
    """Settings of these sections that contradict the others."""
    yield from _branch(config)


def _branch(config: Config) -> Iterator[Problem]:
    """A run that continues another's checkpoint, and its decay."""
    branch, total = config.train.branch_from, config.total_steps
    if branch is None:
        return
    if branch.step >= total:
        rule = f"is not before the end of this run, step {total}, which counts the updates before the branch too"
        yield "train.branch_from.step", branch.step, rule, f"use train.steps={branch.step} plus the updates of the branch"
    decay = config.decay_steps
    if decay and total - decay < branch.step < total:
        rule = f"is after step {total - decay}, at which a decay of {decay} updates begins in a run of {total}: the rate would jump"
        fix = f"use optimizer.decay_steps={total - branch.step} at most, or an earlier checkpoint"
        yield "train.branch_from.step", branch.step, rule, fix
    if config.objective is not None and config.objective.kind == "dpo":
        rule = "has no reference of its own: that of objective.kind = dpo is the model which a run starts from"
        yield "train.branch_from", "set", rule, "use train.start_from"
