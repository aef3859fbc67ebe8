"""The body of `maxlm train` and of `maxlm.fit`: training with the evaluation tasks and predictions of a config."""

from collections.abc import Mapping
from typing import Any

from maxlm.config.schema import Config
from maxlm.inference.text import print_samples
from maxlm.run.open_run import Given
from maxlm.run.run import Ended, run_training
from maxlm.telemetry.phases import Phases


def train(config: Config, phases: Phases, named: Mapping[str, str] | None = None, given: Given = Given()) -> Ended:
    """Train with the tasks and predictions that the sections of `config` ask for. `named`: settings of the cluster."""
    tasks: Any = None
    if config.evaluation is not None:
        from maxlm.evaluation.while_training import TrainingTasks

        tasks = TrainingTasks
    predict: Any = None
    if config.cost is not None and config.cost.calibration is not None:
        from maxlm.cost.prediction import predictor as predict
    return run_training(config, phases, print_samples, named, tasks, predict, given)
