"""One update's gradients by a pipeline over `stage`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import Config, PipelineConfig
from maxlm.data.batch import Batch
from maxlm.models import BlockContext, Decoder, Routings, bind, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.parameters import Parameters, abstract_parameters, cast_matrices
from maxlm.models.stages import StageAssignment, gather_from_stages, in_periods, scatter_to_stages
from maxlm.parallel import pipeline
from maxlm.parallel.schedule import Schedule
from maxlm.training.loss import LossSums, MicrobatchInputs, forward_of, head_sums, microbatch_inputs, read_by


def stages() -> int:
    """Of the current mesh."""
    return jax.sharding.get_abstract_mesh().shape.get("stage", 1)


def gradients(
    config: Config, params: Parameters, parts: Batch, total_tokens: Float[Array, ""], summed: tuple[str, ...] = ()
) -> tuple[LossSums, Parameters]:
    """Sums over the microbatches `parts` (leading dim), and the gradient of their loss over `total_tokens`. `summed`: as in `Forward`."""
    settings = config.pipeline or PipelineConfig()
    deal = StageAssignment(config.model, stages(), settings.chunks)
    schedule = Schedule(settings.schedule, deal.stages, parts.tokens_BS.shape[0], deal.chunks)
    given = jax.vmap(partial(microbatch_inputs, config))(parts), jnp.broadcast_to(total_tokens, parts.tokens_BS.shape[:1])
    cast = cast_matrices(params, parameter_axes(config.model), jnp.dtype(config.precision.compute))
    ends = {name: tree for name, tree in cast.items() if name not in ("layers", "tail")}
    work = _work(config, deal, forward_of(config, summed))
    with jax.default_matmul_precision(config.precision.matmul):
        (sums, reports), (layers, end_grads) = pipeline.run(schedule, work, scatter_to_stages(deal, cast), ends, given)
    routings = None if reports is None else {**in_periods(deal, reports), **(sums.routings or {})}
    return sums._replace(routings=routings), {**end_grads, **gather_from_stages(deal, layers)}


def _work(config: Config, deal: StageAssignment, forward: Forward) -> pipeline.Work:
    """Of microbatches as (part, tokens of the whole update): on a stage only what the pipeline hands in can be read."""
    nothing = abstract_parameters(deal.part_config)  # stands for what the layers, or the ends, do not read

    def model(**own: Parameters) -> Decoder:
        return bind(deal.part_config, {**nothing, **own})

    def first(ends: Parameters, given: tuple[MicrobatchInputs, Array]) -> Array:
        decoder, (part, _) = model(**ends), given
        return decoder.begin(decoder.embed(part.batch.tokens_BS, part.batch.positions_BS), read_by(decoder, part), forward)[0]

    def inputs(given: tuple[MicrobatchInputs, Array], place: Array) -> tuple[BlockContext, Any, Array]:
        part, total_tokens = given
        return read_by(model(), part), deal.alive(place), total_tokens

    def layers(chunk: Parameters, x_BSD: Array, inputs: tuple[BlockContext, Any, Array]) -> tuple[tuple[Array, Array], Routings | None]:
        given, alive, total_tokens = inputs
        through = model(layers=chunk).run(x_BSD, given, forward, alive=alive)
        return (through.x_BSD, through.penalty / total_tokens), through.routings

    def last(ends: Parameters, given: tuple[MicrobatchInputs, Array], x_BSD: Array) -> tuple[Array, LossSums]:
        part, total_tokens = given
        total, sums = head_sums(config, model(**ends), x_BSD, part, forward)
        return total / total_tokens, sums

    return pipeline.Work(first, inputs, layers, last)
