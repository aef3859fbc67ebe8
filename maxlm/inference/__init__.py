"""Using what was trained."""

from maxlm.inference.generate import Sampler, generate

__all__ = ["Sampler", "generate"]
