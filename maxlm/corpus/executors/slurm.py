"""Run tasks as array jobs of Slurm, which datatrove's executor submits; the command waits, and shows how far they are."""

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import logger

from maxlm.config.errors import UserError, shorten
from maxlm.corpus.engine import Plan, combine, run_task
from maxlm.corpus.executors.progress import Progress
from maxlm.corpus.settings import SlurmSettings
from maxlm.corpus.tasks import Task

POLL_S = 5.0
LATE_S = 60.0  # for which a file written on another node may be invisible here
TAIL = 300  # characters of a job's log in an error


class SlurmExecutor:
    """Array jobs of Slurm. Jobs that a node lost are queued again by Slurm; what failed otherwise begins again with the same command."""

    def __init__(self, settings: SlurmSettings, workers: int | None, say: Callable[[str], None]) -> None:
        self.settings, self.workers, self.say = settings, workers, say
        logger.remove()  # datatrove's own lines; our progress is shown instead

    def combine(self, plan: Plan, number: int) -> None:
        """Search over the whole corpus before pass `number`, in one job."""
        threads = self.settings.combine_cpus
        logs = self._submit(plan, f"combine-{plan.names[number]}", [_Combine(plan, number, threads)], 1, threads)
        self._wait(logs, lambda: [] if plan.is_combined(number) else [0], lambda place: None)

    def run_tasks(self, plan: Plan, number: int, tasks: list[Task]) -> None:
        """Run `tasks` of pass `number`, at most `run.workers` at once. Raises UserError for jobs that ended without their result."""
        progress = Progress(plan.names[number], tasks, self.say)
        job = self._submit(plan, plan.names[number], [_RunTask(plan, number, tasks)], len(tasks), 1)
        left = dict(enumerate(tasks))

        def unfinished() -> list[int]:
            return [place for place, task in left.items() if plan.mark(number, task) is None]

        def finished(place: int) -> None:
            task = left.pop(place)
            progress.add(task, plan.mark(number, task) or {})

        self._wait(job, unfinished, finished)

    def _submit(self, plan: Plan, name: str, pipeline: list[PipelineStep], tasks: int, cpus: int) -> "_Job":
        settings = self.settings
        logs = plan.output / "slurm" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        job = _Job(
            pipeline,
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
            logging_dir=str(logs.resolve()),
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
        self.say(f"job {job.job_id}: {tasks:,} tasks of {name}, logs in {logs}")
        return job

    def _wait(self, job: "_Job", unfinished: Callable[[], list[int]], finished: Callable[[int], None]) -> None:
        known = set(range(job.tasks))
        gone_since: float | None = None
        while True:
            left = set(unfinished())
            for place in sorted(known - left):
                finished(place)
            known = left
            if not left:
                return
            if _in_queue(job.job_id):
                gone_since = None
            elif gone_since is None:
                gone_since = time.monotonic()
            elif time.monotonic() - gone_since > LATE_S:
                raise UserError(_failure(job, sorted(left)))
            time.sleep(POLL_S)


class _Job(SlurmPipelineExecutor):
    def launch_merge_stats(self) -> None:
        """No job that adds up datatrove's statistics: it would wait in the queue for ever when a task fails."""


class _RunTask(PipelineStep):
    name = "maxlm corpus task"

    def __init__(self, plan: Plan, number: int, tasks: list[Task]) -> None:
        super().__init__()
        self.plan, self.number, self.tasks = plan, number, tasks

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterable[Any]:
        del data, world_size
        run_task(self.plan, self.number, self.tasks[rank])
        return iter(())


class _Combine(PipelineStep):
    name = "maxlm corpus combine"

    def __init__(self, plan: Plan, number: int, threads: int) -> None:
        super().__init__()
        self.plan, self.number, self.threads = plan, number, threads

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterable[Any]:
        del data, rank, world_size
        combine(self.plan, self.number, self.threads)
        return iter(())


def _in_queue(job: str) -> bool:
    """True as long as Slurm has a part of the job that has not ended; where it does not answer, too."""
    asked = subprocess.run(["squeue", "--noheader", "--jobs", str(job), "--format", "%t"], capture_output=True, text=True)
    if asked.returncode:
        return "invalid job id" not in asked.stderr.lower()
    return bool(asked.stdout.strip())


def _failure(job: "_Job", left: list[int]) -> str:
    folder = Path(job.slurm_logs_folder)
    tails = (path.read_text("utf-8", "replace").strip()[-TAIL:] for path in sorted(folder.glob("*.out")))
    tail = next((" ".join(text.split()) for text in tails if "Error" in text or "error" in text), "")
    return f"slurm: {len(left):,} tasks of job {job.job_id} ended without a result; logs in {folder}; the same command goes on. {tail}"
