"""Settings of every test: eight virtual CPU devices and a cache of compiled programs.

Runs that tests start on one device share compiled programs through the cache on disk; programs for several devices are compiled in each
process, see `maxlm.run.jax_setup`. Most of the suite's time is compilation, and its programs run for
milliseconds. XLA:CPU therefore uses its older emitters (two thirds of the time) and LLVM at level 0 (a quarter of the time of level 1).
"""

import functools
import gc
import os
import signal
import sys
import tempfile
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))  # programs that are tested
sys.path.insert(0, str(Path(__file__).resolve().parent / "faults"))  # small_run.py and hosts.py, which other folders use as well

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":  # on a GPU what kernels are compared with would be compiled without optimisation as well
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        " --xla_cpu_parallel_codegen_split_count=1"  # to split a program for threads takes a tenth more CPU time, and the cores are busy
        + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "")  # 0.11 has only the newer ones
    )
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "maxlm-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts would translate the source again

import jax
import typer.main
from jax._src import compilation_cache, compiler

from maxlm.run.jax_setup import enable_compilation_cache

enable_compilation_cache()

jax.config.update("jax_traceback_in_locations_limit", 0)  # programs carry names of operations and no lines of Python
jax.config.update("jax_compilation_cache_include_metadata_in_key", True)  # tests read the names of operations in compiled programs
PROGRAMS = 300  # the most programs that a process keeps, the last used ones


def share_programs() -> None:
    """Compile equal programs for CPUs once a process, whichever test or `jax.jit` they come from. The key is the one of jax's cache."""
    compile_anew = compiler.compile_or_get_cached
    programs: OrderedDict[str, Any] = OrderedDict()

    def compile_once(backend: Any, computation: Any, devices: Any, options: Any, host_callbacks: Any, *rest: Any) -> Any:
        if backend.platform != "cpu" or host_callbacks or jax.config.jax_compilation_cache_dir:
            return compile_anew(backend, computation, devices, options, host_callbacks, *rest)
        key = compilation_cache.get_cache_key(computation, devices, options, backend)
        if key not in programs:
            programs[key] = compile_anew(backend, computation, devices, options, host_callbacks, *rest)
            if len(programs) > PROGRAMS:
                programs.popitem(last=False)
        programs.move_to_end(key)
        return programs[key]

    compiler.compile_or_get_cached = compile_once


share_programs()

typer.main.get_command = functools.cache(typer.main.get_command)  # to make the commands' parsers takes 20 ms of each `cli.main()`
gc.set_threshold(200_000, 20, 100)  # tracing makes millions of small objects that live on: collecting rarely saves a twentieth of the time


def pytest_runtest_setup() -> None:
    """`nohup pytest &` ignores both signals, and so would commands that tests start. Before every test: a compiler that installs handlers
    of its own, and removes them, leaves these as it found them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
