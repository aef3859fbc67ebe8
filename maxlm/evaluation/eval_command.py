"""`maxlm eval`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from maxlm.base.console import Console, print_line
from maxlm.base.errors import UserError
from maxlm.base.strict_json import dumps
from maxlm.evaluation.opening import Opened, open_model
from maxlm.evaluation.prompts import Prompts
from maxlm.evaluation.results import Result, check_unused, result_file, table, write_result
from maxlm.evaluation.run_task import rehearse, run_task, settings_of
from maxlm.evaluation.task import PerplexityTask, Task, find_tasks
from maxlm.models import count_parameters


def evaluate(
    place: Path,
    names: str,
    overrides: Sequence[str],
    *,
    out: Path | None,
    step: int | None,
    context: int | None,
    kind: str,
    as_json: bool,
) -> None:
    """Run tasks on a model, print their results, and write them into the run, or into `out`. Names of results of a moving average end in
    "-ema".

    Raises UserError before anything is computed or written: a task or a setting is wrong, `place` is no model, or a result of other weights
    or settings lies where one would be written.
    """
    if context is not None and context < 1:
        raise UserError(f"--context {context}: must be at least 1 token.")
    tasks = find_tasks(names)
    for task in tasks:
        check(task)
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: name a folder.")
    found = open_model(place, overrides, step=step, context=context, kind=kind)
    folder = out or found.folder
    found.model.folder = None if folder is None else folder / "requests"
    ending = "" if kind == "raw" else f"-{kind}"
    for task in tasks:
        rehearse(task, found.model)
        if folder is not None:
            check_unused(result_file(folder, found.step, task.name + ending), settings_of(task, found.model))
    results, written = [], []
    for task in tasks:
        with _progress(task.name, found):
            result = run_task(task, found.model)
        results.append(replace(result, task=task.name + ending))
        if folder is not None:
            written.append(write_result(folder, str(place), found.step, results[-1]))
    if as_json:
        print(dumps(_summary(place, found, results)))
        return
    console = Console()
    console.print(table(results))
    for note in (*found.notes, *(result.notice for result in results if result.notice)):
        print_line(console, f"note: {note}")
    if written:
        print_line(console, f"written: {', '.join(map(str, written))}")


def check(task: Task) -> None:
    """Read the items of a task and render their prompts. Raises UserError naming what is wrong."""
    config = task.config
    if not isinstance(config, PerplexityTask):
        Prompts(task, config).check()
    elif config.data is not None and not task.path_of(config.data).is_file():
        raise UserError(f"task {task.name}: {task.path_of(config.data)} does not exist.")


@contextmanager
def _progress(name: str, found: Opened) -> Iterator[None]:
    """Show the requests done of a task on stderr: a bar on a terminal, elsewhere a line when it begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print_line(console, f"evaluating {name} ...")
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(name, total=None)
        found.model.progress = lambda done, total: bar.update(line, completed=done, total=total)
        yield


def _summary(place: Path, found: Opened, results: Sequence[Result]) -> dict[str, object]:
    return {
        "model": str(place),
        "step": found.step,
        "parameters": count_parameters(found.model.scorer.config.model),
        "results": [result.to_json() for result in results],
        "notes": [*found.notes, *(result.notice for result in results if result.notice)],
    }
