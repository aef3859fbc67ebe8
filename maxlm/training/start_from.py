"""Begin from another run: with its parameters, or an imported model's (`train.start_from`), or where it was (`train.branch_from`).

A branch begins with the whole state of another run at one of its checkpoints, and its place in the data order. So several decays can follow
one stable phase (WSD, arXiv 2404.06395), and each equals, bit for bit, the run that had that decay from the beginning. The other run is
read only.
"""

import hashlib
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.base.errors import ConfigError
from maxlm.base.paths import PYTHON
from maxlm.base.transient import first_line, is_storage_error, retried
from maxlm.checkpoint import Checkpoints, manifest
from maxlm.checkpoint.errors import DamagedError, UnreachableError
from maxlm.config import UserError
from maxlm.config.fields import flatten
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.branch_from import BranchFromConfig
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.sections.start_from import StartFromConfig
from maxlm.data.tokenizer import Tokenizer, open_tokenizer
from maxlm.models import (
    Parameters,
    abstract_model_state,
    abstract_parameters,
    init_parameters,
    model_state_specs,
    parameter_axes,
    parameter_specs,
)
from maxlm.models.adapters import frozen
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.opening import FirstState
from maxlm.training.optimizer import learning_rate
from maxlm.training.program import Program
from maxlm.training.rollback import Journal
from maxlm.training.saved_run import CONFIG, SavedRun, open_run
from maxlm.training.session import BRANCH, Init, Start
from maxlm.training.step import TrainState

FIELD, BRANCH_FIELD = "train.start_from.path", "train.branch_from.path"
_log = logging.getLogger(__name__)
# Settings of the model that may differ: positions, and what only training reads. A rotary share says which weights are which.
FREE = ("rope.", "rope_local", "init_std", "mtp.loss_weight", "vocab_size")
BIASES = "moe.router.bias_rate"
FREE_ROUTER = tuple(f"moe.router.{name}" for name in ("capacity", "jitter", "balance_loss", "balance_over", "z_loss"))


class StartFrom(FirstState):
    """Begin with the parameters of `train.start_from`."""

    setting = "train.start_from"

    def __init__(self, source: StartFromConfig) -> None:
        self._source, self.reads = source, f"the parameters of {source.path}"

    @classmethod
    def from_config(cls, source: StartFromConfig, train_branch_from: object) -> Self | None:
        """None for a run that branches off: the other run began from these parameters."""
        return cls(source) if train_branch_from is None else None

    def fingerprint(self) -> str:
        return fingerprint(self._source)

    def init(self, program: Program, identity: dict[str, str]) -> Init:
        store = program.config.data.stores[0]
        return partial(begin_from, program, self._source, None if store.startswith(PYTHON) else open_tokenizer(store))


def begin_from(program: Program, source: StartFromConfig, tokenizer: Tokenizer | None) -> TrainState:
    """The first state of `program` with the parameters of `source`, a fresh optimizer and schedule. With `model.lora` they are frozen.

    The vocabulary may be larger than the source's: new rows are drawn as for a fresh model. Raises UserError naming each setting of the
    model that differs otherwise, or a token that has another id in `tokenizer`, the data's, or if there is no such checkpoint.
    """
    saved, model = opened(source), program.config.model.merged
    saved.check_kind(source.weights)
    other = saved.config.model
    if differing := differences(other, model):
        raise UserError(f"{FIELD} = {source.path}: its model is another one: {', '.join(differing[:5])}.")
    if tokenizer is not None and saved.tokenizer is not None:
        _check_tokens(source.path, saved.tokenizer, tokenizer)
    grown = other.vocab_size != model.vocab_size
    if grown and program.config.model.lora is not None:
        rule = f"is above the vocab_size of {source.path}, {other.vocab_size}, and model.lora would freeze the new rows as they are drawn"
        raise ConfigError("model.vocab_size", model.vocab_size, rule, f"use {other.vocab_size}, or train without model.lora first")
    wanted = _wanted(program, saved, model)
    restored = saved.restore(wanted, source.step, source.weights)
    params = _grown(program, restored.params) if grown else restored.params
    if program.config.model.lora is None:
        return program.begin_with(params, restored.model_state)
    config, shardings = program.config, program.state_shardings.params
    with jax.set_mesh(program.mesh):
        adapters: Parameters = jax.jit(partial(init_parameters, config.model, config.train.seed), out_shardings=shardings)()
    return program.begin_with(adapters, frozen(program.config.model, params, restored.model_state))


