"""maxlm: pretraining for transformers in JAX."""

__version__ = "0.2.0.dev0"
