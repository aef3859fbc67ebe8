"""Gradients of one update by a pipeline over `stage`."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlm.config.schema import Config, ModelConfig
from maxlm.data.batch import Batch
from maxlm.models import BlockContext, Decoder, Routing, abstract_model_state, abstract_parameters, bind, model_state_specs, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.models.stack import join_routing, split_layers
from maxlm.models.stages import StageAssignment, gather_from_stages, scatter_to_stages
from maxlm.parallel.pipeline import StageFunctions, pipeline_gradients
from maxlm.parallel.schedule import Schedule
from maxlm.training.loss import LossSums, MicrobatchInputs, forward_of, head_sums, microbatch_inputs, read_by

Microbatch = tuple[MicrobatchInputs, Float[Array, ""]]  # and the tokens of the whole update


def stages() -> int:
    """Pipeline stages of the current mesh."""
    return jax.sharding.get_abstract_mesh().shape.get("stage", 1)


def gradients(
    config: Config,
    params: Parameters,
    model_state: Parameters,
    batches: Batch,
    total_tokens: Float[Array, ""],
    summed: tuple[str, ...] = (),
) -> tuple[LossSums, Parameters]:
    """Sums over the microbatches `batches` (leading dim), and the gradient of their loss over `total_tokens`. `summed`: as in `Forward`."""
    assignment = StageAssignment(config.model, stages(), config.train.stage_chunks)
    schedule = Schedule(config.train.pipeline, assignment.stages, batches.tokens_BS.shape[0], assignment.chunks)
    microbatches = jax.vmap(partial(microbatch_inputs, config))(batches), jnp.broadcast_to(total_tokens, batches.tokens_BS.shape[:1])
    cast = cast_matrices(params, parameter_axes(config.model), jnp.dtype(config.precision.compute))
    layers = scatter_to_stages(assignment, cast)
    constants = scatter_to_stages(assignment, model_state, model_state_specs) if model_state else {}
    ends, end_state = (split_layers(tree, pattern=True)[1] for tree in (cast, model_state))
    functions = _stage_functions(config, assignment, forward_of(config, summed), end_state)
    with jax.default_matmul_precision(config.precision.matmul):
        (sums, reports), (layer_grads, end_grads) = pipeline_gradients(schedule, functions, layers, constants, ends, microbatches)
    routing = None if reports is None else join_routing(assignment.in_depth_order(reports), sums.routing)
    return sums._replace(routing=routing), {**end_grads, **gather_from_stages(assignment, layer_grads)}


def _stage_functions(config: Config, assignment: StageAssignment, forward: Forward, end_state: Parameters) -> StageFunctions:
    """Functions of the pipeline. On a stage they read nothing but what the pipeline passes them."""

    def model(model_config: ModelConfig, params: Parameters, state: Parameters) -> Decoder:
        """The model with shapes in place of the arrays that a function does not read."""
        return bind(model_config, {**abstract_parameters(model_config), **params}, {**abstract_model_state(model_config), **state})

    def embed(ends: Parameters, microbatch: Microbatch) -> Array:
        decoder, (inputs, _) = model(config.model, ends, end_state), microbatch
        x_BSD = decoder.embed(inputs.batch.tokens_BS, inputs.batch.positions_BS)
        return decoder.stack.run_head(x_BSD, read_by(decoder, inputs), forward)[0]

    def inputs(microbatch: Microbatch, part: Array) -> tuple[BlockContext, Array | None, Array]:
        inputs, total_tokens = microbatch
        return read_by(model(config.model, {}, {}), inputs), assignment.active(part), total_tokens

    def layers(
        params: Parameters, state: Parameters, x_BSD: Array, inputs: tuple[BlockContext, Array | None, Array]
    ) -> tuple[tuple[Array, Array], Routing | None]:
        context, active_L, total_tokens = inputs
        output = model(assignment.part_config, params, state).stack.run_pattern(x_BSD, context, forward, active_L=active_L)
        return (output.x_BSD, output.aux_loss / total_tokens), output.routing

    def loss(ends: Parameters, microbatch: Microbatch, x_BSD: Array) -> tuple[Array, LossSums]:
        inputs, total_tokens = microbatch
        total, sums = head_sums(config, model(config.model, ends, end_state), x_BSD, inputs, forward)
        return total / total_tokens, sums

    return StageFunctions(embed, inputs, layers, loss)
