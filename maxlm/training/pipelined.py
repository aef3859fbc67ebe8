"""One update's gradients by a pipeline over `stage`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import PipelineConfig
from maxlm.models import BlockContext, Decoder, Routings, bind, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.parameters import Parameters, abstract_parameters, cast_matrices
from maxlm.models.stages import StageAssignment, gather_from_stages, in_periods, scatter_to_stages
from maxlm.objectives import Inputs, Objective, Sums
from maxlm.parallel import pipeline
from maxlm.parallel.schedule import Schedule
from maxlm.training.gradients import split


def gradients(
    objective: Objective, summed: tuple[str, ...], params: Parameters, batch: Any, denominator: Float[Array, ""]
) -> tuple[Sums, Parameters]:
    """(figures of the batch, gradient of its loss over `denominator`), its microbatches in a pipeline. `summed`: as in `Forward`."""
    config = objective.config
    settings = config.pipeline or PipelineConfig()
    deal = StageAssignment(config.model, jax.sharding.get_abstract_mesh().shape["stage"], settings.chunks)
    schedule = Schedule(settings.schedule, deal.stages, config.train.microbatches, deal.chunks)
    parts = split(batch, config.train.microbatches)
    given = jax.vmap(objective.inputs)(parts), jnp.broadcast_to(denominator, (config.train.microbatches,))
    cast = cast_matrices(params, parameter_axes(config.model), jnp.dtype(config.precision.compute))
    ends = {name: tree for name, tree in cast.items() if name not in ("layers", "tail")}
    work = _work(objective, deal, objective.forward(summed))
    with jax.default_matmul_precision(config.precision.matmul):
        (sums, reports), (layers, end_grads) = pipeline.run(schedule, work, scatter_to_stages(deal, cast), ends, given)
    routings = None if reports is None else {**in_periods(deal, reports), **(sums.routings or {})}
    return sums._replace(routings=routings), {**end_grads, **gather_from_stages(deal, layers)}


def _work(objective: Objective, deal: StageAssignment, forward: Forward) -> pipeline.Work:
    """Of microbatches as (part, tokens of the whole update): on a stage only what the pipeline hands in can be read."""
    nothing = abstract_parameters(deal.part_config)  # stands for what the layers, or the ends, do not read

    def model(**own: Parameters) -> Decoder:
        return bind(deal.part_config, {**nothing, **own})

    def first(ends: Parameters, given: tuple[Inputs, Array]) -> Array:
        decoder, (part, _) = model(**ends), given
        return decoder.begin(decoder.embed(part.batch.tokens_BS, part.batch.positions_BS), objective.context(decoder, part), forward)[0]

    def inputs(given: tuple[Inputs, Array], place: Array) -> tuple[BlockContext, Any, Array]:
        part, total_tokens = given
        return objective.context(model(), part), deal.alive(place), total_tokens

    def layers(chunk: Parameters, x_BSD: Array, inputs: tuple[BlockContext, Any, Array]) -> tuple[tuple[Array, Array], Routings | None]:
        given, alive, total_tokens = inputs
        through = model(layers=chunk).run(x_BSD, given, forward, alive=alive)
        return (through.x_BSD, through.penalty / total_tokens), through.routings

    def last(ends: Parameters, given: tuple[Inputs, Array], x_BSD: Array) -> tuple[Array, Sums]:
        part, total_tokens = given
        total, sums = objective.head(model(**ends), x_BSD, part, forward)
        return total / total_tokens, sums

    return pipeline.Work(first, inputs, layers, last, Sums.empty, Sums.plus)
