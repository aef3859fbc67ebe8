"""`report.html`: a report on runs as one self-contained page."""

from collections.abc import Sequence
from pathlib import Path

from maxlm.config.errors import UserError
from maxlm.telemetry.atomic import write_text
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.render import render

__all__ = ["write_report"]


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one HTML page about the runs, overlaid if there are several, and return `out`.

    Missing, empty or torn files give a shorter report with a note. Raises UserError without runs, for a folder that is no run directory,
    and if `out` cannot be written.
    """
    if not run_dirs:
        raise UserError("a report needs at least one run directory; give the folder that `maxlm train` wrote, such as runs/quickstart")
    page = render([load_run(Path(path)) for path in run_dirs])
    try:
        write_text(Path(out), page)
    except OSError as error:
        raise UserError(f"{out}: the report cannot be written ({error.strerror or error}); choose another file") from error
    return Path(out)
