"""Operations that make the step fast. Each folder is one operation: its definition, its implementations, one public function."""

from maxlm.kernels.attention import attention, attention_and_logsumexp
from maxlm.kernels.grouped_matmul import (
    SCALED_ROWS,
    GradientScales,
    ProductScales,
    grouped_matmul,
    quantized_grouped_matmul,
    quantized_weights_gradient,
)
from maxlm.kernels.linear_cross_entropy import CrossEntropySums, LossFormats, TokenScores, linear_cross_entropy, token_scores
from maxlm.kernels.matmul import MlpLayout, gated_mlp, gated_mlp_problem
from maxlm.kernels.quantize import GatedLayout, Quantization, gated_gradient_rows, gated_rows, quantize_columns, quantize_rows

__all__ = [
    "SCALED_ROWS",
    "CrossEntropySums",
    "GatedLayout",
    "GradientScales",
    "LossFormats",
    "MlpLayout",
    "ProductScales",
    "Quantization",
    "TokenScores",
    "attention",
    "attention_and_logsumexp",
    "gated_gradient_rows",
    "gated_mlp",
    "gated_mlp_problem",
    "gated_rows",
    "grouped_matmul",
    "linear_cross_entropy",
    "quantize_columns",
    "quantize_rows",
    "quantized_grouped_matmul",
    "quantized_weights_gradient",
    "token_scores",
]
