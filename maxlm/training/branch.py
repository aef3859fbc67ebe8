"""Branch off another run: begin as it was at one of its checkpoints, with its whole state and its place in the data order.

So several decays can follow one stable phase (WSD, arXiv 2404.06395), and each equals, bit for bit, the run that had that decay from the
beginning. The other run is read only.
"""

import time

import jax

from maxlm.checkpoint import Checkpoints
from maxlm.config.errors import ConfigError
from maxlm.config.schema import Config
from maxlm.config.sections.branch_from import BranchFromConfig
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.optimizer import learning_rate
from maxlm.training.program import Program
from maxlm.training.rollback import Journal
from maxlm.training.session import BRANCH, Start
from maxlm.training.start_from import opened


def branch_off(program: Program, source: BranchFromConfig, identity: dict[str, str]) -> Start:
    """Start where the run `source` was after update `source.step`, on the mesh of `program`. `identity`: what its checkpoint must share.

    Raises UserError: there is no such checkpoint, it is damaged or of another experiment, or that run has gone back behind it.
    """
    began, saved = time.monotonic(), opened(source)
    checkpoints = Checkpoints(saved.checkpoints.directory, saved.trained.checkpoint, identity)
    journal = Journal(RunDirectory(saved.directory, primary=False).roll_backs, primary=jax.process_index() == 0)
    unfit = journal.unfit(checkpoints, healthy_only=program.config.health is not None)
    if source.step in unfit:
        fit = [step for step in checkpoints.steps() if step not in unfit]
        fix = f"use {' or '.join(map(str, fit[-3:]))}" if fit else "wait for a later checkpoint"
        raise ConfigError("train.branch_from.step", source.step, f"is no checkpoint to continue: {unfit[source.step]}", fix)
    restored = checkpoints.restore(program.abstract_state, source.step)
    _check_rate(program.config, saved.trained, source.step - int(jax.device_get(restored.state.skipped)))
    data = {"seconds": round(time.monotonic() - began, 3), "passed_over": [], "source": BRANCH, "branch_of": source.path}
    return Start(program.adopt(restored.state), restored.step, data, restored.data_position)


def _check_rate(config: Config, before: Config, updates: int) -> None:
    """Raise ConfigError if a cosine would have fallen since the beginning of a run that had another schedule."""
    if config.optimizer.schedule != "cosine" or before.optimizer.schedule == "cosine":
        return
    old, new = (float(learning_rate(one)(updates)) for one in (before, config))
    if new < old and config.optimizer.peak_lr == before.optimizer.peak_lr:
        rule = f"decays from the beginning of the run that is branched off, whose rate of {old:.3g} would fall to {new:.3g} at once"
        raise ConfigError("optimizer.schedule", "cosine", rule, "use wsd, which decays over optimizer.decay_steps, or constant")


def check_same_branch(source: BranchFromConfig | None, start: Start) -> None:
    """Raise ConfigError if a run that goes on from its own checkpoint is asked to branch off where it has not."""
    if source is None or start.restored is None or start.branched:
        return
    began = start.position.get(BRANCH)
    if began != source.step:
        rule = "is not where this run began: " + ("it is no branch" if began is None else f"it branched off at step {began}")
        raise ConfigError("train.branch_from.step", source.step, rule, "use another run.name")
