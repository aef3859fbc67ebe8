"""Interface of an objective (contents of a batch, the loss on hidden states, the metrics that are reported), and next-token prediction."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxlm.base.metric import Metric
from maxlm.config.schema import Config
from maxlm.data.batch import Batch, batch_of_windows
from maxlm.kernels import CrossEntropySums
from maxlm.models import BlockContext, Decoder, DecoderOutput, Parameters, Routing, bind, cast_matrices
from maxlm.models.decoder import unembedding_loss
from maxlm.models.layers import Scan
from maxlm.parallel import constrain, context_size
from maxlm.parallel.context import in_sequence

# B batch, S sequence, T = S + 1, D model width


class ArraySpec(NamedTuple):
    """One array of a batch: its global shape, and the logical axes by which it is split over the mesh."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


class Sums(NamedTuple):
    """Figures of a batch or a part of it, float32, by their declared names. `added`: sums, and numerators of means; `largest`: maxima."""

    denominator: Float[Array, ""]  # of means: tokens that count, or as the objective says
    added: dict[str, Array]
    largest: dict[str, Array]
    routing: Routing | None = None  # of layers with experts

    def values(self, metrics: Iterable[Metric]) -> dict[str, Array]:
        """The figures of the whole batch: means are divided by `denominator`, or by the sum that their declaration names."""
        got, per = {**self.added, **self.largest}, {"": self.denominator, **self.added}
        return {m.name: got[m.name] / jnp.maximum(per[m.per], 1) if m.reduce == "mean" else got[m.name] for m in metrics if m.name in got}

    def plus(self, other: "Sums") -> "Sums":
        """Figures of both parts."""
        sums = jax.tree.map(jnp.add, self._additive(), other._additive())
        return sums._replace(largest=jax.tree.map(jnp.maximum, self.largest, other.largest))

    def over_devices(self, axes: tuple[str, ...]) -> "Sums":
        """Figures of all devices along the mesh `axes`, inside a `jax.shard_map`."""
        return jax.lax.psum(self._additive(), axes)._replace(largest=jax.lax.pmax(self.largest, axes))

    def over_leading_dim(self) -> "Sums":
        """Figures of all parts that are stacked along a leading dim."""
        sums = jax.tree.map(lambda a: jnp.sum(a, 0), self._additive())
        return sums._replace(largest=jax.tree.map(lambda a: jnp.max(a, 0), self.largest))

    def empty(self) -> "Sums":
        """Figures of no token, with these shapes and dtypes."""
        sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._additive())
        return sums._replace(largest=jax.tree.map(lambda a: jnp.full(a.shape, -jnp.inf, a.dtype), self.largest))

    def _additive(self) -> "Sums":
        return self._replace(largest={})


