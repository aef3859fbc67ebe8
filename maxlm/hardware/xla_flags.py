"""XLA flags of each chip, passed to the step's compile and never through the environment; `facts.toml` has them with the reasons."""

import os
import re
from importlib.metadata import version
from typing import Any, NamedTuple

from maxlm.hardware.chips import chip_of, facts


class Flag(NamedTuple):
    """A compiler option: its name, its value, and what it is for."""

    name: str
    value: bool | str
    why: str


VIRTUAL_DEVICES = "--xla_force_host_platform_device_count="  # devices that the CPU of a process is split into


def _group(name: str) -> tuple[Flag, ...]:
    return tuple(Flag(**flag) for flag in facts()["flags"][name])


VMEM, SPARSE_CORE, GPU = _group("vmem"), _group("sparse_core"), _group("gpu")
FLAGS = {chip["name"]: tuple(flag for group in chip["flags"] for flag in _group(group)) for chip in facts()["chip"]} | {
    "cpu": _group("cpu")
}
# For programs that are profiled: what runs in a command buffer (a CUDA graph) has no name of its own. Launched one by
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
    if traced and set(GPU) <= set(FLAGS.get(chip, ())):
        options |= {name: value for name, value in TRACED.items() if name not in set_there}
    return options


def options_of_device(device: Any, *, traced: bool = False) -> dict[str, str | bool]:
    """`compiler_options` for a device of jax, by its kind or else its platform."""
    chip = chip_of(device.device_kind)
    return compiler_options(chip.name if chip is not None else device.platform, traced=traced)
