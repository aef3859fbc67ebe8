"""Number formats, scales and quantized matmuls. Knows no mesh and no model."""

from maxlm.precision.dot import Parts, matmuls_saveable, quantized_dot
from maxlm.precision.emulated import emulated_dot, rotated
from maxlm.precision.formats import FORMATS, Format, Quantized, dequantize, noise_of, quantization, quantize
from maxlm.precision.gated import GatedShape, fuses, gated_dot
from maxlm.precision.grouped import ExpertWeight, expert_weight, grouped_dot
from maxlm.precision.weights import QuantizedWeight, quantized_weight

__all__ = [
    "FORMATS",
    "ExpertWeight",
    "Format",
    "GatedShape",
    "Parts",
    "Quantized",
    "QuantizedWeight",
    "dequantize",
    "emulated_dot",
    "expert_weight",
    "fuses",
    "gated_dot",
    "grouped_dot",
    "matmuls_saveable",
    "noise_of",
    "quantization",
    "quantize",
    "quantized_dot",
    "quantized_weight",
    "rotated",
]
