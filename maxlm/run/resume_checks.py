"""Checks of a resumed run: settings that differ from its checkpoint are reported, and missing checkpoints refused."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import maxlm
from maxlm.base.atomic import replacing
from maxlm.base.errors import some
from maxlm.base.strict_json import read_objects
from maxlm.config import Config, UserError, extensions, load
from maxlm.config.fields import flatten
from maxlm.config.loader import writer_of
from maxlm.telemetry.course import surviving
from maxlm.telemetry.observer import Event
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.optimizer import learning_rate
from maxlm.training.rollback import Journal
from maxlm.training.session import Start

IGNORED = ("run.", "cluster.", "prometheus.")  # settings that change no step
BRANCHES = "train.branch_from."  # of a run that has just branched off, and differs by it from the other
STORE, RATE = "contents of the data store", "learning rate of the next update"
VERSION = "version of maxlm"


def changed_settings(directory: RunDirectory, config: Config, start: Start, fingerprint: str) -> dict[str, list[Any]]:
    """Return setting -> [before, now] of all that differ, with the learning rate and the data's fingerprint. Keeps the old config. Of a
    run that has just branched off: what differs from the other run.

    Call it before the new config is written, in the process that writes it. `fingerprint`: of the data store.
    """
    before = start.position.get("store", fingerprint)
    data = {} if before == fingerprint else {STORE: [before[:12], fingerprint[:12]]}
    data |= _other_version(directory)
    if start.branched:
        assert config.train.branch_from is not None, "it says where the run branched off"
        return {**_differences(Path(config.train.branch_from.path) / directory.config.name, config, start), **data}
    replaced = directory.replaced_configs()
    at = next((step for step in replaced if step >= start.step), None)  # its config trained the steps up to it
    source = directory.config if at is None else directory.config_until(at)
    changed = _differences(source, config, start) if source.is_file() else {}
    if changed and at is None:
        with replacing(directory.config_until(start.step)) as kept:
            kept.write(source.read_bytes())  # also where it is damaged
    directory.trained_again(start.step)
    return {**changed, **data, **changed_extensions(start.position, config.extensions)}


def changed_extensions(position: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, list[Any]]:
    """Extension -> [before, now], version and digest, of these extensions if they have changed since the checkpoint with `position`."""
    before, now = position.get(extensions.FIELD), extensions.identities(names)
    known = before if isinstance(before, dict) else {}
    return {f"extension {name}": [known[name], now[name]] for name in now if known.get(name, now[name]) != now[name]}


def lacking_extensions(position: Mapping[str, Any], names: Sequence[str] | None) -> str:
    """Return why a config with the extensions `names` cannot go on from a checkpoint with `position`, which another one helped to write;
    else "".
    """
    before, present = position.get(extensions.FIELD), tuple(names or ())
    lacking = [str(name) for name in before if name not in present] if isinstance(before, dict) else []
    if not lacking:
        return ""
    needed = ", ".join([*present, *lacking])
    return f"its checkpoints were written with the extension {some(lacking)}, which this config does not name: add extensions=[{needed}]"


def _other_version(directory: RunDirectory) -> dict[str, list[Any]]:
    """The version of maxlm that wrote the saved config, and this one, if they differ."""
    if not directory.config.is_file():
        return {}
    with directory.config.open(encoding="utf-8", errors="replace") as file:
        version = writer_of(file.readline(200))
    return {} if version is None or version == maxlm.__version__ else {VERSION: [version, maxlm.__version__]}


def lost_checkpoints(directory: RunDirectory, checkpoints: str, strays: Sequence[str]) -> str:
    """Return why a run without checkpoints, but perhaps with `strays`, must not begin at step 0: it has saved before, and not gone back
    behind all that it saved; else "". Raises UserError if the file of roll backs is damaged.
    """
    if not directory.events.is_file():
        return ""
    saved = _still_saved(directory)
    if not saved:
        return ""
    problem = "; ".join([f"{checkpoints} holds no checkpoint", *strays])
    return (
        f"{problem}; but this run has saved step {saved[-1]:,} ({directory.events}): put its checkpoints back, set checkpoint.dir to where "
        f"they are, choose another run.name, or delete {directory.path} to begin anew. Nothing was changed."
    )


def _still_saved(directory: RunDirectory) -> list[int]:
    """Steps of the saves that count, oldest first. Training went back behind the others, and the next save sets them aside."""
    events = list(filter(None, map(Event.from_item, read_objects(directory.events))))
    saved = [event for event in surviving(events) if event.kind == "save"]
    for record in Journal.seen_here(directory.roll_backs).records:  # a kill may come before the event of the last one
        saved = [one for one in saved if one.step <= record.before or one.time > record.time]
    return [one.step for one in saved]


def _differences(source: Path, config: Config, start: Start) -> dict[str, list[Any]]:
    """Return the settings that differ between the config in `source` and this one."""
    try:
        before = load(str(source.absolute()), any_mesh=True).config
    except UserError as error:
        return {"config": [f"one that this maxlm cannot read: {error}", "this one"]}
    old, new = (dict(flatten(one.model_dump(mode="json"))) for one in (before, config))
    ignored = (*IGNORED, BRANCHES) if start.branched else IGNORED
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key) and not key.startswith(ignored)]
    changed = {key: [old.get(key), new.get(key)] for key in differing}
    updates = start.step - int(jax.device_get(start.state.skipped))
    rates = [float(learning_rate(one)(updates)) for one in (before, config)]
    return {**changed, RATE: rates} if rates[0] != rates[1] else changed
