"""Number formats, scales and quantized matmuls. Knows no mesh and no model."""

from maxlm.precision.formats import FORMATS, Format, Quantized, dequantize, noise_of, quantize

__all__ = ["FORMATS", "Format", "Quantized", "dequantize", "noise_of", "quantize"]
