"""Compile the training step ahead of time, without the hardware.

libtpu contains the whole compiler and needs no chip: it accepts or refuses flags and kernels, schedules, and lays out memory as it would on
the pod. So does jax's CUDA plugin for GPUs, except that XLA measures some choices on the chip (above all how matrices are multiplied) and
takes defaults without one. Results are cached on disk, under a key of everything that they depend on.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlm.base.errors import UserError
from maxlm.base.installing import install_command
from maxlm.compiler import gpu_compiler, program_cache
from maxlm.compiler.hidden_stderr import hidden_stderr
from maxlm.config.schema import Config
from maxlm.hardware.chips import GPU_MEMORY_SHARE
from maxlm.hardware.topologies import Topology, near
from maxlm.hardware.xla_flags import VIRTUAL_DEVICES

if TYPE_CHECKING:
    import jax

    from maxlm.training.program import Program

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_SIZE = r"(\d+(?:\.\d+)?)([KMGTP]?)"
_TOO_BIG = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)|Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE)
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM of one device, as XLA reports them. `alias`: outputs that take the place of arguments. `host`: bytes of host memory.

    `temp` includes what fragmentation wastes, `peak` (arguments and temporaries at the fullest moment) includes what lies in VMEM.
    """

    argument: int
    output: int
    alias: int
    temp: int
    code: int
    peak: int
    host: int

    @property
    def used(self) -> int:
        """Bytes that the step needs at its peak, its code included."""
        from maxlm.memory.spaces import needed_on_device

        return needed_on_device(self.argument + self.output - self.alias + self.temp, self.peak, self.code)


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step. If it does not fit, `memory` is None and `text` empty."""

    text: str  # the scheduled program
    memory: Memory | None
    needed: int  # bytes of HBM of one device
    available: int  # bytes of HBM that the runtime leaves to programs on one device
    seconds: float  # that the compiler took, when it ran
    cached: bool = False
    machine_code: bool = True  # False: scheduled only, so XLA has not stated the cycles of matmuls

    @property
    def fits(self) -> bool:
        """True if the program fits into the HBM of a device."""
        return self.memory is not None

    @property
    def missing(self) -> int:
        """Bytes of HBM by which it does not fit; 0 when it does."""
        return 0 if self.fits else max(self.needed - self.available, 0)


def leave_chips_alone() -> None:
    """Make jax use the CPU, best before it is imported, and keep libtpu from querying the cloud's metadata and from claiming chips."""
    os.environ.update(_ENVIRONMENT)
    import jax

    jax.config.update("jax_platforms", "cpu")


def build(config: Config, topology: Topology) -> "Program":
    """The training program of `config` on the devices of `topology`. Raises ConfigError when its mesh does not match them."""
    all_devices = devices(topology)  # first: it raises where the compiler is missing
    from maxlm.parallel import build_mesh
    from maxlm.training.program import build_program

    return build_program(config, build_mesh(config, all_devices))


def why_not(topology: Topology) -> str:
    """Reason why nothing can be compiled for `topology` here although its time can be estimated; empty if it can (TPUs: assumed)."""
    return "" if topology.is_tpu else gpu_compiler.missing()


def compile_step(config: Config, topology: Topology, options: Mapping[str, str | bool] | None = None) -> CompiledStep:
    """The step of `config`, compiled for `topology` or read from the cache; `options` override those that training passes.

    Raises UserError without the compiler, for a topology unknown to it, and for a mesh that does not match.
    """
    return compile_program(build(config, topology), topology, options)


def compile_program(program: "Program", topology: Topology, options: Mapping[str, str | bool] | None = None) -> CompiledStep:
    """`compile_step` of a program that `build` made."""
    job = prepare(program, topology, options)
    step = cached_step(job.key)
    if step is None:
        step = compile_job(job)
        keep_step(job.key, step)
    return step


@dataclass(frozen=True)
class Job:
    """A program for the compiler. `key`: of everything its result depends on; `resident`: further bytes in use."""

    lowered: "jax.stages.Lowered"
    topology: Topology
    options: Mapping[str, str | bool]
    key: str
    resident: int

    @property
    def available(self) -> int:
        """Bytes of HBM that it may use, with `resident` bytes taken off."""
        return available_hbm(self.topology)


def prepare(program: "Program", topology: Topology, options: Mapping[str, str | bool] | None = None) -> Job:
    """Lower a program that `build` made; `options` override those that training passes."""
    with _without_locations():
        lowered = program.lower()
    if not topology.is_tpu:
        gpu_compiler.show_tools()
    given = {**program.compiler_options, **(options or {})}
    resident = program.placement.resident_bytes
    key = _key(lowered.as_text(), [device.id for device in program.mesh.devices.flat], topology, given, resident)
    return Job(lowered, topology, given, key, resident)


def cached_step(key: str) -> CompiledStep | None:
    """The step that was kept under `key`; None if there is none."""
    cached = program_cache.read(key)
    if cached is None:
        return None
    figures, text = cached
    memory, machine_code = Memory(**figures["memory"]) if figures["memory"] else None, figures.get("machine_code", True)
    return CompiledStep(text, memory, figures["needed"], figures["available"], figures["seconds"], cached=True, machine_code=machine_code)


def keep_step(key: str, step: CompiledStep) -> None:
    """Write `step` to the cache."""
    figures = {"memory": vars(step.memory) if step.memory else None, "needed": step.needed, "available": step.available}
    program_cache.write(key, {**figures, "seconds": step.seconds, "machine_code": step.machine_code}, step.text)


