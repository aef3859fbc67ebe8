"""Facts shared by all attempts of one `maxlm launch`: the config as the first attempt read it, and digests of files named in it.

So an edit for the next experiment neither changes nor ends a running job. They are in the progress file: the supervisor keeps them in its
memory, and begins the file of each attempt with them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlm.base.errors import MissingError, UnavailableError, UserError, as_user_error
from maxlm.cluster import progress_file
from maxlm.config.loader import LoadedConfig, load, validate
from maxlm.telemetry.run_dir import RunDirectory

_ASKED, _CONFIG, _FACTS, _FOLDER = "asked", "config", "facts", "folder"
_applies = True  # False in a command of another run than the supervisor's


def load_frozen(name: str, overrides: Sequence[str]) -> LoadedConfig:
    """The config of the first attempt, with a note if the config `name` reads otherwise by now; without one, or without a supervisor, the
    config `name`, which is kept for the next attempts. Another config than theirs was asked for by a command of another run, to which
    nothing here applies from now on. Raises UserError as `load` does.
    """
    global _applies
    asked, before = [name, *overrides], _kept()
    if before.get(_ASKED, asked) != asked:
        _applies, before = False, {}
    kept = before.get(_CONFIG)
    if kept is None:
        loaded = load(name, overrides)
        _record({_ASKED: asked, _CONFIG: loaded.config.model_dump(mode="json")})
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
    return bool(_kept().get(_FACTS))


def may_pass(problem: UserError) -> UserError:
    """`problem` with storage that an earlier attempt had: UnavailableError, as a mount may be away for a while; else as it is."""
    return UnavailableError(str(problem)) if is_restart() else problem


def explained(error: UserError | OSError) -> UserError:
    """`as_user_error`; through `may_pass` for an absent or unreadable file."""
    absent = isinstance(error, OSError | MissingError) or isinstance(error.__context__, OSError)
    return may_pass(as_user_error(error)) if absent else as_user_error(error)


def check_unchanged(facts: Mapping[str, str]) -> None:
    """Compare digests of files named in the config with the digests of earlier attempts. Raises UserError for a changed file."""
    known = _kept().get(_FACTS, {})
    for name, digest in facts.items():
        if known.get(name, digest) != digest:
            raise UserError(
                f"{name} is not what it was when `maxlm launch` was started ({known[name]}, and now {digest}): bring it back, or stop and "
                "start `maxlm launch` to go on with it as it is."
            )
    if facts.keys() - known.keys():
        _record({_FACTS: {**known, **facts}})


def note_saved(folder: Path) -> None:
    """Tell later attempts that `folder` is the directory of a run with checkpoints."""
    if _kept().get(_FOLDER) != str(folder):
        _record({_FOLDER: str(folder)})


def check_folder(run: RunDirectory) -> None:
    """Raise UnavailableError if an earlier attempt has saved this run, and its directory is gone: the run would begin anew."""
    if _kept().get(_FOLDER) == str(run.path) and not run.events.is_file():
        raise UnavailableError(
            f"run.dir: {run.path} held this run, with checkpoints, when `maxlm launch` was started, and {run.events.name} is gone: "
            "is its file system mounted? To begin anew, stop and start `maxlm launch`."
        )


def _kept() -> Mapping[str, Any]:
    return progress_file.current().frozen if _applies else {}


def _record(values: Mapping[str, Any]) -> None:
    if _applies:
        progress_file.record(frozen={**_kept(), **values})
