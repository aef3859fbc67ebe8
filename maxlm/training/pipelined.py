"""One update's gradients by a pipeline over `stage`."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import Config
from maxlm.data.batch import Batch
from maxlm.models import Decoder, bind, parameter_axes
from maxlm.models.parameters import Parameters, abstract_parameters, cast_matrices
from maxlm.models.stages import Deal, bring_back, deal_out
from maxlm.parallel import pipeline
from maxlm.parallel.schedule import Schedule
from maxlm.training.loss import LossSums, head_sums, in_order


def stages() -> int:
    """Of the mesh in force."""
    return jax.sharding.get_abstract_mesh().shape.get("stage", 1)


def gradients(config: Config, params: Parameters, parts: Batch, total_tokens: Float[Array, ""]) -> tuple[LossSums, Parameters]:
    """Sums over the microbatches `parts` (leading dim), and the gradient of their loss over `total_tokens`."""
    deal = Deal(config.model, stages(), config.train.stage_chunks)
    schedule = Schedule(config.train.pipeline, deal.stages, parts.tokens_BS.shape[0], deal.chunks)
    parts = jax.vmap(partial(in_order, config))(parts)
    cast = cast_matrices(params, parameter_axes(config.model), jnp.dtype(config.precision.compute))
    ends = {name: tree for name, tree in cast.items() if name not in ("layers", "tail")}
    with jax.default_matmul_precision(config.precision.matmul):
        sums, (layers, end_grads) = pipeline.run(schedule, _work(config, deal, total_tokens), deal_out(deal, cast), ends, parts)
    return sums, {**end_grads, **bring_back(deal, layers)}


def _work(config: Config, deal: Deal, total_tokens: Float[Array, ""]) -> pipeline.Work:
    nothing = abstract_parameters(deal.part_config)  # stands for what the layers, or the ends, do not read

    def model(**own: Parameters) -> Decoder:
        return bind(deal.part_config, {**nothing, **own})

    def inputs(part: Batch, place: Array) -> tuple:
        return model().angles(part.positions_BS), part.segment_ids_BS, deal.alive(place)

    def layers(chunk: Parameters, x_BSD: Array, given: tuple) -> Array:
        angles, segment_ids_BS, alive = given
        return model(layers=chunk).run(
            x_BSD, angles, segment_ids_BS, memory=config.memory, context=config.mesh.context_attention, alive=alive
        )[0]

    def last(ends: Parameters, part: Batch, x_BSD: Array) -> tuple[Array, LossSums]:
        decoder = model(**ends)
        total, sums = head_sums(config, decoder, decoder.final_norm(x_BSD), part)
        return total / total_tokens, sums

    return pipeline.Work(lambda ends, part: model(**ends).embed(part.tokens_BS, part.positions_BS), inputs, layers, last)