@contextmanager
def _without_locations() -> Iterator[None]:
    """Lower without lines of Python: they are in the bytecode of Pallas kernels, and a comment in a kernel's file would miss the cache."""
    import jax

    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


@lru_cache
def available_hbm(topology: Topology) -> int:
    """Bytes of HBM that a program may use on one device.

    XLA:TPU states it when it refuses a program that no chip can hold. XLA:GPU refuses none: it is the share that our runs let jax take.
    """
    if not topology.is_tpu:
        assert topology.chip.driver_bytes is not None, "stated of every GPU"
        return int(GPU_MEMORY_SHARE * topology.chip.driver_bytes)
    import jax
    import jax.numpy as jnp

    sharding = jax.sharding.SingleDeviceSharding(devices(topology)[0])
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32, sharding=sharding)
    with hidden_stderr():
        try:
            jax.jit(lambda x: x + 1).lower(huge).compile()
        except jax.errors.JaxRuntimeError as error:
            sizes = _needed_and_available(str(error))
            if sizes is not None:
                return sizes[1]
    return topology.chip.hbm_bytes_per_device


def compile_job(job: Job) -> CompiledStep:
    """The step of `job`, with its machine code. Raises JaxRuntimeError for a flag or a kernel that the compiler refuses."""
    import jax

    from maxlm.memory.spaces import peak_on_device

    started = time.monotonic()
    try:
        with warnings.catch_warnings():  # jax's own cache, if JAX_COMPILATION_CACHE_DIR is set, cannot read these programs
            warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache")
            compiled = job.lowered.compile(compiler_options=dict(job.options))
    except jax.errors.JaxRuntimeError as error:
        sizes = _needed_and_available(str(error))
        if sizes is None:  # not about memory: a flag or a kernel that the compiler rejects
            raise
        return CompiledStep("", None, sizes[0] + job.resident, sizes[1], seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    stats, text = compiled.memory_analysis(), compiled.as_text()
    assert stats is not None and text is not None, "XLA states both for every program"
    memory = Memory(
        argument=stats.argument_size_in_bytes + job.resident,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=peak + job.resident if (peak := peak_on_device(stats)) else 0,
        host=stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    )
    return in_memory(text, memory, job.available, seconds, machine_code=True)


def in_memory(text: str, memory: Memory, available: int, seconds: float, *, machine_code: bool) -> CompiledStep:
    """The step with that `memory`, without its program if there is less available."""
    fits = memory.used <= available
    return CompiledStep(text if fits else "", memory if fits else None, memory.used, available, seconds, machine_code=machine_code)


def _needed_and_available(message: str) -> tuple[int, int] | None:
    """(needed, available) bytes of HBM out of XLA's out-of-memory message; None for another message."""
    match = _TOO_BIG.search(message)
    if match is None:
        return None
    numbers = [group for group in match.groups() if group is not None]
    sizes = [round(float(size) * _UNITS[unit.upper()]) for size, unit in zip(numbers[::2], numbers[1::2], strict=True)]
    return sizes[0], sizes[1]


@lru_cache
def devices(topology: Topology) -> tuple["jax.Device", ...]:
    """The devices of `topology`, without the hardware. Raises UserError if the compiler is missing or does not know the topology."""
    if not topology.is_tpu:
        return gpu_compiler.devices(topology)
    if importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
        raise UserError(f"libtpu, which holds the TPU compiler, is not installed: run {install_command('tpu')} (no TPU is needed).")
    leave_chips_alone()
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    settings: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.chip.name == "v4":
        settings["chip_config_name"] = "megacore"  # two cores that work as one device, as on Cloud TPU
    if set(topology.sides) == {1}:
        settings["chips_per_host_bounds"] = [1, 1, 1]
    try:
        with hidden_stderr():
            described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **settings)
    except JaxRuntimeError as error:
        choices = ", ".join(near(topology.chip, topology.chips // topology.slices))
        raise UserError(f"libtpu does not have {topology.name} ({str(error).splitlines()[0]}): near it there are {choices}.") from None
    return tuple(described.devices)


def _key(program: str, devices: list[int], topology: Topology, options: Mapping[str, str | bool], resident: int) -> str:
    """A digest of everything that the compiled program depends on. The 1 is the version of the cache's format.

    Call after `devices`, which puts the compiler for GPUs where its version is found. Of GPUs the available memory is ours to state, and no
    part of the compiler.
    """
    versions = ["1", *map(_version, ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "nvidia-cuda-nvcc"))]
    machine = "" if topology.is_tpu else f"{gpu_compiler.target_of(topology.chip)} {available_hbm(topology)}"
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(VIRTUAL_DEVICES)]
    given = [os.environ.get("LIBTPU_INIT_ARGS", ""), flags, *_library()]
    facts = json.dumps([versions, topology.name, machine, topology.slices, sorted(options.items()), devices, given, resident])
    return hashlib.sha256(f"{facts}\n{program}".encode()).hexdigest()


def _library() -> list[str | int]:
    """The compiler that TPU_LIBRARY_PATH names in place of the package's, as its file tells it from another; none where it is not set."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    if not path:
        return []
    found = Path(path).stat() if Path(path).exists() else None
    return [path] if found is None else [path, found.st_size, found.st_mtime_ns]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
