"""A model as a module of flax.nnx, with its weights and their shardings."""

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from maxlm.config.schema import Config
from maxlm.inference.forward import default_inputs, sequence_logits
from maxlm.models import Parameters, bind, model_state_specs, parameter_specs

# B batch, S sequence, V vocabulary


class LanguageModule(nnx.Module):
    """Tokens to logits. `nnx.split`, `nnx.merge`, `nnx.state`, `nnx.grad`, `nnx.jit` and `nnx.display` work on it as on any module.

    Every variable has the metadata `axes` (logical axes, without the axes of stacked layers) and `out_sharding` (mesh axes of each dim), so
    that `nnx.get_partition_spec` and `nnx.get_named_sharding` are right. Blocks that are alike are one `Block` with stacked variables.
    """

    def __init__(self, config: Config, mesh: Mesh, params: Parameters, model_state: Parameters) -> None:
        model = config.model.dropless
        self.decoder = bind(model, params, model_state)
        specs = jax.tree.leaves(
            bind(model, parameter_specs(model, mesh), model_state_specs(model, mesh)), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        variables = jax.tree.leaves(self.decoder, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        for variable, spec in zip(variables, specs, strict=True):
            variable.set_metadata(out_sharding=(*spec, *[None] * (variable.ndim - len(spec))))
        self.precision, self.strategy = config.precision, config.mesh.context_attention

    def __call__(
        self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"] | None = None, segment_ids_BS: Int[Array, "B S"] | None = None
    ) -> Float[Array, "B S V"]:
        """Logits in float32. Positions count from 0 in each row, and each row is one document, if they are not given."""
        positions, segments = default_inputs(tokens_BS)
        inputs = tokens_BS, positions if positions_BS is None else positions_BS, segments if segment_ids_BS is None else segment_ids_BS
        return sequence_logits(self.decoder, self.precision, self.strategy, *inputs)