class Objective(ABC):
    """A training objective. A batch is a NamedTuple of arrays with the fields `tokens_BS`, first, `positions_BS`,
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
    def head(self, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Sums]:
        """(sum that is differentiated, figures) from the output of all blocks. `summed`: as in `BlockContext`."""

    def loss(
        self,
        params: Parameters,
        model_state: Parameters,
        batch: Any,
        *,
        summed: tuple[str, ...] = (),
        scan: Scan | None = None,
        training: bool = True,
    ) -> tuple[Float[Array, ""], Sums]:
        """(sum over the batch that is differentiated, routers' losses included; figures of the batch). `summed`, `scan`: as in
        `BlockContext`.
        """
        config, batch = self.config, self.inputs(batch, training=training)
        model = bind(config.model, cast_matrices(config.model, config.precision.compute, params), model_state)
        with jax.default_matmul_precision(config.precision.float32_matmul):
            x_BSD = model.embed(batch.tokens_BS, batch.positions_BS)
            output = model.run(x_BSD, self.context(model, batch, summed, scan))
            total, sums = self.head(model, output, batch, summed)
        return total + output.aux_loss, sums

    @property
    def untrained_loss(self) -> float:
        """Loss of a model that has learned nothing: ln(vocabulary), in nats a token."""
        return float(np.log(self.config.model.vocab_size))

    def inputs(self, batch: Any, *, training: bool = True) -> Any:
        """The batch that the model reads. Where the mesh splits the sequence, it is in the order that attention wants: positions travel
        along with tokens, and a sum over tokens needs no order.
        """
        if context_size() == 1:
            return batch
        return jax.tree.map(lambda x: in_sequence(x, self.config.mesh.context_attention, back=True) if x.ndim > 1 else x, batch)

    def with_randomness(self, batch: Any, step: Int[Array, ""]) -> Any:
        """The global batch of an update with the seed of every token's router jitter: a function of (seed, step, position in the batch)."""
        moe = self.config.model.moe
        if moe is None or not moe.router.jitter:
            return batch
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), step)
        return batch._replace(random_BS=constrain(jax.random.bits(key, batch.tokens_BS.shape, jnp.uint32), "batch", "seq"))

    def context(self, model: Decoder, batch: Any, summed: tuple[str, ...] = (), scan: Scan | None = None) -> BlockContext:
        """Inputs shared by all blocks, and the options of the forward pass."""
        return BlockContext(
            model.angles(batch.positions_BS, batch.segment_ids_BS),
            batch.segment_ids_BS,
            batch.random_BS,
            precision=self.config.precision,
            memory=self.config.memory,
            scan=scan,
            strategy=self.config.mesh.context_attention,
            summed=summed,
        )

    def sums(self, batch: Any, values: Mapping[str, Array], routing: Routing | None = None) -> Sums:
        """Sort `values`, already reduced over the tokens of `batch`, into sums and maxima, as `metrics` declares them by name."""
        largest = {metric.name for metric in self.metrics if metric.reduce == "max"}
        added = {name: value for name, value in values.items() if name not in largest}
        return Sums(self.denominator(batch), added, {name: values[name] for name in values if name in largest}, routing)


class NextToken(Objective):
    """Next-token prediction: nll + train.z_loss * logsumexp^2 of every token, a mean over tokens with their target in the same document."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "Loss", "nats a token"),
        Metric("z", "Squared logsumexp of the logits", "mean a token"),
    )

    def batch_spec(self) -> Any:
        """Arrays of [B, S], split by rows and along the sequence."""
        shape, axes = (self.config.train.global_batch, self.config.data.seq_len), ("batch", "seq")
        integers, floats = ArraySpec(shape, jnp.int32, axes), ArraySpec(shape, jnp.float32, axes)
        return Batch(tokens_BS=integers, targets_BS=integers, weights_BS=floats, segment_ids_BS=integers, positions_BS=integers)

    def make_batch(self, window_BT: np.ndarray, length_B: np.ndarray, sample_B: np.ndarray, end_of_document: int) -> Batch:
        """Inputs and targets from windows of S + 1 tokens."""
        return batch_of_windows(window_BT, length_B, end_of_document, mask_documents=self.config.data.mask_documents)

    def denominator(self, batch: Batch) -> Float[Array, ""]:
        """Number of tokens that have a target in the same document."""
        return jnp.sum(batch.weights_BS)

    def head(self, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Sums]:
        """(sum over tokens that is differentiated, figures): the final norm, then cross-entropy."""
        sums = self.cross_entropy(model, model.final_norm(output.x_BSD), batch)
        return sums.total, self.sums(batch, {"loss": sums.nll, "z": sums.z}, output.routing)

    def cross_entropy(self, model: Decoder, hidden_BSD: Array, batch: Batch) -> CrossEntropySums:
        """Sums over the tokens of `batch`, from hidden states after the final norm."""
        train = self.config.train
        options = {"chunks": train.loss_chunks, "z_loss": train.z_loss, "softcap": model.config.logits_softcap}
        return unembedding_loss(self.config.precision, hidden_BSD, model.unembedding_VD, batch.targets_BS, batch.weights_BS, **options)
