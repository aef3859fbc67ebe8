"""The tasks of a run's `evaluation` section, on the training mesh; only generation copies the weights, for the time of its task."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from maxlm.base.errors import UserError
from maxlm.cluster import agree
from maxlm.config.schema import Config
from maxlm.data.stops import turn_ends
from maxlm.data.tokenizer import started_tokenizer
from maxlm.evaluation.language_model import LanguageModel
from maxlm.evaluation.results import Result, write_result
from maxlm.evaluation.run_task import rehearse, run_task
from maxlm.evaluation.scoring import Scorer
from maxlm.evaluation.task import Task, find_tasks
from maxlm.training.fits import Part, explain_out_of_memory, least
from maxlm.training.saved_run import TOKENIZER, source_tokenizer
from maxlm.training.step import TrainState

FEWER = "a task that generates copies the weights: leave it to `maxlm eval`, or split the weights over more devices with mesh.fsdp"


class TrainingTasks:
    """Runs tasks on the state of a training step. `folder`: where the primary process writes results; None on the others."""

    def __init__(self, config: Config, mesh: Mesh, folder: Path | None, *, goes_on: bool = False) -> None:
        """`goes_on`: the run has a checkpoint. Raises UserError naming what is wrong in a task, or that it does not fit in memory, before
        anything is compiled.
        """
        assert config.evaluation is not None, "asked without the section"
        self.every, self._folder, self._tasks = config.evaluation.every, folder, find_tasks(",".join(config.evaluation.tasks))
        own = Path(config.run.dir) / config.run.name / TOKENIZER
        turns = turn_ends(config.data.stores)
        self._tokenizer = started_tokenizer(config.data.stores[0], own, source_tokenizer(config.train), goes_on=goes_on, turns=turns)
        self._scorer, self._name = Scorer(config, mesh), config.run.name
        state = least(config, dict(mesh.shape))[0]
        self.asked: Mapping[str, str] = {task.name: self._asked(task, state) for task in self._tasks}

    def _model(self, params: Any, model_state: Any) -> LanguageModel:
        return LanguageModel(self._scorer, params, model_state, self._tokenizer)

    def _asked(self, task: Task, held: Part | None = None) -> str:
        """Digest of all that a task asks of a model. Raises UserError, also if devices that hold the state `held` have no room for it."""
        asked = rehearse(task, self._model({}, {}), held).asked
        return hashlib.sha256(" ".join(asked).encode()).hexdigest()[:12]

    def run(self, state: TrainState, step: int, gives_up: Callable[[], bool]) -> dict[str, Any] | None:
        """Data of the event: `tasks` (task -> metric -> value) and `notes`; figures are also written to the run, with standard errors.
        None once `gives_up()`, which is asked between batches, in all processes equally often.
        """
        model = self._model(state.params, state.model_state)
        found: dict[str, dict[str, float]] = {}
        notes: list[str] = []

        def poll(done: int, total: int) -> None:
            if gives_up():
                raise _GivenUpError

        model.progress = poll
        try:
            for task in self._tasks:
                poll(0, 0)
                try:
                    result = self._result(task, model)
                except UserError as error:  # figures that are not finite, too little memory, files that are away: training goes on
                    notes.append(f"{task.name}: {error}")
                    error.__traceback__ = None  # its frames hold the copy of the weights, and one of them holds the error itself
                    continue
                found[task.name] = {name: figure.value for name, figure in result.figures.items()}
                notes += [result.notice] if result.notice else []
                try:
                    if self._folder is not None:
                        write_result(self._folder, self._name, step, result)
                except (UserError, OSError) as error:  # a full disk
                    notes.append(f"{task.name}: {error}")
        except _GivenUpError:
            return None
        return {"tasks": found, **({"notes": notes} if notes else {})}

    def _result(self, task: Task, model: LanguageModel) -> Result:
        """Raises UserError in all processes alike, before they compute if their data differ or one cannot read them."""
        if jax.process_count() > 1:
            agree.on_all(partial(self._asked, task), lambda asked: {f"task {task.name}": asked})

        def run() -> Result:
            with explain_out_of_memory(f"running the task {task.name}", FEWER):
                return run_task(task, model)

        return agree.on_all(run)


class _GivenUpError(Exception):
    """A signal asked training to stop."""
