"""Run tasks on the cores of this machine."""

import multiprocessing
from collections.abc import Callable, MutableSequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from maxlm.base.errors import UserError
from maxlm.config.workers import end_with_parent
from maxlm.corpus.engine import Plan, combine, run_task
from maxlm.corpus.executors.progress import SECONDS, Progress
from maxlm.corpus.tasks import Task, largest_first

ATTEMPTS = 3  # at a task after its process was killed


class LocalExecutor:
    """Processes on this machine. A process that is killed is replaced, and its tasks begin again; datatrove's pool would wait for ever."""

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self.workers, self.say = workers, say

    def combine(self, plan: Plan, number: int) -> None:
        """Search over the whole corpus before pass `number`, in this process."""
        combine(plan, number, self.workers)

    def run_tasks(self, plan: Plan, number: int, tasks: list[Task]) -> None:
        """Run `tasks` of pass `number`. Raises what a task raises, and UserError if processes are killed again and again."""
        left = {task.number: task for task in tasks}
        progress = Progress(plan.names[number], tasks, self.say)
        for attempt in range(ATTEMPTS):
            try:
                if self.workers == 1 and attempt == 0:
                    for place in largest_first(list(left.values())):
                        progress.add(left[place], run_task(plan, number, left[place], partial(progress.reach, place)))
                        del left[place]
                else:
                    self._in_processes(plan, number, left, progress)
            except BrokenProcessPool:
                self.say("a process was killed (is memory short? less with a smaller run.workers); its tasks begin again")
            if not left:
                return
        raise UserError(
            f"processes were killed {ATTEMPTS} times: memory may be short; use a smaller run.workers and give the same command."
        )

    def _in_processes(self, plan: Plan, number: int, left: dict[int, Task], progress: Progress) -> None:
        """Remove from `left` what is done. Raises BrokenProcessPool."""
        workers, context = min(self.workers, len(left)), multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports take a second: once a run, not in every process of each pass
        reached: MutableSequence[int] = context.RawArray("q", 2 * len(plan.tasks))  # bytes and documents of each task
        pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(reached,))
        try:
            running: dict[Future[dict[str, Any]], int] = {}
            for place in largest_first(list(left.values())):
                running[pool.submit(_run_task, plan, number, left[place])] = place
            while running:
                done, _ = wait(running, timeout=SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    place = running.pop(future)
                    progress.add(left[place], future.result())
                    del left[place]
                for place in running.values():
                    if reached[2 * place]:
                        progress.reach(place, reached[2 * place], reached[2 * place + 1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()


_reached: MutableSequence[int] | None = None  # in a worker: memory shared with the parent, bytes and documents of each task


def _begin(reached: MutableSequence[int]) -> None:
    global _reached
    _reached = reached
    end_with_parent()


def _run_task(plan: Plan, number: int, task: Task) -> dict[str, Any]:
    def tell(size: int, documents: int) -> None:
        if _reached is not None:
            _reached[2 * task.number], _reached[2 * task.number + 1] = size, documents

    return run_task(plan, number, task, tell)
