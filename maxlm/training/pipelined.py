"""One update's gradients by a pipeline over `stage`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.models import Decoder, Given, Routings, bind, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.parameters import Parameters, abstract_parameters, cast_matrices
from maxlm.models.stages import Deal, bring_back, deal_out, in_periods
from maxlm.parallel import pipeline
from maxlm.parallel.schedule import Schedule
from maxlm.training.loss import LossSums, forward_of, head_sums, in_order, noise

_Part = tuple[Batch, Array | None]  # of the batch, and what jitter grows from


def stages() -> int:
    """Of the mesh in force."""
    return jax.sharding.get_abstract_mesh().shape.get("stage", 1)


def gradients(
    config: Config, params: Parameters, parts: Batch, total_tokens: Float[Array, ""], summed: tuple[str, ...] = ()
) -> tuple[LossSums, Parameters]:
    """Sums over the microbatches `parts` (leading dim), and the gradient of their loss over `total_tokens`. `summed`: as in `Forward`."""
    deal = Deal(config.model, stages(), config.train.stage_chunks)
    schedule = Schedule(config.train.pipeline, deal.stages, parts.tokens_BS.shape[0], deal.chunks)
    noises = jax.vmap(partial(noise, config))(parts)
    given = jax.vmap(partial(in_order, config))(parts), noises
    cast = cast_matrices(params, parameter_axes(config.model), jnp.dtype(config.precision.compute))
    ends = {name: tree for name, tree in cast.items() if name not in ("layers", "tail")}
    work = _work(config, deal, total_tokens, forward_of(config, summed))
    with jax.default_matmul_precision(config.precision.matmul):
        (sums, reports), (layers, end_grads) = pipeline.run(schedule, work, deal_out(deal, cast), ends, given)
    return sums._replace(routings=reports and in_periods(deal, reports)), {**end_grads, **bring_back(deal, layers)}


def _work(config: Config, deal: Deal, total_tokens: Float[Array, ""], forward: Forward) -> pipeline.Work:
    nothing = abstract_parameters(deal.part_config)  # stands for what the layers, or the ends, do not read

    def model(**own: Parameters) -> Decoder:
        return bind(deal.part_config, {**nothing, **own})

    def read(part: _Part) -> Given:
        batch, noise_BS = part
        return Given(model().angles(batch.positions_BS), batch.segment_ids_BS, noise_BS)

    def first(ends: Parameters, part: _Part) -> Array:
        decoder = model(**ends)
        return decoder.begin(decoder.embed(part[0].tokens_BS, part[0].positions_BS), read(part), forward)[0]

    def layers(chunk: Parameters, x_BSD: Array, inputs: tuple[Given, Any]) -> tuple[tuple[Array, Array], Routings | None]:
        given, alive = inputs
        through = model(layers=chunk).run(x_BSD, given, forward, alive=alive)
        return (through.x_BSD, through.penalty / total_tokens), through.routings

    def last(ends: Parameters, part: _Part, x_BSD: Array) -> tuple[Array, LossSums]:
        decoder = model(**ends)
        total, sums = head_sums(config, decoder, decoder.final_norm(x_BSD), part[0])
        return total / total_tokens, sums

    return pipeline.Work(first, lambda part, place: (read(part), deal.alive(place)), layers, last)
