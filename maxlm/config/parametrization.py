"""Hyperparameters that transfer: tuned on a small model, and read by larger ones with `model.parametrization` (docs/transfer.md)."""

from typing import Literal

from maxlm.config.fields import Positive, Section


class ParametrizationConfig(Section):
    """muP or CompleteP: `init_std`, `peak_lr`, `weight_decay` and `eps` are those of a base model, which is this one with every width
    (d_model, d_ff, heads x head_dim, latent ranks, those of experts) divided by d_model / base_width. Numbers of experts stay.
    """

    kind: Literal["mup", "completep"]  # widths (arXiv 2203.03466), or widths and depths (arXiv 2505.01618, with its alpha = 1)
    base_width: Positive  # d_model of the base model
    base_depth: Positive | None = None  # n_layers of the base model, for completep
    base_head_dim: Positive | None = None  # None: that of this model, and the base model has fewer heads
