"""The device that kernels are chosen and compiled for, and its properties."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Ref = Any  # Pallas's reference to memory; `Index`: a number known when traced or when run
Index = Any

LANES = 128
WIDE = ("TPU v6 lite", "TPU7x")  # their matrix unit is 256 wide: a result as narrow as a head would fill half of it
VMEM_BYTES = {"TPU v5 lite": 100 << 20, "TPU v6 lite": 100 << 20, "TPU v5": 50 << 20, "TPU7x": 50 << 20}  # of 128 or 64 MiB a core
GPUS = ("gpu", "cuda")  # names of platforms with NVIDIA's GPUs
CORES = {"TPU v5": 2}  # of a device, where more than one: a parallel dim of the grid is split between them
RARELY = "rarely_turns"  # scope of a loop that a step enters hardly ever: `maxlm.hlo` counts no turn of it
_ONE_PASS = (None, "default", "fastest", "bfloat16")  # jax's names of the precision at which float32 is multiplied as bfloat16

_log = logging.getLogger(__name__)


def vmem_bytes(kind: str) -> int:
    """VMEM that a kernel may take on a kind of TPU; the most of all kinds where it is interpreted, on none."""
    return VMEM_BYTES.get(kind, max(VMEM_BYTES.values()))


def device() -> tuple[str, str]:
    """Platform and kind of the devices of the current mesh: programs are also compiled ahead of time, without the hardware."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.platform, abstract.device_kind
    platform = jax.default_backend()
    return platform, jax.devices()[0].device_kind if platform in GPUS else ""


def precision_problem() -> str:
    """Reason why no kernel for TPUs multiplies at the matmul precision in force; empty when they do.

    Dots inside a kernel inherit it. Pallas refuses "high" ("Unsupported dot precision: HIGH") for every dtype; "highest" does not compile
    for operands of 16 or 8 bits ("Bad lhs type"), and takes more VMEM than the kernels count for float32 (jax 0.10.2).
    """
    precision = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009 - its stubs lack it
    several = device()[0] == "tpu" and precision not in _ONE_PASS
    return f"the kernels have no matmuls of {precision} precision" if several else ""


def multiplied(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Operands of a matmul with a float32 result, in the dtype they are multiplied in: their own, but float32 on a CPU.

    XLA:CPU gives some bfloat16 matmuls with a float32 result to a library and some to code that refuses them when it runs ("Unsupported
    element type for DotThunk::Execute: BF16 x BF16 = F32", jax 0.10.2); which ones depends on shapes, layouts and the CPU. A product of two
    bfloat16 numbers is exact in float32, so the result is the same but for the order of the sum. Integers stay what they are.
    """
    if device()[0] != "cpu" or jnp.issubdtype(left.dtype, jnp.integer):
        return left, right
    if jnp.bfloat16 in (left.dtype, right.dtype):
        logged("matmuls with a float32 result", "in float32", "XLA:CPU refuses some in bfloat16")
    return left.astype(jnp.float32), right.astype(jnp.float32)


def computed_again(x: jax.Array) -> jax.Array:
    """x, of which XLA:GPU is to compute a second time what it has computed: it would keep exponentials in memory, in float32, until what
    waits for a sum or a maximum of them reads them, which takes longer.
    """
    return x * jax.lax.optimization_barrier(jnp.ones((), x.dtype)) if device()[0] in GPUS else x


@functools.cache
def logged(operation: str, chosen: str, reason: str) -> str:
    """`chosen`, the implementation of `operation`; logged once."""
    _log.info("%s: %s, since %s", operation, chosen, reason)
    return chosen


def choose_on_tpu(operation: str, requested: str | None, problem: str) -> str:
    """Choose "tpu" or "xla": as requested, or the kernel on a TPU that can run it. `problem`: reason why it cannot run; empty when it can.

    Raises ValueError where the kernel is requested and cannot run.
    """
    if requested == "tpu" and problem:
        raise ValueError(f"{operation}: tpu cannot run this: {problem}")
    if requested is not None:
        return requested
    if device()[0] != "tpu":
        return logged(operation, "xla", "the device is no TPU")
    return logged(operation, "xla" if problem else "tpu", problem or "the device is a TPU")


def on_each_device(run: Callable[..., Any], in_specs: tuple[PartitionSpec, ...], out_specs: Any, *, split: bool) -> Callable[..., Any]:
    """`run` on every device's share of operands that the current mesh splits as the specs say, if `split`.

    Inside a `jax.shard_map` over some axes a kernel needs one over the others, too, even where they split nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    inside = 0 < len(mesh.manual_axes) < len(mesh.axis_names)
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False) if split or inside else run
