"""Gradients of one update by a pipeline over `stage`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import PipelineConfig
from maxlm.models import BlockContext, Decoder, Routing, abstract_model_state, abstract_parameters, bind, model_state_specs
from maxlm.models.decoder import DecoderOutput, join_routing
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.models.stack import split_layers
from maxlm.models.stages import StageAssignment, gather_from_stages, run_unless_padding, scatter_to_stages
from maxlm.objectives import Objective, Sums
from maxlm.parallel.pipeline import StageFunctions, pipeline_gradients
from maxlm.parallel.schedule import Schedule
from maxlm.training.step import split

Microbatch = tuple[Any, Float[Array, ""]]  # of the batch, and the denominator of the loss
LayerInputs = tuple[BlockContext, list[Array] | None, Float[Array, ""]]  # with those layers of a part that are no padding


def gradients(
    objective: Objective,
    summed: tuple[str, ...],
    params: Parameters,
    model_state: Parameters,
    batch: Any,
    denominator: Float[Array, ""],
) -> tuple[Sums, Parameters]:
    """(figures of the batch, gradient of its loss over `denominator`), its microbatches in a pipeline. `summed`: as in `BlockContext`."""
    config, count = objective.config, objective.config.train.microbatches
    settings = config.pipeline or PipelineConfig()
    assignment = StageAssignment(config.model, jax.sharding.get_abstract_mesh().shape["stage"], settings.chunks)
    schedule = Schedule(settings.schedule, assignment.stages, count, assignment.chunks)
    microbatches = jax.vmap(objective.inputs)(split(batch, count)), jnp.broadcast_to(denominator, (count,))
    cast = cast_matrices(config.model, config.precision.compute, params)
    layers = scatter_to_stages(assignment, cast)
    constants = scatter_to_stages(assignment, model_state, model_state_specs) if model_state else {}
    ends, end_state = (split_layers(tree, pattern=True)[1] for tree in (cast, model_state))
    functions = _stage_functions(objective, assignment, summed, end_state)
    with jax.default_matmul_precision(config.precision.float32_matmul):
        (sums, reports), (layer_grads, end_grads) = pipeline_gradients(schedule, functions, layers, constants, ends, microbatches)
    routing = None if reports is None else join_routing(assignment.in_depth_order(reports), sums.routing)
    return sums._replace(routing=routing), {**end_grads, **gather_from_stages(assignment, layer_grads)}


def _stage_functions(objective: Objective, assignment: StageAssignment, summed: tuple[str, ...], end_state: Parameters) -> StageFunctions:
    """Functions of the pipeline. On a stage they read nothing but what the pipeline passes them."""
    config = objective.config

    def model(params: Parameters, state: Parameters) -> Decoder:
        """The whole model, with shapes in place of the arrays that a function does not read."""
        return bind(config.model, {**abstract_parameters(config.model), **params}, {**abstract_model_state(config.model), **state})

    def embed(ends: Parameters, microbatch: Microbatch) -> Array:
        decoder, (batch, _) = model(ends, end_state), microbatch
        x_BSD = decoder.embed(batch.tokens_BS, batch.positions_BS)
        return decoder.run(x_BSD, objective.context(decoder, batch, summed), ("head",)).x_BSD

    def inputs(microbatch: Microbatch, part: Array) -> LayerInputs:
        batch, denominator = microbatch
        return objective.context(model({}, {}), batch, summed), assignment.active(part), denominator

    def layers(params: Parameters, state: Parameters, x_BSD: Array, inputs: LayerInputs) -> tuple[tuple[Array, Array], Routing | None]:
        context, active, denominator = inputs
        values, layer = (None, None) if active is None else ({"layers": active}, run_unless_padding)
        output = model(params, state).run(x_BSD, context, ("layers",), values, layer)  # in whole periods, so there is no tail
        return (output.x_BSD, output.aux_loss / denominator), output.routing

    def loss(ends: Parameters, microbatch: Microbatch, x_BSD: Array) -> tuple[Array, Sums]:
        batch, denominator = microbatch
        output = DecoderOutput(x_BSD, jnp.float32(0), None)
        total, sums = objective.head(model(ends, end_state), output, batch, summed)
        return total / denominator, sums

    return StageFunctions(embed, inputs, layers, loss, Sums.empty, Sums.plus)
