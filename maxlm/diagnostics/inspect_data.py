"""`maxlm data inspect`: the contents of a token store; or of a run or a config the shares of its sources, and where a batch comes from."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from maxlm.base.console import Console
from maxlm.base.errors import UserError
from maxlm.base.paths import is_remote, store_argument, user_path
from maxlm.config.loader import RUN_CONFIG, find, load
from maxlm.config.sections.branch_from import BranchFromConfig

if TYPE_CHECKING:
    from maxlm.training.saved_run import SavedRun

ROWS = 8  # of a batch that are printed


def run(place: str, overrides: Sequence[str], step: int | None, *, as_json: bool) -> int:
    """Print what `place` holds: a token store, the folder of a run, or a config. `step`: an update; its samples are looked up. Returns
    the exit code. Raises UserError.
    """
    described, rendered = _store(place, overrides, step) if _is_store(place) else _run_or_config(place, overrides, step, all_rows=as_json)
    if as_json:
        sys.stdout.write(json.dumps(described) + "\n")
    else:
        Console().print(rendered, highlight=False)
    return 0


def _is_store(place: str) -> bool:
    """True unless `place` is a run or a config, so that what is nothing is said to be no store."""
    if is_remote(place) or "://" in place or (user_path(place) / "store.json").is_file():
        return True
    if (user_path(place) / RUN_CONFIG).is_file():
        return False
    try:
        find(place)
    except UserError:
        return True
    return False


def _store(place: str, overrides: Sequence[str], step: int | None) -> tuple[dict[str, Any], RenderableType]:
    from maxlm.data.inspect import describe, render

    described = describe(store_argument(place))
    if step is not None or overrides:
        asked = "--step" if step is not None else overrides[0]
        raise UserError(f"{asked}: {place} is a token store, which has no steps and no settings; give the folder of a run, or a config.")
    return described, render(described)


def _run_or_config(place: str, overrides: Sequence[str], step: int | None, *, all_rows: bool) -> tuple[dict[str, Any], RenderableType]:
    from maxlm.data.inspect import describe_batch, describe_shares, render_batch, render_shares
    from maxlm.run.open_data import open_data
    from maxlm.training.saved_run import SavedRun

    folder = user_path(place)
    is_run = (folder / RUN_CONFIG).is_file()
    config = load(str((folder / RUN_CONFIG).absolute()) if is_run else place, overrides, any_mesh=True).config
    pipeline = open_data(config, held_out=False).train
    leave_out = config.health.leave_out if config.health is not None else ()
    position, left_out = _next_start(SavedRun(folder, config) if is_run else None, leave_out, config.train.branch_from)
    pipeline.go_on(position, left_out)
    if step is not None:
        batch = describe_batch(pipeline, step, None if all_rows else ROWS)
        return batch, render_batch(batch)
    shares = describe_shares(pipeline, config.total_steps, position.get("next_step", 0))
    return shares, render_shares(shares)


def _next_start(
    saved: "SavedRun | None", leave_out: tuple[int, ...], branch: BranchFromConfig | None
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """(data position, numbers of the batches that are left out) from which the next start of a run goes on; of a `branch` without
    checkpoints of its own, the position of its source. `saved`: None: the run has no folder yet; `leave_out`: by its settings.
    """
    from maxlm.telemetry.run_dir import RunDirectory
    from maxlm.training.rollback import Journal
    from maxlm.training.saved_run import open_run

    file = None if saved is None else RunDirectory(saved.directory, primary=False).roll_backs
    journal = Journal(file, leave_out=leave_out)
    positions = {} if saved is None else {step: one for step, one in saved.checkpoints.positions().items() if step not in saved.unfit}
    position = positions[max(positions)] if positions else {}
    if not positions and branch is not None:
        position = open_run(Path(branch.path)).checkpoints.positions().get(branch.step, {})
    return position, journal.left_out(position)
