"""Run tasks on a Ray cluster. Its nodes share the folders of the input and the output.

These are plain tasks of Ray: datatrove's Ray executor runs them in a process pool inside an actor, and waits for ever when a process of the
pool is killed (seen with 0.10.1).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from maxlm.base.errors import UserError, error_kind
from maxlm.corpus.engine import Plan, combine, run_task
from maxlm.corpus.executors.progress import Progress
from maxlm.corpus.settings import RaySettings
from maxlm.corpus.tasks import Task, largest_first

ATTEMPTS = 3  # at a task that lost its process or node


class RayExecutor:
    """Tasks of Ray. A task that loses its process or node begins again, on any node."""

    def __init__(self, settings: RaySettings, workers: int | None, say: Callable[[str], None]) -> None:
        self.settings, self.workers, self.say = settings, workers, say

    def combine(self, plan: Plan, number: int) -> None:
        """Search over the whole corpus before pass `number`, in one task."""
        self._connect()
        threads = self.settings.combine_cpus
        self._get(self._remote(threads, plan.settings.run.memory_mb / 1024).remote(combine, str(Path.cwd()), plan, number, threads))

    def run_tasks(self, plan: Plan, number: int, tasks: list[Task]) -> None:
        """Run `tasks` of pass `number`, at most `run.workers` at once. Raises UserError: what a task raises, or if nodes are lost."""
        self._connect()
        progress = Progress(plan.names[number], tasks, self.say)
        by_number = {task.number: task for task in tasks}
        waiting = largest_first(tasks)
        shared, remote, folder = ray.put(plan), self._remote(1, self.settings.memory_gb), str(Path.cwd())
        running: dict[Any, Task] = {}
        while waiting or running:
            while waiting and (self.workers is None or len(running) < self.workers):
                task = by_number[waiting.pop(0)]
                running[remote.remote(run_task, folder, shared, number, task)] = task
            done, _ = ray.wait(list(running), num_returns=1)
            for one in done:
                progress.add(running.pop(one), self._get(one))

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        try:
            ray.init(self.settings.address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"ray.address = {self.settings.address}: no cluster answers ({reason}); start one by `ray start --head`."
            ) from error

    def _remote(self, cpus: int, memory_gb: float) -> Any:
        return ray.remote(num_cpus=cpus, memory=int(memory_gb * 2**30), max_retries=ATTEMPTS - 1)(_call)

    def _get(self, one: Any) -> Any:
        try:
            return ray.get(one)
        except RayTaskError as error:
            raise error.cause from error  # what the task raised: UserError with its line, or a fault of ours with its traceback
        except RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"ray: a task was lost {ATTEMPTS} times ({reason}); give the same command to go on.") from error


def _call(function: Callable[..., Any], folder: str, *args: Any) -> Any:
    """Run `function` in the folder in which the command was given, since paths may be relative."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise error_kind(error)(
            f"ray: {folder} is not on node {os.uname().nodename}; all nodes must share the folders of the corpus."
        ) from error
    return function(*args)
