"""The frozen reference of DPO: its log-probabilities of all pairs, computed once before training and kept in the run directory."""

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlm.checkpoint import manifest
from maxlm.checkpoint.errors import DamagedError
from maxlm.config import Config, UserError
from maxlm.config.errors import ConfigError
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.manifest import fingerprint
from maxlm.objectives import LogProbabilities, with_reference
from maxlm.runtime.consistency import require_equal
from maxlm.runtime.host_allgather import allgather
from maxlm.telemetry.atomic import replacing
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.run_dir import RunDirectory, unwritable
from maxlm.training.program import Program
from maxlm.training.saved_run import AVERAGE, CONFIG, open_run
from maxlm.training.session import Start

FILE = "reference.npz"
FIELD = "train.start_from"
IN_FLIGHT = 2  # batches dispatched before the first of them is read
_FIX = "bring it back, or begin anew under another run.name"
Tables = dict[str, np.ndarray]  # split -> [pairs, 2] float32: log-probabilities of the chosen and of the rejected response


def attach_reference(
    config: Config, program: Program, start: Start, pipelines: dict[str, Pipeline], directory: RunDirectory, phases: Phases
) -> None:
    """Make every batch of the pipelines, by name, carry the reference's log-probabilities: those in the run directory, or those of `start`.

    Raises UserError: they are missing or damaged though training has begun, or belong to another source or other data.
    """
    begun, tables, problem = start.restored is not None, None, None
    identity = {"source": _source(config), "data": {name: pipeline.fingerprint for name, pipeline in pipelines.items()}}
    try:
        tables = _read(directory.path / FILE, identity, pipelines, begun=begun) if directory.primary else None
    except UserError as error:
        problem = error
    require_equal({}, problem)
    if not int(allgather(np.array([tables is not None], np.int32))[0, 0]):
        with phases("computing the reference's log-probabilities of all pairs"):
            tables = {name: _computed(program, start, pipeline) for name, pipeline in pipelines.items()}
        if directory.primary:
            _write(directory.path / FILE, identity, tables, config.run.dir)
    elif jax.process_count() > 1:
        empty = {name: np.zeros((pipeline.n_documents, 2), np.float32) for name, pipeline in pipelines.items()}
        tables = {name: allgather((tables or empty)[name])[0] for name in pipelines}
    assert tables is not None, "read or computed above"
    for name, pipeline in pipelines.items():
        pipeline.annotate = partial(with_reference, reference=tables[name])


def _computed(program: Program, start: Start, pipeline: Pipeline) -> np.ndarray:
    """(chosen, rejected) log-probabilities of every pair under the parameters of `start`, [pairs, 2] float32, in every process."""
    evaluate = replace(program, objective=LogProbabilities(program.config)).evaluate
    rows, table = pipeline.in_order(), np.full((pipeline.n_documents, 2), np.nan, np.float32)
    waiting: list[tuple[int, Any]] = []

    def read(step: int, found: Any) -> None:
        for numbers, values_G in zip(rows.documents(step), np.asarray(found), strict=True):
            table[numbers] = values_G[1 : 2 * len(numbers) + 1].reshape(-1, 2)

    with jax.set_mesh(program.mesh):
        for step in range(rows.n_batches):
            batch = rows.device_batch(step, program.batch_sharding)
            waiting.append((step, evaluate(start.state.params, start.state.model_state, batch).added["log_probabilities"]))
            if len(waiting) > IN_FLIGHT:
                read(*waiting.pop(0))
    for one in waiting:
        read(*one)
    if not np.isfinite(table).all():
        raise UserError(f"{FIELD}: the reference's log-probabilities are not finite; its parameters, or precision.compute, are no good.")
    return table


