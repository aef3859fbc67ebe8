"""Every test sees eight virtual CPU devices. Runs that tests start on one device share compiled programs through a cache on disk; what
runs on several here is compiled in each process, see `maxlm.runtime.jax_setup`. To compile is most of what tests do:
XLA:CPU is told to do it as for the product's step, and by the older emitters, in two thirds of the time.
"""

import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "maxlm-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

from maxlm.runtime.jax_setup import enable_compilation_cache

enable_compilation_cache()


def pytest_runtest_setup() -> None:
    """`nohup pytest &` ignores both signals, and so would commands that tests start. Before every test: a compiler that installs handlers
    of its own, and removes them, leaves these as it found them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
