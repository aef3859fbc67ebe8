"""The file that keeps DPO's frozen reference, in the folder of the checkpoints, so that they are never found without it.

Process 0 alone calls what is here, and nothing here waits for another process.
"""

import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from orbax.checkpoint import v1 as ocp

from maxlm.base.atomic import replacing
from maxlm.base.errors import ConfigError, UnavailableError, UserError
from maxlm.base.paths import check_regular, is_remote
from maxlm.base.transient import first_line, is_transient, retried
from maxlm.checkpoint import manifest
from maxlm.config.sections.checkpoint import CheckpointConfig
from maxlm.config.sections.data import DataConfig
from maxlm.config.sections.run import RunConfig
from maxlm.config.sections.start_from import StartFromConfig
from maxlm.config.sections.train import TrainConfig
from maxlm.data.manifest import fingerprint
from maxlm.telemetry.run_dir import unwritable
from maxlm.training.saved_run import open_run

FILE = "reference.npz"
_ABOUT = "about"
_ANEW = "begin anew under another run.name"
_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """The weights that are the reference. `digest`: of them all; None if they could not be read."""

    path: str
    step: int | None
    weights: str
    digest: str | None


class Pairs(NamedTuple):
    """The reference of one set of pairs. `table`: log-probabilities of the chosen and of the rejected response, [pairs, 2] float32, NaN
    where they were not computed; `batches`: how many, from the first on, they were computed for; `fingerprint`: of the stores; `damaged`:
    pairs of those batches that could not be read.
    """

    table: np.ndarray
    batches: int
    fingerprint: str
    damaged: int


class Reference(NamedTuple):
    """All that the file holds. `sets`: by the name of their pipeline, such as `train`."""

    source: Source
    sets: dict[str, Pairs]


def source_now(named: StartFromConfig, step: int | None) -> Source:
    """The source as it is now; its newest checkpoint if `step` is None. Without a digest where it is not there (any more), or damaged."""
    path = str(Path(named.path).resolve())
    try:
        saved = open_run(Path(named.path))
        checkpoints = saved.checkpoints
        step = max(saved.steps(), default=None) if step is None else step
        leaves = {} if step is None else manifest.read(checkpoints.directory / str(step)).leaves
        read = saved.sources(named.weights)
    except Exception as error:  # any: damage and remote storage raise many kinds, and the source is not needed
        _log.info("the reference's source %s cannot be read: %s", path, first_line(error))
        leaves, read = {}, set()
    digests = {name: leaf.digest for name, leaf in leaves.items() if name in read or name.startswith("model_state.")}
    return Source(path, step, named.weights, fingerprint(digests) if digests else None)


def write(folder: ocp.path.Path, reference: Reference, run: RunConfig, checkpoint: CheckpointConfig) -> None:
    """Replace the file in `folder`, the checkpoints' own. Raises UserError."""
    path, content = folder / FILE, _content(reference)
    if is_remote(str(folder)):
        try:
            retried(lambda: path.write_bytes(content), f"writing {path}")
        except Exception as error:  # any: remote storage raises many kinds of errors
            kind = UnavailableError if is_transient(error) else UserError
            raise kind(f"{path} cannot be written: {first_line(error)}.") from error
        return
    try:
        _replace(Path(folder), content)
    except OSError as error:
        field, place = ("run.dir", run.dir) if checkpoint.dir is None else ("checkpoint.dir", checkpoint.dir)
        raise unwritable(error, field, place) from error


def _content(reference: Reference) -> bytes:
    tables = {name: pairs.table for name, pairs in reference.sets.items()}
    sets = {name: {"batches": p.batches, "fingerprint": p.fingerprint, "damaged": p.damaged} for name, p in reference.sets.items()}
    about: dict[str, Any] = {"source": reference.source._asdict(), "sets": sets}
    about["digest"] = _digest(about, tables)
    buffer = io.BytesIO()
    np.savez(buffer, **{_ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}, **tables)  # type: ignore[arg-type]
    return buffer.getvalue()


