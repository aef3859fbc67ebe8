"""`report.html`: a report on runs as one self-contained page."""

import re
from collections.abc import Sequence
from pathlib import Path

from maxlm.base.atomic import write_text
from maxlm.base.errors import UserError, error_kind
from maxlm.telemetry.report.load import check_distinct, load_run
from maxlm.telemetry.report.render import TITLE_END, identity, render

__all__ = ["check_place", "default_place", "write_report"]

_HEAD = 1 << 16  # bytes of a page that hold its title and the identity of its runs
NAMED = 3  # runs of which the default name of a comparison has all names
DIGITS = 8  # of the digest in the name of a larger one


def default_place(run_dirs: Sequence[Path]) -> Path:
    """Default file of a report; of many runs its name has a digest, since their names are too long together.

    Raises UserError if it is a comparison of other runs of the same names.
    """
    if len(run_dirs) == 1:
        return run_dirs[0] / "report.html"
    names = [run_dir.resolve().name for run_dir in run_dirs]
    own = identity(run_dirs)
    many = f"{min(names)}-and-{len(names) - 1}-more-{own[:DIGITS]}"
    place = Path(f"report-{'-'.join(names) if len(names) <= NAMED else many}.html")
    found = re.search(rb'<meta name="runs" content="(\w+)">', _head(place))
    if found and found[1].decode() != own:
        raise UserError(f"{place} compares other runs, or these in another place: give another file with --out, or delete that one.")
    return place


def check_place(out: Path) -> Path:
    """`out`. Raises UserError if it exists and is no report of maxlm, or if there is no folder for it: before runs are read."""
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; make it first.")
    head = _head(out)
    if head and TITLE_END.encode() not in head:
        raise UserError(f"--out {out} exists and is no report of maxlm: it stays as it is; choose another file.")
    return out


def _head(path: Path) -> bytes:
    """The first bytes of a file; none if there is no such file, or it cannot be read."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(_HEAD)
    except (OSError, ValueError):
        return b""


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one HTML page about the runs, overlaid if there are several, and return `out`.

    Missing, empty or torn files give a shorter report with a note. Raises UserError without runs, for a folder that is named twice or is
    no run directory, and if `out` cannot be written.
    """
    if not run_dirs:
        raise UserError("a report needs at least one run directory; give the folder that `maxlm train` wrote, such as runs/quickstart")
    check_distinct(run_dirs)
    page = render([load_run(Path(path)) for path in run_dirs], folder=Path(out).parent)
    try:
        write_text(Path(out), page)
    except OSError as error:
        raise error_kind(error)(f"{out}: the report cannot be written ({error.strerror or error}); choose another file") from error
    return Path(out)
