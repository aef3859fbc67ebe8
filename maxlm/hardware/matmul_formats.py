"""Speed of matmuls with 8-bit operands on each chip, relative to bfloat16. No jax here.

TPUs: estimated cycles of XLA's own code (libtpu 0.0.42) for one matmul of 4096^3, November 2026. GPUs: peaks of NVIDIA's data sheets,
dense. A format that is not there has no matrix unit of its own: XLA computes it in bfloat16.
"""

from collections.abc import Mapping

SPEEDS: Mapping[str, Mapping[str, float]] = {
    "v5p": {"int8": 1.97, "e4m3": 0.97},
    "v6e": {"int8": 1.28, "e4m3": 0.92},
    "tpu7x": {"int8": 0.96, "e4m3": 2.09},
    "v4": {"int8": 1.0},  # docs.cloud.google.com/tpu/docs/v4: 275 TFLOP/s in bf16 or int8
    "v5e": {"int8": 2.0},  # docs.cloud.google.com/tpu/docs/v5e: 197 TFLOP/s in bf16, 393 in int8
    "A100-40GB": {"int8": 2.0},
    "A100-80GB": {"int8": 2.0},
    "H100": {"int8": 2.0, "e4m3": 2.0},
    "H200": {"int8": 2.0, "e4m3": 2.0},
    "B200": {"int8": 2.0, "e4m3": 2.0},
}
WORTH = 1.1  # the speed from which on quantizing operands pays for itself


def matmul_speed(chip: str, element: str) -> float | None:
    """Speed of a matmul whose operands are in the format `element`, relative to bfloat16; None for an unknown chip."""
    speeds = SPEEDS.get(chip)
    return None if speeds is None else speeds.get(element, 1.0)
