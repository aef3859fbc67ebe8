"""`maxlm corpus run`, with a table of what each pass left, and `maxlm corpus report`."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlm.base import directory_lock
from maxlm.base.atomic import write_text
from maxlm.base.errors import UserError, as_user_error, system_errors
from maxlm.base.paths import read_file
from maxlm.corpus.engine import FORMAT, make_plan, run as run_passes
from maxlm.corpus.executors import make_executor
from maxlm.corpus.filters import ScorerSource
from maxlm.corpus.page import megabytes, page, searched, unread
from maxlm.corpus.settings import CorpusSettings
from maxlm.corpus.tasks import total

LOCK_SECONDS = 5.0  # for which a run that is about to end may still use the output


def run(settings: CorpusSettings, say: Callable[[str], None], scorer: ScorerSource | None = None) -> None:
    """Run a corpus and show the result. `scorer`: of `filters.perplexity.checkpoint`. Raises UserError."""
    executor = make_executor(settings, say)
    plan = make_plan(settings, scorer)
    say(f"files: {len(plan.origins):,}; tasks: {len(plan.tasks):,}")
    with (
        system_errors(),
        directory_lock.locked(plan.output, "output", LOCK_SECONDS, say, "wait for it to end, or give another folder") as lock,
    ):
        report = run_passes(dataclasses.replace(plan, lock=lock), executor)
    render(report, plan.output)
    if report["passes"][-1]["documents"] == 0:
        reasons = Counter({reason: count for one in report["passes"] for reason, count in one["removed"].items()}).most_common(3)
        said = ", ".join(f"{reason} ({count:,})" for reason, count in reasons)
        raise UserError(
            f"{plan.output}: no document is left, removed for {said}; report.html shows examples: loosen the stages that removed them."
        )


def report(output: Path, say: Callable[[str], None]) -> None:
    """Write `report.html` of a finished run anew, from its `report.json`. Raises UserError."""
    path = output / "report.json"
    try:
        known = json.loads(read_file(path, 2**30))
        if known["format"] != FORMAT:
            raise UserError(f"{path}: it has format {known['format']}, and this version reads {FORMAT}; run `maxlm corpus run` again.")
        write_text(output / "report.html", page(known))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; it is written when `maxlm corpus run` has finished. Give the `output` of a corpus file."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a report of `maxlm corpus run` ({error}); run it again.") from None
    except OSError as error:
        raise as_user_error(error) from error
    render(known, output)
    say(f"report: {output / 'report.html'}")


def render(report: dict[str, Any], output: Path) -> None:
    """Print what each pass left and removed."""
    from rich.table import Table

    from maxlm.base.console import Console

    came, size = total(report["passes"][0]["came"])
    table = Table("pass", "left", "text left", "removed", "most frequent reasons")
    table.add_row("came in", f"{came + unread(report):,}", megabytes(size), "", "")
    for one in report["passes"]:
        reasons = sorted(one["removed"].items(), key=lambda item: (-item[1], item[0]))
        most = [f"{count:,} {reason.partition('/')[2]}" for reason, count in reasons[:4]]
        most += [f"{count:,} tagged: {reason}" for reason, count in sorted(one["tagged"].items())]
        most += [f"{count:,} cut: {reason.removeprefix(one['name'] + '/')}" for reason, (count, _) in sorted(one["cut"].items())]
        counts = (f"{one['documents']:,}", megabytes(one["bytes"]), f"{sum(one['removed'].values()):,}")
        table.add_row(one["name"], *counts, "\n".join(most))
    console = Console()
    console.print(table)
    for line in searched(report):
        console.print(line, soft_wrap=True, markup=False)
    line = f"{output}: documents/, removed/ (each with its reason), report.html (with ten examples of each reason) and report.json"
    console.print(line, soft_wrap=True)