def _wanted(program: Program, saved: SavedRun, model: ModelConfig) -> dict[str, Any]:
    """Shapes of the source with the shardings of the model; tables of a vocabulary that grows are whole. What the first state has in host
    memory is read to there, unless it is computed from what the source has saved.
    """
    source, mesh = saved.config.model, program.mesh
    whole, grown = NamedSharding(mesh, PartitionSpec()), source.vocab_size != model.vocab_size

    def wanted(shape: Any, sharding: NamedSharding, axes: tuple[str, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole if grown and "vocab" in axes else sharding)

    direct = saved.holds_parameters and program.config.model.lora is None
    places = program.state_shardings.params if direct else _shardings(parameter_specs(model, mesh), mesh)
    states = _shardings(model_state_specs(model, mesh), mesh)
    params = jax.tree.map(wanted, abstract_parameters(source), places, parameter_axes(model))
    return {"params": params, "model_state": jax.tree.map(wanted, abstract_model_state(source), states)}


def _shardings(specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def _check_tokens(path: str, theirs: Tokenizer, ours: Tokenizer) -> None:
    """Raise UserError unless every token of the source has the same id in the data."""
    ids = ours.ids
    if moved := next((token for token, number in theirs.ids.items() if ids.get(token) != number), None):
        rule = f"has another tokenizer than the data: {moved!r} is token {theirs.ids[moved]} there and {ids.get(moved, 'none')} here"
        raise ConfigError(FIELD, path, rule, f"prepare the data with data.prepare.tokenizer.path={path}/tokenizer/tokenizer.json")


def differences(source: ModelConfig, model: ModelConfig) -> list[str]:
    """Settings in which the models differ and may not, with both values."""
    theirs, mine = (dict(flatten(one.model_dump(mode="json"))) for one in (source, model))
    balanced = (BIASES,) if theirs.get(BIASES) and mine.get(BIASES) else ()  # a rate of 0 has no biases
    free = (*FREE, *FREE_ROUTER, *balanced)
    changed = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
    keys = [key for key in changed if not key.startswith(free) or key.endswith(".share")]
    smaller = ["vocab_size"] if model.vocab_size < source.vocab_size else []
    return [f"model.{key} is {theirs.get(key)} there and {mine.get(key)} here" for key in [*smaller, *keys]]


def _grown(program: Program, params: Any) -> Any:
    """`params` with the rows that their tables of the vocabulary lack, drawn as for a fresh model."""
    config = program.config
    first = len(params["embedding_VD"])
    _log.info("rows %d to %d of the vocabulary are drawn: the source has none", first, config.model.vocab_size - 1)

    model, mesh = config.model.merged, program.mesh
    leaves, structure = jax.tree.flatten(params)
    wanted = jax.tree.leaves(abstract_parameters(model))
    short = [number for number, (leaf, whole) in enumerate(zip(leaves, wanted, strict=True)) if leaf.shape != whole.shape]
    shardings = jax.tree.leaves(_shardings(parameter_specs(model, mesh), mesh))

    def join(tables: list[jax.Array]) -> list[jax.Array]:
        fresh = jax.tree.leaves(init_parameters(model, config.train.seed))
        return [jnp.concatenate([old, fresh[number][len(old) :]]) for number, old in zip(short, tables, strict=True)]

    with jax.set_mesh(mesh):
        joined = jax.jit(join, out_shardings=[shardings[number] for number in short])([leaves[number] for number in short])
    for number, table in zip(short, joined, strict=True):
        leaves[number] = table
    return jax.tree.unflatten(structure, leaves)


def fingerprint(source: StartFromConfig | BranchFromConfig) -> str:
    """Digest of what this host sees of `source`: the config, and all digests of the checkpoint. It waits for no other process.

    Raises UserError if there is no such checkpoint here; UnreachableError if it cannot be read now.
    """
    saved = opened(source)
    checkpoints = saved.checkpoints
    steps = checkpoints.steps()
    chosen = saved.steps() if source.step is None else [step for step in steps if step == source.step]
    if not chosen:
        asked = f" {source.step}" if source.step is not None else " that it would continue from itself" if steps else ""
        has = f" (there are: {', '.join(map(str, steps))})" if steps else ""
        newest = ", or leave train.start_from.step out" if _field(source) == FIELD else ""
        raise ConfigError(_field(source), source.path, f"has no checkpoint{asked}{has}", f"name a step that it has{newest}")
    folder = checkpoints.directory / str(chosen[-1])
    try:
        written = retried(lambda: manifest.read(folder), f"reading {folder}").to_text()
    except DamagedError as error:
        written = str(error)  # which one is read instead is agreed on later
    except Exception as error:
        if not is_storage_error(error):
            raise
        raise UnreachableError(f"{folder} cannot be read: {first_line(error)}; try again when the cause is gone.") from error
    return hashlib.sha256((saved.directory / CONFIG).read_bytes() + written.encode()).hexdigest()[:12]


def opened(source: StartFromConfig | BranchFromConfig) -> SavedRun:
    """The run that `source` names. Raises ConfigError if there is none."""
    if not (Path(source.path) / CONFIG).is_file():
        made = ", or one that `maxlm import` has made" if _field(source) == FIELD else ""
        raise ConfigError(_field(source), source.path, "holds no config.yml", f"name the folder of a run{made}")
    return open_run(Path(source.path))


def _field(source: StartFromConfig | BranchFromConfig) -> str:
    return FIELD if isinstance(source, StartFromConfig) else BRANCH_FIELD


# Branches.


class BranchOff(FirstState):
    """Begin where the run of `train.branch_from` was."""

    setting = "train.branch_from"

    def __init__(self, source: BranchFromConfig) -> None:
        self._source, self.reads = source, f"step {source.step:,} of {source.path}"

    @classmethod
    def from_config(cls, source: BranchFromConfig) -> Self:
        return cls(source)

    def fingerprint(self) -> str:
        return fingerprint(self._source)

    def init(self, program: Program, identity: dict[str, str]) -> Init:
        return partial(branch_off, program, self._source, identity)

    def check_start(self, start: Start) -> None:
        check_same_branch(self._source, start)


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
    updates = source.step - int(jax.device_get(restored.state.skipped))
    old, new = (float(learning_rate(one)(updates)) for one in (saved.trained, program.config))
    _check_rate(saved.trained.optimizer, program.config.optimizer, old, new)
    data = {"seconds": round(time.monotonic() - began, 3), "passed_over": [], "source": BRANCH, "branch_of": source.path}
    return Start(program.placement.adopt(restored.state), restored.step, data, restored.data_position)


def _check_rate(before: OptimizerConfig, now: OptimizerConfig, old: float, new: float) -> None:
    """Raise ConfigError if a schedule that falls from the beginning, such as a cosine, would have fallen from the `old` rate to the `new`
    since the beginning of a run that had another schedule.
    """
    if now.decays_throughout and now.schedule != before.schedule and new < old and now.peak_lr == before.peak_lr:
        rule = f"decays from the beginning of the run that is branched off, and the rate would fall from {old:.3g} to {new:.3g} at once"
        raise ConfigError("optimizer.schedule", now.schedule, rule, "use wsd, which decays over optimizer.decay_steps, or constant")


def check_same_branch(source: BranchFromConfig, start: Start) -> None:
    """Raise ConfigError if a run that goes on from its own checkpoint is asked to branch off where it has not."""
    if start.restored is None or start.branched:
        return
    began = start.position.get(BRANCH)
    if began != source.step:
        rule = "is not where this run began: " + ("it is no branch" if began is None else f"it branched off at step {began}")
        raise ConfigError("train.branch_from.step", source.step, rule, "use another run.name")
