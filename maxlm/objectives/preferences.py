"""Direct preference optimization (DPO; Rafailov 2023, arXiv 2305.18290, equation 7).

A pair is two segments of a row, the chosen response and then the rejected one, each with the prompt. Segments are numbered from 1 in a row,
so that the odd ones are chosen.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxlm.base.metric import Metric
from maxlm.config.sections.objective import DpoConfig
from maxlm.models import Decoder, DecoderOutput
from maxlm.models.decoder import unembedding_loss, unembedding_scores
from maxlm.objectives.objective import ArraySpec, Sums
from maxlm.objectives.supervised import FILLING, PackedRows

# B batch, S sequence, P pairs of a row at most, G segments of a row at most: 2 P, and 0 for padding


class PairBatch(NamedTuple):
    """`Batch`, and the reference's log-probability of every response at the first token of its segment, else 0."""

    tokens_BS: Any
    targets_BS: Any
    weights_BS: Any
    segment_ids_BS: Any
    positions_BS: Any
    reference_BS: Any  # float32
    random_BS: Any = None


class Preferences(PackedRows):
    """-log sigmoid(beta ((log p_c - log r_c) - (log p_r - log r_r))), a mean over the pairs of the global batch (with `diloco`, of each
    worker's rows): p of the model, r of the frozen reference, c the chosen and r the rejected response. With `label_smoothing` e, 1 - e
    times this and e times the loss of the pair the other way round (conservative DPO).
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "Loss", "nats a pair"),
        Metric("margin", "Reward of the chosen response above the reward of the rejected", "nats a pair"),
        Metric("accuracy", "Pairs with the larger reward for the chosen response", "share of pairs", console="accuracy {percent}"),
        Metric("chosen_reward", "Reward of the chosen response", "nats a pair"),
        Metric("rejected_reward", "Reward of the rejected response", "nats a pair"),
        *FILLING,
    )

    def batch_spec(self) -> Any:
        """Packed rows of [B, S], with the reference's log-probability of every segment's response."""
        *arrays, _ = super().batch_spec()
        return PairBatch._make([*arrays, ArraySpec(arrays[0].shape, jnp.float32, arrays[0].axes), None])

    def make_batch(self, window_BT: np.ndarray, length_B: np.ndarray, sample_B: np.ndarray, end_of_document: int) -> Any:
        """Packed rows of pairs; the reference's log-probabilities are filled in later."""
        *arrays, _ = super().make_batch(window_BT, length_B, sample_B, end_of_document)
        return PairBatch._make([*arrays, np.zeros(arrays[0].shape, np.float32), None])

    @property
    def untrained_loss(self) -> float:
        """Loss of the reference itself: ln 2, in nats a pair, whatever `label_smoothing` is."""
        return float(np.log(2))

    def denominator(self, batch: Any) -> Float[Array, ""]:
        """Pairs."""
        return jnp.sum(_pairs(batch)).astype(jnp.float32)

    def head(self, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Sums]:
        """The loss is a function of the tokens' log-probabilities: they have the gradient of a cross-entropy weighted by its slopes, so
        that all logits never exist at once.
        """
        hidden_BSD, table_VD, chunks = model.final_norm(output.x_BSD), model.unembedding_VD, self.config.train.loss_chunks
        options = {"chunks": chunks, "softcap": model.config.logits_softcap}
        nll_BS = unembedding_scores(self.config.precision, hidden_BSD, table_VD, batch.targets_BS, **options).nll_BS
        (loss, values), slopes_BS = jax.value_and_grad(self._loss, has_aux=True)(nll_BS, batch)
        weighted = unembedding_loss(self.config.precision, hidden_BSD, table_VD, batch.targets_BS, slopes_BS, **options).total
        return weighted + jax.lax.stop_gradient(loss - weighted), self.sums(batch, values, output.routing)

    def _loss(self, nll_BS: Float[Array, "B S"], batch: PairBatch) -> tuple[Float[Array, ""], dict[str, Array]]:
        """(loss, all figures), summed over the pairs of the batch."""
        settings = self.config.objective
        assert isinstance(settings, DpoConfig), "the table of objectives says so"
        ratio_BG = log_ratios(nll_BS, batch)
        chosen_BP, rejected_BP = (settings.beta * part for part in (ratio_BG[:, 1::2], ratio_BG[:, 2::2]))
        margin_BP = chosen_BP - rejected_BP
        right, wrong = jax.nn.softplus(-margin_BP), jax.nn.softplus(margin_BP)
        loss_BP = (1 - settings.label_smoothing) * right + settings.label_smoothing * wrong
        present_BP = jnp.arange(margin_BP.shape[1]) < _pairs(batch)[:, None]
        figures = {"loss": loss_BP, "margin": margin_BP, "accuracy": (margin_BP > 0).astype(jnp.float32)}
        figures |= {"chosen_reward": chosen_BP, "rejected_reward": rejected_BP}
        values = {name: jnp.sum(jnp.where(present_BP, figure_BP, 0)) for name, figure_BP in figures.items()}
        return values["loss"], values


class LogProbabilities(Preferences):
    """The figures, to be computed of the reference: the log-probability of every segment's response, [B, G]; pairs in every row, [B]."""

    def head(self, model: Decoder, output: DecoderOutput, batch: Any, summed: tuple[str, ...]) -> tuple[Float[Array, ""], Sums]:
        """(0: nothing is differentiated, log-probabilities and pairs)."""
        options = {"chunks": self.config.train.loss_chunks, "softcap": model.config.logits_softcap}
        nll_BS = unembedding_scores(
            self.config.precision, model.final_norm(output.x_BSD), model.unembedding_VD, batch.targets_BS, **options
        ).nll_BS
        return jnp.float32(0), self.sums(batch, {"log_probabilities": log_ratios(nll_BS, batch), "pairs": _pairs(batch)})


def log_ratios(nll_BS: Float[Array, "B S"], batch: PairBatch) -> Float[Array, "B G"]:
    """log p - log r of the response of every segment, 0 where there is none. Segments may be in any order along the sequence."""
    ratio_BS = -nll_BS * batch.weights_BS - batch.reference_BS
    segments = 2 * (ratio_BS.shape[1] // 2) + 1  # one has two tokens at least
    return jax.vmap(lambda ratio_S, ids_S: jnp.zeros(segments).at[ids_S].add(ratio_S))(ratio_BS, batch.segment_ids_BS)


def with_reference(batch: PairBatch, pairs: list[np.ndarray], reference: Float[np.ndarray, "N 2"]) -> PairBatch:
    """The host batch with the reference's log-probabilities. `pairs`: numbers of the pairs in each row; `reference`: (chosen, rejected).
    A row with a pair of unknown reference (NaN) becomes padding.
    """
    values_BS = np.zeros(batch.tokens_BS.shape, np.float32)
    known_B1 = np.array([not np.isnan(reference[numbers]).any() for numbers in pairs])[:, None]
    for row, numbers in enumerate(pairs):
        first = np.flatnonzero((batch.positions_BS[row] == 0) & (batch.segment_ids_BS[row] > 0))
        if len(first) and known_B1[row]:  # a row that touches a damaged chunk is all padding
            values_BS[row, first] = reference[numbers].ravel()
    *arrays, _, random = batch
    return PairBatch._make([*(array if known_B1.all() else array * known_B1.astype(array.dtype) for array in arrays), values_BS, random])


def _pairs(batch: PairBatch) -> Array:
    """Pairs of every row, [B]."""
    return jnp.max(batch.segment_ids_BS, axis=1) // 2
