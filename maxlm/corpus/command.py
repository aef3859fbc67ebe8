"""`maxlm corpus run`: the stages on this machine, and a table of what each one left."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlm.corpus.engine import make_plan, run as run_passes
from maxlm.corpus.local import LocalExecutor
from maxlm.corpus.settings import CorpusSettings


def run(settings: CorpusSettings, say: Callable[[str], None]) -> None:
    """Run a corpus with its executor and show the result. Raises UserError."""
    workers = settings.run.workers or len(os.sched_getaffinity(0))
    plan = make_plan(settings)
    say(f"{len(plan.origins):,} files, {len(plan.tasks):,} tasks, {workers} processes")
    report = run_passes(plan, LocalExecutor(workers, say), workers)
    render(report, plan.output)


def render(report: dict[str, Any], output: Path) -> None:
    """Print what each pass left and removed."""
    from rich.console import Console
    from rich.table import Table

    table = Table("pass", "documents left", "MB left", "removed", "most frequent reasons")
    for one in report["passes"]:
        reasons = sorted(one["removed"].items(), key=lambda item: (-item[1], item[0]))
        most = ", ".join(f"{reason.partition('/')[2]} {count:,}" for reason, count in reasons[:4])
        table.add_row(one["name"], f"{one['documents']:,}", f"{one['bytes'] / 1e6:,.1f}", f"{sum(one['removed'].values()):,}", most)
    console = Console()
    console.print(table)
    console.print(f"{output}: documents/, removed/ (each with its reason) and report.json (ten examples of each reason)", soft_wrap=True)
