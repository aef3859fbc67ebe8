"""maxlm: pretraining for transformers in JAX."""

__version__ = "0.1.0"
