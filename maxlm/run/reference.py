"""The frozen reference of DPO: its log-probabilities of all pairs, computed before the first update, and read whenever the run goes on."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from maxlm.cluster import agree
from maxlm.config import UserError
from maxlm.data.input_pipeline import Pipeline
from maxlm.objectives import LogProbabilities, with_reference
from maxlm.run import reference_file
from maxlm.run.reference_file import Pairs, Reference
from maxlm.telemetry.phases import Phases
from maxlm.training.program import Program
from maxlm.training.session import Start

IN_FLIGHT = 2  # batches dispatched before the first of them is read
SAY_SECONDS = 30.0  # between two lines that say how far it is
_log = logging.getLogger(__name__)


def attach_reference(
    program: Program,
    start: Start,
    pipelines: dict[str, Pipeline],
    folder: ocp.path.Path,
    phases: Phases,
    touch: Callable[[], None] = lambda: None,
) -> None:
    """Make every batch of the pipelines, by name, carry the reference's log-probabilities.

    While no checkpoint was restored, `start` is the reference, and always computed: whatever lies in `folder`, the checkpoints' own, may be
    of other weights. Afterwards they are those in `folder`. Process 0 alone reads and writes it, and all learn of its failure. `touch` is
    called after each batch.

    Raises UserError: the file cannot be written, or is missing or damaged though training has begun, or is of another source or other data.
    """
    config, first = program.config, jax.process_index() == 0
    named, evaluated = config.train.start_from, config.train.eval_batches
    assert named is not None, "config/rules.py requires it"
    batches = {  # to read, in order: all of the training pairs, and as many held-out ones as an evaluation reads
        name: one.n_batches if name == "train" else min(evaluated, one.n_batches) for name, one in pipelines.items()
    }
    if start.restored is None:
        sets = {name: _computed(program, start, name, pipeline, batches[name], phases, touch) for name, pipeline in pipelines.items()}

        def keep() -> None:
            source = reference_file.source_now(named, named.step)
            reference_file.write(folder, Reference(source, sets), config.run, config.checkpoint)

        agree.on_all(lambda: keep() if first else None)
    else:
        needed = {name: (batches[name], pipeline.fingerprint) for name, pipeline in pipelines.items()}

        def read_kept() -> Reference:
            kept = reference_file.read(folder)
            reference_file.check(kept, config.train, config.data, needed)
            return kept

        kept = agree.on_all(lambda: read_kept() if first else None)
        sets = {name: _shared(pipeline, kept and kept.sets[name]) for name, pipeline in pipelines.items()}
    for name, pipeline in pipelines.items():
        if damaged := sets[name].damaged:
            reason = f"{damaged:,} of {pipeline.n_documents:,} {name} pairs could not be read when this run began (data.skip_bad_chunks)"
            _log.warning("%s: they have no reference, and stay omitted", reason)
            phases.say(f"{reason}: they stay omitted")
        pipeline.annotate = partial(with_reference, reference=sets[name].table)


def _computed(
    program: Program, start: Start, name: str, pipeline: Pipeline, batches: int, phases: Phases, touch: Callable[[], None]
) -> Pairs:
    """Log-probabilities of the first `batches` by the parameters of `start`, the same in every process."""
    evaluate = replace(program, objective=LogProbabilities(program.config)).evaluate
    rows, table = pipeline.in_order(), np.full((pipeline.n_documents, 2), np.nan, np.float32)
    state = program.placement.readable(start.state)
    waiting: list[tuple[int, Any]] = []
    damaged, said = 0, time.monotonic()
    doing = f"computing the reference's log-probabilities of {name} pairs"
    source = rows.batches(0, program.batch_sharding, batches)
    try:
        with phases(doing), jax.set_mesh(program.mesh):
            for step in range(batches):
                waiting.append((step, evaluate(state.params, state.model_state, source.get()).added))
                if len(waiting) > IN_FLIGHT:
                    damaged += _fill(table, rows, *waiting.pop(0))
                    touch()
                if time.monotonic() - said > SAY_SECONDS:
                    said = time.monotonic()
                    phases.say(f"{doing}: {step + 1:,} of {batches:,} batches")
            damaged += sum(_fill(table, rows, *one) for one in waiting)
    finally:
        source.close()
    for problem in pipeline.take_problems():  # of `rows`, which shares the list: not of a batch that was trained on
        _log.warning("%s", problem["reason"])
    return Pairs(table, batches, pipeline.fingerprint, damaged)


def _fill(table: np.ndarray, rows: Pipeline, step: int, found: Any) -> int:
    """Write the figures of a batch to the table. Returns how many of its pairs were damaged."""
    damaged = 0
    for numbers, pairs, values_G in zip(rows.documents(step), *jax.device_get((found["pairs"], found["log_probabilities"])), strict=True):
        if pairs == 0:  # the row touches a damaged chunk, or fills up the last batch
            damaged += len(numbers)
            continue
        table[numbers] = values_G[1 : 2 * len(numbers) + 1].reshape(-1, 2)
        if not np.isfinite(table[numbers]).all():
            wrong = "the reference's log-probabilities are not finite; its parameters, or precision.compute, are no good"
            raise UserError(f"train.start_from: {wrong}.")
    return damaged


def _shared(pipeline: Pipeline, pairs: Pairs | None) -> Pairs:
    """The pairs of process 0 in all processes."""
    if jax.process_count() == 1:
        assert pairs is not None, "this is process 0"
        return pairs
    own = pairs or Pairs(np.zeros((pipeline.n_documents, 2), np.float32), 0, pipeline.fingerprint, 0)
    numbers = agree.gather(np.array([own.batches, own.damaged], np.int32))[0]
    return Pairs(agree.gather(own.table)[0], int(numbers[0]), own.fingerprint, int(numbers[1]))
