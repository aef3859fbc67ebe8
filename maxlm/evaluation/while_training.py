"""The tasks of a run's `evaluation` section, on the training mesh and with the weights where they lie."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from maxlm.config.errors import UserError
from maxlm.config.schema import Config
from maxlm.data.text_frame import started_frame
from maxlm.data.tokenizer import open_tokenizer
from maxlm.evaluation.language_model import LanguageModel
from maxlm.evaluation.results import write_result
from maxlm.evaluation.run_task import rehearse, run_task
from maxlm.evaluation.scoring import Scorer
from maxlm.evaluation.task import Task, find_tasks
from maxlm.training.saved_run import TOKENIZER
from maxlm.training.step import TrainState


class TrainingTasks:
    """Runs tasks on the state of a training step. `folder`: where the primary process writes results; None on the others."""

    def __init__(self, config: Config, mesh: Mesh, folder: Path | None, tasks: Sequence[Task]) -> None:
        """Raises UserError naming what is wrong in a task, before anything is compiled."""
        assert config.evaluation is not None, "asked without the section"
        self.every, self._folder, self._tasks = config.evaluation.every, folder, tasks
        source, own = config.train.start_from, Path(config.run.dir) / config.run.name / TOKENIZER
        frame = started_frame(None if source is None else Path(source.path) / TOKENIZER, own)
        self._tokenizer = open_tokenizer(config.data.store or config.data.mixture[0].store, frame)
        self._scorer, self._name = Scorer(config, mesh), config.run.name
        for task in tasks:
            rehearse(task, self._model({}, {}))

    def _model(self, params: Any, model_state: Any) -> LanguageModel:
        return LanguageModel(self._scorer, params, model_state, self._tokenizer)

    def run(self, state: TrainState, step: int, gives_up: Callable[[], bool]) -> dict[str, Any] | None:
        """Data of the event: `tasks` (task -> metric -> value) and `notes`; figures are also written to the run, with standard errors.
        None once `gives_up()`.
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
                    result = run_task(task, model)
                    found[task.name] = {name: figure.value for name, figure in result.figures.items()}
                    notes += [result.notice] if result.notice else []
                    if self._folder is not None:
                        write_result(self._folder, self._name, step, result)
                except (UserError, OSError) as error:  # figures that are not finite, a full disk: training goes on
                    notes.append(f"{task.name}: {error}")
        except _GivenUpError:
            return None
        return {"tasks": found, **({"notes": notes} if notes else {})}


class _GivenUpError(Exception):
    """A signal asked training to stop."""


def open_tasks(config: Config, mesh: Mesh, folder: Path | None) -> TrainingTasks:
    """The tasks of `config.evaluation`. Raises UserError for one that is wrong."""
    assert config.evaluation is not None, "asked without the section"
    return TrainingTasks(config, mesh, folder, find_tasks(",".join(config.evaluation.tasks)))