def _replace(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{FILE}.*"):  # by a process that was killed while it wrote
        left.unlink(missing_ok=True)
    with replacing(folder / FILE) as file:
        file.write(content)


def read(folder: ocp.path.Path) -> Reference:
    """The file in `folder`. Raises UserError: it is missing, damaged, or cannot be read now."""
    path = folder / FILE
    about: dict[str, Any] = {}
    try:
        check_regular(path)
        content = retried(path.read_bytes, f"reading {path}")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            tables = {name: arrays[name] for name in arrays.files if name != _ABOUT}
            about = json.loads(arrays[_ABOUT].tobytes())
        if about.pop("digest") != _digest(about, tables):
            raise ValueError("its digest differs")
        sets = {name: Pairs(tables[name], **pairs) for name, pairs in about["sets"].items()}
        return Reference(Source(**about["source"]), sets)
    except Exception as error:  # any: damage and remote storage raise many kinds of errors
        if is_transient(error):
            raise UnavailableError(f"{path} cannot be read: {first_line(error)}; try again when the cause is gone.") from error
        wrong = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({first_line(error)})"
        held = "it holds the reference's log-probabilities, which changed weights cannot give"
        raise UserError(f"{path} is {wrong}: {held}; bring it back, or {_ANEW}.") from error


def check(kept: Reference, train: TrainConfig, data: DataConfig, needed: dict[str, tuple[int, str]]) -> None:
    """Raise ConfigError, naming the setting, unless `kept` has the source and the stores of these settings. `needed`: name of each set of
    pairs -> (batches that are read, fingerprint of the stores).
    """
    assert train.start_from is not None, "config/rules.py requires it"
    _check_source(kept.source, train.start_from)
    for name, (batches, stores) in needed.items():
        field, value = _stores(data, name)
        pairs = kept.sets.get(name)
        if pairs is None and name == "eval":
            rule = f"was 0 when this run began, so {FILE} has no held-out pairs"
            raise ConfigError("train.eval_batches", train.eval_batches, rule, "use 0")
        if pairs is None:
            raise ConfigError(field, value, f"was not there when this run began, so {FILE} has none of its pairs", f"remove {field}")
        if pairs.fingerprint != stores:
            raise ConfigError(field, value, f"holds other {name} pairs than {FILE} has of this run", f"bring them back, or {_ANEW}")
        if pairs.batches < batches:
            rule = f"is more than the {pairs.batches} batches of {name} pairs in {FILE}, which was made when this run began"
            raise ConfigError("train.eval_batches", train.eval_batches, rule, f"use {pairs.batches}")


def _stores(data: DataConfig, name: str) -> tuple[str, Any]:
    """The setting that names the stores of a set of pairs, and its value."""
    own = name.removeprefix("eval/")
    if own != name:
        return f"data.eval.{own}", data.eval.stores[own] if data.eval is not None else None
    return ("data.store", data.store) if data.store else ("data.mixture", list(data.stores))


def _check_source(kept: Source, named: StartFromConfig) -> None:
    """The source is not needed any more, whatever it holds by now; a config that names another one must name the same weights."""
    step = kept.step if named.step is None else named.step
    here = {"path": str(Path(named.path).resolve()), "step": step, "weights": named.weights}
    differing = [field for field, value in here.items() if value != getattr(kept, field)]
    if not differing:
        return
    now = source_now(named, step)
    if now.digest is not None and now.digest == kept.digest:
        return
    found = "is not" if now.digest is None else "holds other parameters than"
    rule = f"{found} the reference of this run, step {kept.step} of {kept.path} ({kept.weights} weights)"
    fix = f"name that one, which need not be there any more, or {_ANEW}"
    raise ConfigError(f"train.start_from.{differing[0]}", here[differing[0]], rule, fix)


def _digest(about: dict[str, Any], tables: dict[str, np.ndarray]) -> str:
    described = {name: [list(table.shape), hashlib.sha256(table.tobytes()).hexdigest()] for name, table in tables.items()}
    return fingerprint({_ABOUT: about, "tables": described})
