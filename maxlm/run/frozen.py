"""Facts shared by all attempts of one `maxlm launch`: the config as the first attempt read it, and digests of files named in it.

So an edit for the next experiment neither changes nor ends a running job. The supervisor keeps the text in its memory and gives it to each
attempt in a file, which an attempt replaces as a whole.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlm.cluster.progress_file import FROZEN_VARIABLE
from maxlm.config.errors import MissingError, UnavailableError, UserError, as_user_error
from maxlm.config.loader import LoadedConfig, load, validate
from maxlm.config.paths import read_file
from maxlm.telemetry.atomic import write_text
from maxlm.telemetry.run_dir import RunDirectory

_ASKED, _CONFIG, _FACTS, _FOLDER = "asked", "config", "facts", "folder"


def load_frozen(name: str, overrides: Sequence[str]) -> LoadedConfig:
    """The config of the first attempt, with a note if the config `name` reads otherwise by now; without one, or without a supervisor, the
    config `name`, which is kept for the next attempts. Another config than theirs was asked for by a command of another run, to which
    nothing here applies from now on. Raises UserError as `load` does.
    """
    asked, before = [name, *overrides], _read()
    if before.get(_ASKED, asked) != asked:
        os.environ.pop(FROZEN_VARIABLE)
        before = {}
    kept = before.get(_CONFIG)
    if kept is None:
        loaded = load(name, overrides)
        _write({_ASKED: asked, _CONFIG: loaded.config.model_dump(mode="json")})
        return loaded
    config = validate(kept, {})
    try:
        differs = load(name, overrides).config != config
    except UserError:
        differs = True
    note = (
        f"{name} was edited since `maxlm launch` was started, which goes on with the config of then; stop and start it to take the new one"
    )
    return LoadedConfig(config, {}, (note,) if differs else ())


def is_restart() -> bool:
    """True if an attempt before this one has opened its data, under the same supervisor."""
    return bool(_read().get(_FACTS))


def may_pass(problem: UserError) -> UserError:
    """`problem` with storage that an earlier attempt had: UnavailableError, as a mount may be away for a while; else as it is."""
    return UnavailableError(str(problem)) if is_restart() else problem


def explained(error: UserError | OSError) -> UserError:
    """`as_user_error`; through `may_pass` for an absent or unreadable file."""
    absent = isinstance(error, OSError | MissingError) or isinstance(error.__context__, OSError)
    return may_pass(as_user_error(error)) if absent else as_user_error(error)


def check_unchanged(facts: Mapping[str, str]) -> None:
    """Compare digests of files named in the config with the digests of earlier attempts. Raises UserError for a changed file."""
    known = _read().get(_FACTS, {})
    for name, digest in facts.items():
        if known.get(name, digest) != digest:
            raise UserError(
                f"{name} is not what it was when `maxlm launch` was started ({known[name]}, and now {digest}): bring it back, or stop and "
                "start `maxlm launch` to go on with it as it is."
            )
    if facts.keys() - known.keys():
        _write({_FACTS: {**known, **facts}})


def note_saved(folder: Path) -> None:
    """Tell later attempts that `folder` is the directory of a run with checkpoints."""
    if _read().get(_FOLDER) != str(folder):
        _write({_FOLDER: str(folder)})


def check_folder(run: RunDirectory) -> None:
    """Raise UnavailableError if an earlier attempt has saved this run, and its directory is gone: the run would begin anew."""
    if _read().get(_FOLDER) == str(run.path) and not run.events.is_file():
        raise UnavailableError(
            f"run.dir: {run.path} held this run, with checkpoints, when `maxlm launch` was started, and {run.events.name} is gone: "
            "is its file system mounted? To begin anew, stop and start `maxlm launch`."
        )


def _read() -> dict[str, Any]:
    path = os.environ.get(FROZEN_VARIABLE)
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        return dict(json.loads(read_file(path))) if path else {}
    return {}


def _write(values: Mapping[str, Any]) -> None:
    """Add values to the file. A folder that is full or gone must not cost the run."""
    path = os.environ.get(FROZEN_VARIABLE)
    if path:
        with contextlib.suppress(OSError):
            write_text(Path(path), json.dumps({**_read(), **values}))
