"""Gradients of one update by a pipeline over `stage`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig, PipelineConfig
from maxlm.models import BlockContext, Decoder, Routing, abstract_model_state, abstract_parameters, bind, model_state_specs
from maxlm.models.decoder import DecoderOutput, join_routing
from maxlm.models.linear import matmul_precision
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.models.stack import PATTERN, by_group, layer_groups, split_layers
from maxlm.models.stages import StageAssignment, gather_from_stages, run_unless_padding, scatter_to_stages
from maxlm.objectives import Objective, Sums
from maxlm.parallel.pipeline import StageFunctions, pipeline_gradients
from maxlm.parallel.schedule import Schedule
from maxlm.training.gradients import split

Microbatch = tuple[Any, Float[Array, ""]]  # of the batch, and the denominator of the loss


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
    cast = cast_matrices(config, params)
    layers = scatter_to_stages(assignment, cast)
    constants = scatter_to_stages(assignment, model_state, model_state_specs) if model_state else {}
    ends, end_state = (split_layers(tree, pattern=True)[1] for tree in (cast, model_state))
    functions = _stage_functions(objective, assignment, summed, end_state)
    with matmul_precision(config.precision):
        (sums, reports), (layer_grads, end_grads) = pipeline_gradients(schedule, functions, layers, constants, ends, microbatches)
    routing = None if reports is None else join_routing(assignment.in_depth_order(reports), sums.routing)
    return sums._replace(routing=routing), {**end_grads, **gather_from_stages(assignment, layer_grads)}


def _stage_functions(objective: Objective, assignment: StageAssignment, summed: tuple[str, ...], end_state: Parameters) -> StageFunctions:
    """Functions of the pipeline. On a stage they read nothing but what the pipeline passes them."""
    config = objective.config

    def model(model_config: ModelConfig, params: Parameters, state: Parameters) -> Decoder:
        """The model with shapes in place of the arrays that a function does not read."""
        return bind(model_config, {**abstract_parameters(model_config), **params}, {**abstract_model_state(model_config), **state})

    def embed(ends: Parameters, microbatch: Microbatch) -> Array:
        decoder, (batch, _) = model(config.model, ends, end_state), microbatch
        x_BSD = decoder.embed(batch.tokens_BS, batch.positions_BS)
        return decoder.run(x_BSD, objective.context(decoder, batch, summed), ("head",)).x_BSD

    def inputs(microbatch: Microbatch, part: Array) -> tuple[BlockContext, Array | None, Array]:
        batch, denominator = microbatch
        return objective.context(model(config.model, {}, {}), batch, summed), assignment.active(part), denominator

    def layers(
        params: Parameters, state: Parameters, x_BSD: Array, inputs: tuple[BlockContext, Array | None, Array]
    ) -> tuple[tuple[Array, Array], Routing | None]:
        context, active_L, denominator = inputs
        part = model(assignment.part_config, params, state)
        if active_L is None:
            output = part.run(x_BSD, context, PATTERN)
        else:
            active = by_group(layer_groups(assignment.part_config, PATTERN), active_L)  # in whole periods, so there is no tail
            output = part.run(x_BSD, context, PATTERN, {"layers": active, "tail": ()}, run_unless_padding)
        return (output.x_BSD, output.aux_loss / denominator), output.routing

    def loss(ends: Parameters, microbatch: Microbatch, x_BSD: Array) -> tuple[Array, Sums]:
        batch, denominator = microbatch
        output = DecoderOutput(x_BSD, jnp.float32(0), None)
        total, sums = objective.head(model(config.model, ends, end_state), output, batch, summed)
        return total / denominator, sums

    return StageFunctions(embed, inputs, layers, loss, Sums.empty, Sums.plus)
