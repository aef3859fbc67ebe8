"""`maxlm average`: the mean of a run's last checkpoints, as a folder like an imported model's (arXiv 1803.05407)."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from maxlm.base.errors import quoted
from maxlm.checkpoint import Checkpoints
from maxlm.config import UserError
from maxlm.config.choices import part
from maxlm.config.loader import saved_text
from maxlm.config.schema import CheckpointConfig
from maxlm.interop.importing import MODEL, write_model
from maxlm.interop.new_folder import new_folder
from maxlm.interop.weights import Step, nested
from maxlm.models import abstract_model_state, abstract_parameters, count_parameters
from maxlm.models.adapters import leaf, put, stored
from maxlm.models.parameters import Parameters
from maxlm.training.saved_run import CHECKPOINTS, CONFIG, PUBLISHED, TOKENIZER, SavedRun, open_run


class Averaged(NamedTuple):
    """Result of an average: the steps of its checkpoints."""

    steps: list[int]
    parameters: int


def average(run: Path, out: Path, last: int, steps: Sequence[int], kind: str, progress: Step) -> Averaged:
    """Average the `last` checkpoints of `run`, or the checkpoints of `steps`, into the new folder `out`, under the newest one's step.

    All parameters are averaged with equal weights, in float64; biases of experts' routers, which go with them, as well. The host holds one
    copy of the mean, and one array's sum and checkpoint. Raises UserError if checkpoints are missing or damaged; then
    nothing is left.
    """
    saved = open_run(run)
    saved.check_kind(kind)
    chosen = _chosen(saved, last, steps)
    with new_folder(out) as made:
        config = saved.config  # without the settings that made its checkpoints: its start, its objective, and its recipe of a store
        train = config.train.model_copy(update={"start_from": None, "branch_from": None})
        data = config.data.model_copy(update={"prepare": None})
        optimizer = config.optimizer.model_copy(update={"state": None})
        if part("optimizer", optimizer.name).stored:  # its checkpoints hold another point than the weights
            optimizer = optimizer.model_copy(update={"name": "adamw"})
        without: dict[str, Any] = {"objective": None, "ema": None, "checkpoint": CheckpointConfig()}
        config = config.model_copy(update={"train": train, "data": data, "optimizer": optimizer, **without})
        (made / CONFIG).write_text(saved_text(config), encoding="utf-8")
        open_run(made)  # before the work: a folder that cannot be opened is useless
        state = _mean(saved, chosen, kind, progress)
        checkpoints = Checkpoints(made / CHECKPOINTS, config.checkpoint, {"mean of steps": ", ".join(map(str, chosen))})
        checkpoints.save(chosen[-1], state, {})
        checkpoints.close()
        said = f"The mean of checkpoints of {quoted(run.resolve().name)}: {', '.join(map(str, chosen))}, by `maxlm average`"
        model = config.model.model_dump(mode="json", exclude_none=True)
        write_model(made / MODEL, model, said, count_parameters(config.model))
        for name in (TOKENIZER, PUBLISHED):
            if (run / name).is_dir():
                shutil.copytree(run / name, made / name)
    return Averaged(chosen, count_parameters(config.model))


def _chosen(saved: SavedRun, last: int, steps: Sequence[int]) -> list[int]:
    """The steps to average, oldest first."""
    present = saved.checkpoints.steps() if steps else saved.steps()
    there = f"{saved.checkpoints.directory} holds {', '.join(map(str, present)) or 'none'}"
    if steps:
        if missing := [step for step in steps if step not in present]:
            raise UserError(f"--steps: there is no checkpoint {missing[0]}: {there}.")
        chosen = sorted(set(steps))
        if len(chosen) < max(2, len(steps)):
            raise UserError(f"--steps {','.join(map(str, steps))}: name two or more checkpoints, each once.")
        return chosen
    if last > len(present):
        raise UserError(f"--last {last} asks for more checkpoints than there are: {there}; ask for fewer, or raise checkpoint.keep.")
    return present[-last:]


def _mean(saved: SavedRun, steps: list[int], kind: str, progress: Step) -> dict[str, Parameters]:
    model, here = saved.config.model, SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = {"params": abstract_parameters(model), "model_state": abstract_model_state(model)}
    places = list(stored(model))
    size, done = 4 * sum(leaf(shapes[entry], name).size for entry, name in places) * len(steps), 0
    state: dict[str, Parameters] = {"params": {}, "model_state": {}}
    for entry, name in places:
        shape = leaf(shapes[entry], name)
        wanted = {entry: nested(name, jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here))}
        total = np.zeros(shape.shape, np.float64)
        for step in steps:
            restored = saved.restore(wanted, step, kind)
            total += np.asarray(leaf({"params": restored.params, "model_state": restored.model_state}[entry], name))
            done += 4 * shape.size
            progress(done, size)
        total /= len(steps)
        put(state[entry], name, jax.device_put(total.astype(np.float32), here))
    return state
