"""Weights of 4 or 8 bits in published files: formats of the compressed-tensors library (vllm-project/compressed-tensors), and fp8 blocks.

Integers, `pack-quantized`: a matrix `x.weight` [outputs, inputs] is three tensors: `x.weight_packed`, int32 words of 32 / bits
neighbouring inputs each, the first in the lowest bits, as value + 2^(bits - 1); `x.weight_scale` [outputs, 1], or a column for each group
of inputs; and `x.weight_shape`, the two sizes. Floating point, `float-quantized`: `x.weight` in e4m3, and `x.weight_scale` [outputs, 1] or
one number for all.

Blocks, `quant_method: fp8` (DeepSeek-V3, arXiv 2412.19437, section 3.3; Kimi K2, Qwen3 FP8): `x.weight` in e4m3, and `x.weight_scale_inv`
[outputs / 128, inputs / 128], rounded up, by which the numbers of a block are multiplied; the sizes of a block are in the config.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
METHOD, INTEGERS, FLOATS = "compressed-tensors", "pack-quantized", "float-quantized"
QUANTIZED = (*BITS, "fp8")  # formats of `maxlm export --quantize`; fp8: e4m3
BLOCKS = "fp8"
METHODS = (METHOD, BLOCKS)
PACKED, SCALE, SHAPE, BLOCK_SCALE = "_packed", "_scale", "_shape", "_scale_inv"  # after the name of the matrix
_WEIGHTS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {  # values that are read, by format
    INTEGERS: {"num_bits": tuple(BITS.values()), "type": ("int",), "symmetric": (True,), "strategy": ("channel", "group")},
    FLOATS: {"num_bits": (8,), "type": ("float",), "symmetric": (True,), "strategy": ("channel", "tensor")},
}


_KNOWN = {"config_groups", "format", "global_compression_ratio", "ignore", "quant_method", "quantization_status", "version"}


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of a matrix of integers of so many bits, 4 or 8."""
    unsigned = (values.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    unsigned = np.pad(unsigned, ((0, 0), (0, -unsigned.shape[1] % (32 // bits))))
    in_bytes = unsigned if bits == 8 else unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return np.ascontiguousarray(in_bytes).view("<i4").astype(np.int32, copy=False)


def unpack(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """The inverse of `pack`."""
    unsigned = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 4:
        unsigned = np.stack([unsigned & 15, unsigned >> 4], axis=-1).reshape(len(words), -1)
    return (unsigned[:, :columns].astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def bits_of(shape: tuple[int, ...], words: tuple[int, ...]) -> int | None:
    """Bits of a value of a packed matrix; None where its sizes do not say, or fit neither 4 nor 8."""
    fitting = [bits for bits in BITS.values() if len(shape) == 2 and words == (shape[0], -(-shape[1] * bits // 32))]
    return fitting[0] if len(fitting) == 1 else None


def dequantized(words: np.ndarray, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The matrix in float32."""
    bits = bits_of(shape, words.shape)
    assert bits is not None, "checked when the file was opened"
    return unpack(words, bits, shape[1]).astype(np.float32) * np.repeat(scale, shape[1] // scale.shape[1], axis=1)


def block_size(section: Any) -> tuple[int, int] | None:
    """(outputs, inputs) of a block that has one scale, as a `quantization_config` says; None where there are no blocks."""
    size = section.get("weight_block_size") if isinstance(section, Mapping) and section.get("quant_method") == BLOCKS else None
    return (size[0], size[1]) if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size) else None


def scaled_by_block(values: np.ndarray, scale: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Dequantize a matrix of e4m3 blocks to float32. One row of blocks of scales is in memory at a time."""
    rows, columns = size
    matrix = values.astype(np.float32)
    for i, scale_of_row in enumerate(scale):
        matrix[i * rows : (i + 1) * rows] *= np.repeat(scale_of_row, columns)[: matrix.shape[1]]
    return matrix


def problem(section: Mapping[str, Any]) -> str:
    """Reason that a `quantization_config` of one of `METHODS` is not read, or ""."""
    if section.get("quant_method") != BLOCKS:
        return _compressed_problem(section)
    if more := [name for name, value in section.items() if name not in _BLOCK_KEYS and value not in (None, {}, [])]:
        return f"is not supported: {more[0]} in it may change what is computed"
    if block_size(section) is None:
        return f"is not supported: weight_block_size = {section.get('weight_block_size')!r} is not two sizes, as in [128, 128]"
    for name, values in _BLOCK_KEYS.items():
        if values and section.get(name, values[0]) not in values:
            return f"is not supported: {name} = {section[name]!r} is not {' or '.join(values)}"
    return ""


# Keys of `quant_method: fp8`, and the values that are read, the default first. Activations of the dynamic scheme are rounded in inference
# only; scales that are powers of two are stored in float32 (DeepSeek-V3.1); tensors themselves say which are not in e4m3.
_BLOCK_KEYS: Mapping[str, tuple[str, ...]] = {
    "quant_method": (BLOCKS,),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    **dict.fromkeys(("weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"), ()),
}


def _compressed_problem(section: Mapping[str, Any]) -> str:
    sparsity = section.get("sparsity_config")
    dense = {"sparsity_config"} if isinstance(sparsity, Mapping) and sparsity.get("format") == "dense" else set()
    if more := [name for name, value in section.items() if name not in _KNOWN | dense and value not in (None, {}, [])]:
        return f"is not supported: {more[0]} in it may change what is computed"
    groups = section.get("config_groups")
    wanted = _WEIGHTS.get(str(section.get("format")))
    if wanted is None or not isinstance(groups, dict):
        return f"is not supported: of {METHOD} only {' and '.join(_WEIGHTS)} are"
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or any(group.get(name) is not None for name in ("input_activations", "output_activations")):
            return "is not supported: only quantized weights are, without activations"
        for name, values in wanted.items():
            if weights.get(name) not in values:
                return f"is not supported: {name} = {weights.get(name)!r} of its weights is not {' or '.join(map(str, values))}"
    return ""
