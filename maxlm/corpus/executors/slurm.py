"""Run tasks as array jobs of Slurm, which datatrove's executor submits; the command waits, and shows how far they are."""

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import logger

from maxlm.base.atomic import write_text
from maxlm.base.errors import ExitCode, UnavailableError, UserError, shorten
from maxlm.corpus.engine import Plan, combine, run_task
from maxlm.corpus.executors.progress import Progress
from maxlm.corpus.settings import SlurmSettings
from maxlm.corpus.tasks import Task

POLL_S = 5.0
LATE_S = 60.0  # for which a file written on another node may be invisible here
ATTEMPTS = 3  # at tasks that end without a result
REFUSED = ".refused.txt"  # ends the name of a file with the exit code and the line of a task's UserError

Calls = Mapping[int, Callable[[], Any]]


class SlurmExecutor:
    """Array jobs of Slurm. Tasks that are killed begin again in a job of their own."""

    def __init__(self, settings: SlurmSettings, workers: int | None, say: Callable[[str], None]) -> None:
        self.settings, self.workers, self.say = settings, workers, say
        logger.remove()  # datatrove's own lines; our progress is shown instead

    def combine(self, plan: Plan, number: int) -> None:
        """Search over the whole corpus before pass `number`, in one job."""
        threads = self.settings.combine_cpus
        call = partial(combine, plan, number, threads)
        self._run(plan, f"combine-{plan.names[number]}", {0: call}, threads, lambda left: [] if plan.is_combined(number) else left)

    def run_tasks(self, plan: Plan, number: int, tasks: list[Task]) -> None:
        """Run `tasks` of pass `number`, at most `run.workers` at once. Raises UserError: what a task raises, or if jobs give no result."""
        progress = Progress(plan.names[number], tasks, self.say)
        by_number = {task.number: task for task in tasks}

        def unfinished(left: list[int]) -> list[int]:
            marks = {place: plan.mark(number, by_number[place]) for place in left}
            for place, mark in marks.items():
                if mark is not None:
                    progress.add(by_number[place], mark)
            return [place for place in left if marks[place] is None]

        calls = {place: partial(run_task, plan, number, task) for place, task in by_number.items()}
        self._run(plan, plan.names[number], calls, 1, unfinished)

    def _run(self, plan: Plan, name: str, calls: Calls, cpus: int, unfinished: Callable[[list[int]], list[int]]) -> None:
        """Run `calls`, each in a task of an array job, until `unfinished` of their numbers has none left."""
        left = sorted(calls)
        for attempt in range(ATTEMPTS):
            job = self._submit(
                plan, name if attempt == 0 else f"{name}-again-{attempt}", _Step([calls[number] for number in left]), len(left), cpus
            )
            try:
                left = _wait(job, left, unfinished)
            except KeyboardInterrupt:
                self.say(f"job {job.job_id} goes on without this command; `scancel {job.job_id}` ends it")
                raise
            if not left:
                return
            for refusal in sorted(Path(job.slurm_logs_folder).parent.glob(f"*{REFUSED}")):
                code, _, line = refusal.read_text("utf-8", "replace").partition(" ")
                raise (UnavailableError if code == str(ExitCode.UNAVAILABLE.value) else UserError)(line)
            self.say(f"{len(left):,} tasks of job {job.job_id} ended without a result (killed?); logs in {job.slurm_logs_folder}")
        raise UserError(
            f"slurm: {len(left):,} tasks ended without a result {ATTEMPTS} times; see {job.slurm_logs_folder}; the same command goes on."
        )

    def _submit(self, plan: Plan, name: str, step: "_Step", tasks: int, cpus: int) -> "_Job":
        settings = self.settings
        logs = plan.output / "slurm" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        step.folder = str(logs.resolve())
        job = _Job(
            [step],
            tasks=tasks,
            time=settings.time,
            partition=settings.partition,
            cpus_per_task=cpus,
            mem_per_cpu_gb=settings.memory_gb,
            workers=self.workers or -1,
            job_name=f"corpus-{name}",
            qos=settings.qos,
            env_command=settings.setup,
            sbatch_args=dict(settings.options),
            max_array_size=settings.max_array,
            logging_dir=step.folder,
            skip_completed=False,
            randomize_start_duration=0,
        )
        try:
            job.run()
        except FileNotFoundError as error:
            raise UserError(
                "slurm: the command sbatch is not here; run this on a machine of the cluster, or remove the section slurm."
            ) from error
        except subprocess.CalledProcessError as error:
            raise UserError(
                f"slurm: sbatch refused the job (exit code {error.returncode}); its reason is above. {shorten(str(logs))}"
            ) from error
        self.say(f"job {job.job_id} ({name}): {tasks:,} tasks, logs in {logs}")
        return job


class _Job(SlurmPipelineExecutor):
    def launch_merge_stats(self) -> None:
        """No job that adds up datatrove's statistics: it would wait in the queue for ever when a task fails."""


class _Step(PipelineStep):
    """One call for each rank. What it refuses by name is written down for the command that waits."""

    name = "maxlm corpus"

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.calls, self.folder = calls, ""

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterable[Any]:
        """Make the call of this rank; datatrove's data are none."""
        del data, world_size
        try:
            self.calls[rank]()
        except UserError as error:
            write_text(Path(self.folder) / f"{rank}{REFUSED}", f"{error.exit_code.value} {error}")
            raise
        return iter(())


def _wait(job: _Job, left: list[int], unfinished: Callable[[list[int]], list[int]]) -> list[int]:
    """Return the tasks that are unfinished when the job has left the queue."""
    gone: float | None = None
    while True:
        left = unfinished(left)
        if not left or (gone is not None and time.monotonic() - gone > LATE_S):
            return left
        if gone is None and not _in_queue(job.job_id):
            gone = time.monotonic()
        time.sleep(POLL_S)


def _in_queue(job: str) -> bool:
    """True as long as Slurm has a part of the job that has not ended; where it does not answer, too."""
    asked = subprocess.run(["squeue", "--noheader", "--jobs", str(job), "--format", "%t"], capture_output=True, text=True)
    if asked.returncode:
        return "invalid job id" not in asked.stderr.lower()
    return bool(asked.stdout.strip())
