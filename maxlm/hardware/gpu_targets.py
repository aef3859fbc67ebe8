"""GPUs as XLA's compiler describes them, to compile for one ahead of time."""

from maxlm.hardware.chips import Chip

# stream_executor's GpuTargetConfigProto, as NVIDIA's H100 white paper, the H200 data sheet and XLA's own
# descriptions (xla/backends/gpu/target_config/specs) have it.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
"""
DESCRIBED = ("H100", "H200")


def target_config(chip: Chip) -> str:
    """The description of `chip`, one of `DESCRIBED`, as a text-format protobuf."""
    return _HOPPER.format(bandwidth=chip.hbm_bytes_per_s, memory=chip.driver_bytes, kind=chip.device_kinds[0])
