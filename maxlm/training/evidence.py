"""A page of evidence on a run in trouble: `evidence-STEP.md` in the run directory, for the person who looks at it later."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from maxlm.base.atomic import write_text
from maxlm.data.order import batch_number
from maxlm.training.health import Health
from maxlm.training.session import RollBack, Session

LATEST = 5  # batches with a list of their samples, where none are left out

_log = logging.getLogger(__name__)


def write(session: Session, health: Health, step: int, back: RollBack | None = None) -> None:
    """Write the page on the trouble after `step` updates, where the run has a `health` section. No failure of it changes the run."""
    if session.folder is None or session.program.config.health is None:
        return
    path = session.folder / f"evidence-{step}.md"
    try:
        write_text(path, "\n".join(_page(session, health, step, back)) + "\n")
        _log.warning("evidence on the trouble at step %s: %s", step, path)
    except Exception:
        _log.exception("%s cannot be written", path)


def _page(session: Session, health: Health, step: int, back: RollBack | None) -> Iterator[str]:
    left_out = session.data.left_out
    yield f"# Step {step:,}: {'training goes back' if back is not None and not health.unhealthy else 'training was stopped'}"
    yield f"\n{health.problem or 'no reason is known'}\n"
    yield "\n## Updates\n"
    yield "| update | batch | loss | gradient norm | |\n|---:|---:|---:|---:|---|"
    for judged in health.history:
        note = "not finite, not applied" if not judged.finite else "a spike, not applied" if judged.refused else ""
        batch = batch_number(judged.step - 1, left_out)
        yield f"| {judged.step} | {batch} | {judged.loss:.6g} | {judged.grad_norm:.6g} | {note} |"
    if health.layers is not None:
        yield "\n## Layers, at the newest update\n"
        yield "| layer | gradient norm | update/weight ratio |\n|---|---:|---:|"
        for name, gradient, ratio in zip(*health.layers, strict=True):
            yield f"| {name} | {gradient:.4g} | {ratio:.4g} |"
    yield "\n## Samples\n"
    yield from _samples(session, back.batches if back is not None and back.batches else range(max(step - LATEST, 0), step))
    yield "\n## Roll backs so far\n"
    for record in session.journal.records:
        yield f"- from step {record.from_step} to {record.before} or earlier, without batches {list(record.batches)}: {record.reason}"
    yield f"\nBatches left out until here: {list(left_out)}"


def _samples(session: Session, steps: Sequence[int]) -> Iterator[str]:
    """Windows of the stores in the batches of these steps, and the tokens that they hold."""
    for step in steps:
        ids = session.data.sample_ids(step)
        yield f"- batch {batch_number(step, session.data.left_out)}, windows {ids.tolist()}:"
        for store, ranges in session.data.token_ranges(np.sort(ids)).items():
            yield f"  - {store}: tokens {', '.join(f'{start}-{stop}' for start, stop in ranges)}"
