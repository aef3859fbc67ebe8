"""XLA flags as data: for each chip, what is passed to the step's compile, and why. Never through the environment.

Figures: Llama-3.1-8B, 64 v5p chips, fsdp 64, batch 4 a chip, sequence 8192, read off the program compiled by libtpu 0.0.42.
"""

import os
import re
from importlib.metadata import version
from typing import NamedTuple


class Flag(NamedTuple):
    """A compiler option: its name, its value, and what it is for."""

    name: str
    value: bool | str
    why: str


VIRTUAL_DEVICES = "--xla_force_host_platform_device_count="  # devices that the CPU of a process is split into
CPU = (
    Flag(
        "xla_backend_optimization_level",
        "1",
        "the step is as fast as at 3 and compiled in 5/6 of the time, the initialisation in a third (jaxlib 0.10.2)",
    ),
    Flag(
        "xla_disable_hlo_passes",
        "all-reduce-promotion",
        "it aborts the process on a bfloat16 sum inside a shard_map (jaxlib 0.10.2: `Invalid binary instruction opcode copy`)",
    ),
)

VMEM = (
    Flag(
        "xla_tpu_scoped_vmem_limit_kib",
        "65536",
        "half of the chip's VMEM for one operation, not 16 MiB: matmuls of 0.287-0.320 s a step become 0.272, and attention's "
        "backward pass takes blocks of 4,096 keys",
    ),
)

WHOLE_MATMULS = (
    Flag(
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
        "1000000",
        "gather a weight, then multiply once; left alone, under fsdp and tensor each matmul becomes a ring of small ones that add up",
    ),
)

# v5e has no SparseCore: its TensorCore sends while it multiplies. (A reduce-scatter over two dims of its torus is an all-reduce.)
ASYNC_ALL_REDUCE = (
    Flag("xla_enable_async_all_reduce", True, "reduce gradients while other matmuls run"),
    Flag("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", True, "the same: inside the fusions of those matmuls"),
    Flag("xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call", True, "the same beside our kernels: attention, experts"),
)

# v4 and tpu7x have less VMEM and are left at the default.
# v5p, v6e and tpu7x have SparseCores, which move data while the TensorCore computes.
SPARSE_CORE = (
    Flag("xla_tpu_enable_sparse_core_collective_offload_all_reduce", True, "reduce gradients while the next layer's are computed"),
    Flag("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", True, "the same"),
    Flag("xla_tpu_enable_sparse_core_collective_offload_all_gather", True, "gather weights while the layer before computes"),
    Flag("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", True, "the same over both dims of a torus"),
    Flag("xla_tpu_enable_sparse_core_collective_offload_3d_all_gather", True, "the same over three dims, as on v5p"),
    Flag(
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
        True,
        "reduce-scatter gradients over several dims; left alone they are all-reduced, which moves twice the bytes",
    ),
    Flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce", False, "the TensorCore's way of doing it, which excludes the SparseCore's"
    ),
    Flag("xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter", False, "the same"),
    Flag("xla_tpu_enable_async_collective_fusion_fuse_all_gather", False, "the same"),
    Flag(
        "xla_tpu_prefer_async_allgather_to_allreduce",
        True,
        "gather weights as all-gathers; left alone, each is written into zeros and all-reduced, which costs 0.27 s of clearing memory "
        "and twice the bytes (acts only beside the offloads above)",
    ),
)

# Measured on one GPU only, where nothing is communicated. NVIDIA explains all but the last
# (docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance).
GPU = (
    Flag("xla_gpu_enable_latency_hiding_scheduler", True, "start collectives early and wait for them late"),
    Flag("xla_gpu_enable_pipelined_all_gather", True, "gather a layer's weights while the layer before computes"),
    Flag("xla_gpu_enable_pipelined_reduce_scatter", True, "reduce a layer's gradients while the next one's are computed"),
    Flag("xla_gpu_enable_pipelined_all_reduce", True, "the same, where gradients are not split"),
    Flag("xla_gpu_enable_while_loop_double_buffering", True, "two layers an iteration, so that pipelining copies nothing"),
    Flag("xla_gpu_all_gather_combine_threshold_bytes", "1073741824", "one message for the matrices of a layer"),
    Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", "134217728", "the same, small enough to start before the whole layer is done"),
    Flag("xla_gpu_all_reduce_combine_threshold_bytes", "134217728", "the same"),
    Flag(
        "xla_gpu_enable_dynamic_slice_fusion",
        False,
        "left alone, a kernel or a library's matmul whose result is kept for the backward pass runs twice: once into the stack of all "
        "layers' results and once for the rest of the layer (1B on an H200: attention's forward kernel 32 times in 16 layers)",
    ),
    Flag(
        "xla_gpu_memory_limit_slop_factor",
        "200",
        "a limit twice as high for XLA's own rematerialisation, whose estimate is 1.7 times what is allocated in the end: without it "
        "matmuls are computed again that had room (1B on an H200, 16 x 8,192 tokens: 2.21 s of them, not 1.31; compiled by jaxlib 0.10.2)",
    ),
)

# cuBLAS's speed was measured on an H200 only.
HOPPER = (
    *GPU,
    Flag(
        "xla_gpu_enable_triton_gemm",
        False,
        "matmuls by cuBLAS: the search among Triton's did not end in 170 s on an H200, the step of 1B is compiled in 12 s without it; "
        "int8 weights are then widened by a kernel of their own (not measured)",
    ),
)

FLAGS: dict[str, tuple[Flag, ...]] = {
    "cpu": CPU,
    "v4": WHOLE_MATMULS,
    "v5e": WHOLE_MATMULS + VMEM + ASYNC_ALL_REDUCE,
    "v5p": WHOLE_MATMULS + VMEM + SPARSE_CORE,
    "v6e": WHOLE_MATMULS + VMEM + SPARSE_CORE,
    "tpu7x": WHOLE_MATMULS + SPARSE_CORE,
    **dict.fromkeys(("A100-40GB", "A100-80GB", "B200"), GPU),
    **dict.fromkeys(("H100", "H200"), HOPPER),
}
# Of programs whose operations a profile is to name: what runs in a command buffer (a CUDA graph) has no name of its own. Launched one by
# one, 1B on an H200 leaves the device idle for 0.4% of a step (fp8: 0.8%).
TRACED = {"xla_gpu_enable_command_buffer": ""}
# Since jaxlib 0.11 these are modes with names of their own, and the old names, unknown, would end the compilation.
SINCE_0_11 = {
    f"xla_gpu_enable_pipelined_{kind}": (f"xla_gpu_pipeline_{kind}", "COLLECTIVE_PIPELINING_MODE_ON")
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}


def compiler_options(chip: str, jaxlib: str = "", *, traced: bool = False) -> dict[str, str | bool]:
    """The options of every program compiled for `chip`: its name in `chips`, or "cpu". Empty if none are needed.

    A flag that the environment's XLA_FLAGS set is left out: the option would override them. `jaxlib`: its version, the installed one if
    empty. `traced`: a profile is to name every operation.
    """
    set_there = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    is_new = tuple(map(int, (jaxlib or version("jaxlib")).split(".")[:2])) >= (0, 11)
    options: dict[str, str | bool] = {}
    for flag in FLAGS.get(chip, ()):
        name, value = SINCE_0_11.get(flag.name, (flag.name, flag.value)) if is_new else (flag.name, flag.value)
        if not {flag.name, name} & {*set_there}:
            options[name] = value
    if traced and FLAGS.get(chip) in (GPU, HOPPER):
        options |= {name: value for name, value in TRACED.items() if name not in set_there}
    return options
