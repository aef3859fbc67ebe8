"""Evidence on a run in trouble, for the person who looks at it later: a page, and a replay.

The page is `evidence-STEP.md` in the run directory. The replay repeats an update that was not finite, to name the first tensor that is not.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.base.atomic import write_text
from maxlm.base.transient import first_line
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.config import UserError
from maxlm.data.order import batch_number
from maxlm.models.parameters import Parameters
from maxlm.models.stack import within_layer
from maxlm.telemetry.observer import Event
from maxlm.training.gradients import cast_frozen, compresses
from maxlm.training.health import Health
from maxlm.training.named_tensors import Mark, in_order, with_checks
from maxlm.training.program import Program
from maxlm.training.saving import not_finite
from maxlm.training.session import RollBack, Session
from maxlm.training.step import TrainState

LATEST = 5  # batches with a list of their samples, where none are left out


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


BELOW, ABOVE = -1, 2**31  # depths of parameters outside of layers: of embeddings; of the final norm and the unembedding
EMBEDDINGS = ("embedding_VD", "position_PD")
LAYER_INPUT = "layer_input"  # the first named tensor of every layer

_log = logging.getLogger(__name__)


class Replay:
    """Replays updates of one program, which it compiles once."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def report(self, session: Session, state: TrainState, step: int) -> None:
        """Replay update `step` and report the first tensor that is not finite as an alarm. No failure of it changes the run.

        `state` is that after one more update, since figures are read one step late; in a row of such updates it is the same.
        """
        data: dict[str, Any] = {"cause": "not_finite"}
        try:
            with session.goodput.measure("eval"):
                batch = session.data.device_batch(step - 1, self._program.batch_sharding)
                program = self._program.of_size(len(batch.tokens_BS))
                sized = self if program is self._program else Replay(program)
                tensor, layer = sized.first_not_finite(state, batch, step - 1)
            where = tensor if layer is None else f"{tensor} of layer {layer}"
            reason = f"{where} is the first tensor that is not finite, in a replay of update {step:,}"
            shared = "" if session.program.config.diloco is None else " of the shared weights; a worker has its own"
            finite = {"reason": f"a replay of update {step:,} was finite{shared}"}
            data |= {"reason": reason, "tensor": tensor, "layer": layer} if tensor else finite
        except Exception as error:
            _log.info("the replay failed", exc_info=True)
            data["reason"] = f"update {step:,} was not finite, and its replay failed: {first_line(error)}"
        session.observers.on_event(Event("alarm", step, data=data))

    def first_not_finite(self, state: TrainState, batch: Any, step: int) -> tuple[str, int | None]:
        """(name of the first tensor that is not finite, its layer) in the update of the batch of `step`: in the state, the batch, the
        forward pass, the loss, the gradients. ("", None) if all are finite.
        """
        if names := not_finite(state, self._program.mesh):
            return names[0], None
        offload = self._program.config.memory.offload_state
        if offload is not None and offload.weights is not None:
            raise UserError("it computes with all layers on the device, and memory.offload_state.weights = host; the state is finite.")
        with jax.set_mesh(self._program.mesh):
            inputs = self._program.placement.readable(state).params, state.model_state, batch, jnp.int32(step)
            for name, whole in named_leaves(jax.device_get(self._batch(batch))).items():
                if not whole:
                    return f"batch.{name}", None
            return self._in_forward(inputs) or self._in_gradients(inputs)

    @cached_property
    def _batch(self) -> Any:
        return self._jitted(lambda batch: jax.tree.map(lambda array: jnp.all(jnp.isfinite(array)), batch))

    @cached_property
    def _forward(self) -> tuple[Any, list[Mark]]:
        """All rows at once, as an evaluation computes them."""
        program = self._program

        def forward(params: Parameters, model_state: Parameters, batch: Any, step: jax.Array) -> Any:
            batch = program.objective.with_randomness(batch, step)
            total, sums = cast_frozen(program.config.model, program.config.precision.compute, program.objective.loss)(
                params, model_state, batch
            )
            return total, sums.added

        state = jax.eval_shape(program.placement.readable, program.abstract_state)
        step = jax.ShapeDtypeStruct((), jnp.int32)
        checked, marks = with_checks(forward, state.params, state.model_state, program.abstract_batch, step)
        return self._jitted(checked), marks

    @cached_property
    def _gradients(self) -> Any:
        program, slices = self._program, int(compresses(self._program.config))  # gradients of slices are stacked

        def finite(path: Any, leaf: jax.Array) -> jax.Array:
            place = within_layer(program.config.model, tuple(str(entry.key) for entry in path))
            stacked = 0 if place is None else place[1].ndim
            return jnp.all(jnp.isfinite(leaf), axis=(*range(slices), *range(slices + stacked, leaf.ndim)))

        def gradients(params: Parameters, model_state: Parameters, batch: Any, step: jax.Array) -> Any:
            batch = program.objective.with_randomness(batch, step)
            denominator = jnp.maximum(program.objective.denominator(batch), 1)
            grads = program.gradients(params, model_state, batch, denominator)[1]
            return jax.tree_util.tree_map_with_path(finite, grads)

        return self._jitted(gradients)

    def _jitted(self, function: Any) -> Any:
        whole = NamedSharding(self._program.mesh, PartitionSpec())
        return jax.jit(function, out_shardings=whole, compiler_options=self._program.compiler_options)

    def _in_forward(self, inputs: Any) -> tuple[str, int | None] | None:
        run, marks = self._forward
        outputs, finite = jax.device_get(run(*inputs))
        layer = -1
        for name, whole in in_order(marks, finite):
            layer += name == LAYER_INPUT
            if not whole:
                return name, max(layer, 0)
        return None if all(np.isfinite(output).all() for output in outputs) else ("the loss", None)

    def _in_gradients(self, inputs: Any) -> tuple[str, int | None]:
        """Backwards: the gradients of the last layer are the first to be computed."""
        found: list[tuple[int, str]] = []
        for name, whole in named_leaves(jax.device_get(self._gradients(*inputs))).items():
            place = within_layer(self._program.config.model, tuple(name.split(".")))
            depths = place[1] if place is not None else np.array(BELOW if name in EMBEDDINGS else ABOVE)
            found += [(int(depth), name) for depth in depths[~whole].reshape(-1)]
        if not found:
            return "", None
        depth, name = max(found, key=lambda pair: pair[0])
        return f"the gradient of {name}", depth if depth not in (BELOW, ABOVE) else None