def _source(config: Config) -> dict[str, Any]:
    """The reference: path, kind of weights, the step asked for, the step that is read, and a digest of what is read of it; without the last
    two if it is not there any more, or damaged.
    """
    source = config.train.start_from
    assert source is not None, "config/rules.py requires it"
    named: dict[str, Any] = {"path": str(Path(source.path).resolve()), "weights": source.weights, "asked": source.step, "step": source.step}
    if not (Path(source.path) / CONFIG).is_file():
        return named
    checkpoints = open_run(Path(source.path)).checkpoints
    step = source.step if source.step is not None else checkpoints.latest()
    if step is None:
        return named
    try:
        leaves = manifest.read(checkpoints.directory / str(step)).leaves
    except DamagedError:
        return named
    read = ("params." if source.weights == "raw" else f"{'.'.join(AVERAGE)}.", "model_state.")  # which holds what adapters are added to
    digests = {name: leaf.digest for name, leaf in leaves.items() if name.startswith(read)}
    return {**named, "step": step, "parameters": fingerprint(digests)}


def _read(path: Path, identity: dict[str, Any], pipelines: dict[str, Pipeline], *, begun: bool) -> Tables | None:
    """The tables in the file, or None where there is no training yet that they must fit."""
    content = path.read_bytes() if path.is_file() else None
    if content is None and not begun:
        return None
    if content is None:
        raise UserError(f"{path} is missing: it holds the reference's log-probabilities, which changed weights cannot give; {_FIX}.")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            tables = {name: arrays[name] for name in arrays.files if name != "about"}
            about = json.loads(arrays["about"].tobytes())
        if about["digest"] != _digest(tables):
            raise ValueError("its digest differs")
    except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        if not begun:
            return None
        raise UserError(f"{path} is damaged ({error}): it holds the reference's log-probabilities; {_FIX}.") from error
    problem = _mismatch(about, identity, tables, pipelines, begun=begun)
    if problem is None:
        return tables
    if not begun:
        return None
    raise problem


def _mismatch(
    about: dict[str, Any], identity: dict[str, Any], tables: Tables, pipelines: dict[str, Pipeline], *, begun: bool
) -> UserError | None:
    """Why the tables do not belong to this run, if so. Once training has begun, its source may train on, change or vanish: the reference is
    what it was then, so it is enough that the same one is named.
    """
    source, ours = about["source"], identity["source"]
    again = all(source.get(name, "raw") == ours[name] for name in ("path", "weights")) and ours["asked"] in (None, source["step"])
    if not (begun and again) and ("parameters" not in ours or source.get("parameters") != ours["parameters"]):
        if source["path"] != ours["path"] and "parameters" not in ours:
            return ConfigError(f"{FIELD}.path", ours["path"], f"is not the reference of this run, {source['path']}", "name that one")
        rule = f"holds other parameters than the reference of this run, {source.get('weights', 'raw')} weights of step {source['step']}"
        fix = "name that one, or begin anew under another run.name"
        return ConfigError(f"{FIELD}.path", ours["path"], f"{rule} of {source['path']}", fix)
    known = about["data"]
    if other := next((name for name, digest in identity["data"].items() if known.get(name, digest) != digest), None):
        rule = f"are other {other} pairs than those of {FILE} in this run"
        return ConfigError(
            "data.store", identity["data"][other][:12], rule, "train on the same store, or begin anew under another run.name"
        )
    missing = next((name for name, pipeline in pipelines.items() if name not in tables or len(tables[name]) != pipeline.n_documents), None)
    if missing is not None:
        field, fix = ("train.eval_batches", "set it to 0") if missing == "eval" else (f"data.{missing.replace('/', '.')}", "take it out")
        return UserError(f"{field}: {FILE} of this run has no {missing} pairs, so their loss is not known; {fix}, as when the run began.")
    return None


def _write(path: Path, identity: dict[str, Any], tables: Tables, folder: str) -> None:
    about = json.dumps({**identity, "digest": _digest(tables)}).encode()
    try:
        with replacing(path) as file:
            np.savez(file, about=np.frombuffer(about, np.uint8), **tables)  # type: ignore[arg-type]
    except OSError as error:
        raise unwritable(error, "run.dir", folder) from error


def _digest(tables: Tables) -> str:
    return fingerprint({name: [list(table.shape), hashlib.sha256(table.tobytes()).hexdigest()] for name, table in tables.items()})
