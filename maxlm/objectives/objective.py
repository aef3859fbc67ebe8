"""Interface of an objective: what a batch holds, the loss on hidden states, the metrics that are reported."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlm.config.schema import Config
from maxlm.models import BlockContext, Decoder, Routing, bind, parameter_axes
from maxlm.models.forward import Forward
from maxlm.models.linear import matmul_precision
from maxlm.models.parameters import Parameters, cast_matrices
from maxlm.models.stack import join_routing
from maxlm.objectives.sums import Sums
from maxlm.parallel import constrain
from maxlm.parallel.context import in_sequence
from maxlm.telemetry.metric import Metric

# B batch, S sequence, T = S + 1, D model width


class ArraySpec(NamedTuple):
    """One array of a batch: its global shape, and the logical axes by which it is split over the mesh."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


class Inputs(NamedTuple):
    """Inputs of a forward pass, tokens in the order that attention wants."""

    batch: Any
    targets: Any  # what the head reads beside the batch


class Objective(ABC):
    """What is minimised. A batch is a NamedTuple of arrays whose fields include `tokens_BS`, first, `positions_BS`,
    `segment_ids_BS` and `random_BS`, which is None unless `with_randomness` sets it.

    The methods that follow `loss` have defaults; the others are what a new objective defines.
    """

    metrics: ClassVar[tuple[Metric, ...]]  # one is named "loss"

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def batch_spec(self) -> Any:
        """A batch with an `ArraySpec` for every array."""

    @abstractmethod
    def make_batch(self, window_BT: np.ndarray, length_B: np.ndarray, sample_B: np.ndarray, end_of_document: int) -> Any:
        """Host arrays of a batch from windows of tokens.

        Args:
            window_BT: tokens; what lies beyond a row's length is undefined.
            length_B: tokens in each row, from 0 (all padding) to T.
            sample_B: position of each row in the run's stream of samples: seeds what is random, the same on any mesh.
            end_of_document: the id that ends every document.
        """

    @abstractmethod
    def denominator(self, batch: Any) -> Float[Array, ""]:
        """Number that the loss of `batch` is a mean over."""

    @abstractmethod
    def head(self, model: Decoder, x_BSD: Float[Array, "B S D"], inputs: Inputs, forward: Forward) -> tuple[Float[Array, ""], Sums]:
        """(sum that is differentiated, figures) from the hidden states before the final norm."""

    def loss(
        self, params: Parameters, model_state: Parameters, batch: Any, *, summed: tuple[str, ...] = (), training: bool = True
    ) -> tuple[Float[Array, ""], Sums]:
        """(sum over the batch that is differentiated, routers' losses included; figures of the batch). `summed`: as in `Forward`."""
        config = self.config
        inputs, forward = self.inputs(batch, training=training), self.forward(summed)
        compute = cast_matrices(params, parameter_axes(config.model), jnp.dtype(config.precision.compute))
        model = bind(config.model, compute, model_state)
        with matmul_precision(config.precision):
            x_BSD = model.embed(inputs.batch.tokens_BS, inputs.batch.positions_BS)
            output = model.stack(x_BSD, self.context(model, inputs), forward)
            total, sums = self.head(model, output.x_BSD, inputs, forward)
        return total + output.aux_loss, sums._replace(routing=join_routing(output.routing, sums.routing))

    def inputs(self, batch: Any, *, training: bool = True) -> Inputs:
        """Inputs of a forward pass. Positions travel along with tokens, and a sum over tokens needs no order."""
        inputs = Inputs(batch, self.targets(batch, training=training))
        strategy = self.config.mesh.context_attention
        return jax.tree.map(lambda x: in_sequence(x, strategy, back=True) if x.ndim > 1 else x, inputs)

    def with_randomness(self, batch: Any, step: Int[Array, ""]) -> Any:
        """The global batch of an update with the seed of every token's router jitter: a function of (seed, step, position in the batch)."""
        moe = self.config.model.moe
        if moe is None or not moe.router.jitter:
            return batch
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), step)
        return batch._replace(random_BS=constrain(jax.random.bits(key, batch.tokens_BS.shape, jnp.uint32), "batch", "seq"))

    def targets(self, batch: Any, *, training: bool) -> Any:
        """Arrays that the head reads beside `batch`, [B, S] each, made on the device."""
        return ()

    def context(self, model: Decoder, inputs: Inputs) -> BlockContext:
        """Inputs shared by all blocks."""
        return BlockContext(model.angles(inputs.batch.positions_BS), inputs.batch.segment_ids_BS, inputs.batch.random_BS)

    def forward(self, summed: tuple[str, ...] = ()) -> Forward:
        """How the forward pass of a batch is run."""
        return Forward(memory=self.config.memory, context=self.config.mesh.context_attention, summed=summed)

    def sums(self, batch: Any, values: Mapping[str, Array], routing: Routing | None = None) -> Sums:
        """`values` by the names of `metrics`, reduced over `batch`: sums over its tokens, or maxima, as they are declared."""
        largest = {metric.name for metric in self.metrics if metric.reduce == "max"}
        added = {name: value for name, value in values.items() if name not in largest}
        return Sums(self.denominator(batch), added, {name: values[name] for name in values if name in largest}, routing)
