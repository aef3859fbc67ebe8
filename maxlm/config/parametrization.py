"""Hyperparameters that transfer: tuned on a small model, and read by larger ones with `model.parametrization` (docs/transfer.md)."""

from typing import Literal, NamedTuple

from maxlm.config.fields import Positive, Section


class ParametrizationConfig(Section):
    """muP or CompleteP: `init_std`, `peak_lr`, `weight_decay` and `eps` are those of a base model, which is this one with every width
    (d_model, d_ff, heads x head_dim, latent ranks, those of experts) divided by d_model / base_width. Numbers of experts stay.
    """

    kind: Literal["mup", "completep"]  # widths (arXiv 2203.03466), or widths and depths (arXiv 2505.01618, with its alpha = 1)
    base_width: Positive  # d_model of the base model
    base_depth: Positive | None = None  # n_layers of the base model, for completep
    base_head_dim: Positive | None = None  # None: that of this model, and the base model has fewer heads

    def multipliers(self, width: int, depth: int, head_dim: int) -> "Multipliers":
        """Factors of the forward pass of a model of this size."""
        residual = 1.0 if self.base_depth is None else self.base_depth / depth
        attention = 1.0 if self.base_head_dim is None else (head_dim / self.base_head_dim) ** -0.5
        return Multipliers((width / self.base_width) ** -0.5, self.base_width / width, residual, attention)


class Multipliers(NamedTuple):
    """Factors of activations in the forward pass, relative to a standard model."""

    embedding: float = 1.0  # of embeddings that are scaled by the root of the width
    output: float = 1.0  # of hidden states after a final norm
    residual: float = 1.0  # of the output of every sublayer
    attention: float = 1.0  # of scores


STANDARD = Multipliers()
