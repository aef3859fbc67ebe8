"""`maxlm export --quantize`: choice of matrices to pack, and their rounding, the same as in training (`maxlm.precision`)."""

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from maxlm.config import UserError
from maxlm.config.schema import ModelConfig, PrecisionConfig
from maxlm.config.sections.matmul import QuantizedConfig, QuantizedMatrix
from maxlm.interop.families.decoder import UNEMBEDDING
from maxlm.interop.layouts import Linear, Reordered
from maxlm.interop.packed import BITS, FLOATS, INTEGERS, METHOD, PACKED, QUANTIZED, SCALE, SHAPE, pack
from maxlm.interop.weights import Piece, Target
from maxlm.models.stack import within_layer
from maxlm.precision import quantized_weight

MATRICES = set(get_args(QuantizedMatrix))
PackedFormat = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class Packing:
    """The matrices of an export that are packed, by the names of their tensors, and how they are rounded. `kept`: all other matrices."""

    format: PackedFormat
    names: frozenset[str]
    kept: tuple[str, ...]
    rounding: QuantizedConfig
    dtype: str  # in which they are rounded: with quantization-aware training as the forward pass read them

    def tensors(self, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of a matrix [outputs, inputs] of float32."""
        w_CO = jax.device_put(value, SingleDeviceSharding(jax.devices("cpu")[0])).astype(self.dtype).T
        form = quantized_weight(self.rounding, w_CO, 0, 1).form
        assert form is not None, "there is one scale for each output"
        scale_O1 = np.ascontiguousarray(np.asarray(form.scale).T)
        if not np.isfinite(scale_O1).all():
            raise UserError(f"{name} holds numbers that are not finite: it cannot be rounded to {self.format}.")
        values = np.asarray(form.values).T
        if self.format == "fp8":
            return {name: np.ascontiguousarray(values), name + SCALE: scale_O1}
        packed = pack(values, BITS[self.format])
        return {name + PACKED: packed, name + SCALE: scale_O1, name + SHAPE: np.array(value.shape, np.int64)}

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the tensors of a matrix."""
        if self.format == "fp8":
            return shape[0] * (shape[1] + 4)
        return 4 * shape[0] * (-(-shape[1] * BITS[self.format] // 32) + 1) + 16

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        kind = {"num_bits": BITS.get(self.format, 8), "type": "float" if self.format == "fp8" else "int"}
        scheme = {**kind, "symmetric": True, "strategy": "channel", "dynamic": False}
        group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
        ignore = [name.removesuffix(".weight") for name in self.kept]
        named = {"quant_method": METHOD, "format": _stored_as(self.format), "quantization_status": "compressed"}
        return {**named, "config_groups": {"group_0": group}, "ignore": ignore}


def packing_of(model: ModelConfig, precision: PrecisionConfig, found: list[Target], quantize: str) -> Packing:
    """Choose the matrices to pack: the matrices of layers that `precision.matmul` may quantize, or where the run was trained in the same
    format, the ones that it did. Raises UserError for a format or a matrix that cannot be stored so.
    """
    if quantize not in QUANTIZED:
        raise UserError(f"--quantize {quantize} is not one of {', '.join(QUANTIZED)}.")
    format = cast("PackedFormat", quantize)
    matmul = precision.matmul
    aware = matmul is not None and matmul.format == format
    rounding = matmul if matmul is not None and aware else QuantizedConfig(format=format, weights_only=True)
    for name, value in (("hadamard", rounding.hadamard), ("scaling", None if rounding.scaling == "channel" else rounding.scaling)):
        if value is not None:
            rule = f"the run was trained with precision.matmul.{name} = {value}, and {_stored_as(format)} has one scale for each output"
            raise UserError(f"--quantize {format}: {rule}{' of weights that are not rotated' if name == 'hadamard' else ''}: leave it out.")
    names, kept = set[str](), [UNEMBEDDING]
    for target in found:
        matrix = target.name[-1].rpartition("_")[0]
        if matrix in MATRICES and (not _is_linear(target) or target.rule.per_expert):
            why = "it is one of experts" if target.rule.per_expert else "this family stores it inputs first"
            raise UserError(f"--quantize {format}: {target.pieces[0].theirs} is not the weight of a Linear layer ({why}): leave it out.")
        high = matrix not in MATRICES or matrix in rounding.skip
        for piece in target.pieces if _is_linear(target) else ():
            if high or _kept_high(model, rounding, target, piece):
                kept.append(piece.theirs)
            else:
                names.add(piece.theirs)
    packed = frozenset(names - set(kept))  # of several matrices in one tensor all or none are
    return Packing(format, packed, tuple(dict.fromkeys(kept)), rounding, precision.compute if aware else "float32")


def _stored_as(format: PackedFormat) -> str:
    """Name of the library's format."""
    return FLOATS if format == "fp8" else INTEGERS


def _is_linear(target: Target) -> bool:
    layout = target.rule.layout
    return target.rule.per_layer and isinstance(layout.layout if isinstance(layout, Reordered) else layout, Linear)


def _kept_high(model: ModelConfig, rounding: QuantizedConfig, target: Target, piece: Piece) -> bool:
    """True for a matrix of the first or last layers that are not quantized."""
    within = within_layer(model, target.name)
    assert within is not None, "it is of a layer"
    depths = within[1]
    depth = int(depths[piece.index[: depths.ndim]])
    return not rounding.first_layers <= depth < model.n_layers - rounding.last_layers
