"""Text generation with a trained model."""

from maxlm.inference.generate import Sampler, generate

__all__ = ["Sampler", "generate"]
