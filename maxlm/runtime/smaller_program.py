"""Compile the step for the mesh after the loss of a host or slice while the run is well (`elastic.compile_ahead`).

jax finds a program in its cache by all devices of the cluster, so it would not find one for fewer hosts. Here the executable itself is
kept, under a key of everything that it depends on, and loaded onto the devices that are left: numbered anew, they are those it is for.
"""

import hashlib
import logging
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import maxlm
from maxlm.config import Config, elastic
from maxlm.config.loader import dump
from maxlm.hardware.xla_flags import VIRTUAL_DEVICES
from maxlm.parallel import build_mesh
from maxlm.runtime.cluster import Cluster
from maxlm.runtime.consistency import code_digest
from maxlm.runtime.jax_setup import cache_folder, may_load_programs
from maxlm.telemetry.atomic import replacing
from maxlm.telemetry.compilations import AHEAD, because
from maxlm.training.program import Program, build_program

_log = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size
LOWEST_PRIORITY = 19


def compile_ahead(asked: Config, here: Cluster) -> threading.Thread | None:
    """Compile the step for one host or slice less in a thread of low priority, unless it is kept already. None if there is nothing to do:
    it is not asked for, hosts are absent, there is no smaller mesh, or the step is not one program.
    """
    if asked.elastic is None or not asked.elastic.compile_ahead or here.quorum is None or here.absent:
        return None
    units, count = here.configured // here.quorum.together, jax.device_count()
    each = count // units
    fewer = next((left for left in range(units - 1, 0, -1) if here.quorum.fits(left)), 0)
    smaller = elastic.on_fewer(asked, units, each, fewer) if fewer else None
    own = any(device.process_index == jax.process_index() for device in jax.devices()[: fewer * each])
    path = None if smaller is None else _path(smaller, fewer * each)
    if smaller is None or path is None or path.exists() or not own or not may_load_programs(fewer * each):
        return None
    program = build_program(smaller, build_mesh(smaller, jax.devices()[: fewer * each]))
    thread = threading.Thread(target=_compile, args=(program, path, f"{fewer} of {units}"), name="maxlm-compile-ahead", daemon=True)
    thread.start()
    return thread


def _compile(program: Program, path: Path, of: str) -> None:
    """Compile and keep the step. No failure of it ends a run."""
    began = time.monotonic()
    try:
        if sys.platform == "linux":  # there a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        with because(AHEAD):
            keep(program.compiled(), path)
        _log.info("elastic: compiled the step for %s hosts or slices ahead of time, in %.0f s", of, time.monotonic() - began)
    except Exception:
        _log.warning("elastic: the step for %s hosts or slices could not be compiled ahead of time", of, exc_info=True)


def use_compiled(program: Program, here: Cluster) -> None:
    """Give `program`, of a run without some of its hosts, the step that was compiled ahead, if there is one. Else it compiles as usual."""
    settings, count = program.config.elastic, program.mesh.size
    if settings is None or not settings.compile_ahead or not here.absent or not may_load_programs(count):
        return
    path, began = _path(program.config, count), time.monotonic()
    step = None if path is None else load(path, list(jax.devices()))
    if step is not None:
        program.use_step(step)
        _log.info("elastic: the step was compiled ahead of time, and is loaded in %.1f s", time.monotonic() - began)


def keep(compiled: jax.stages.Compiled, path: Path) -> None:
    """Write a compiled program, with a digest of its content and of its name. Raises OSError."""
    content = pickle.dumps(serialize(compiled))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(_digest(path, content) + content)


def load(path: Path, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    """The program of that name on these devices; None if there is none, it is damaged, or another one has its name."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if digest != _digest(path, content):
        _log.warning("elastic: %s is damaged, so the step is compiled", path)
        return None
    try:
        program, in_tree, out_tree = pickle.loads(content)  # noqa: S301 -- as trusted as jax's own cache
        return deserialize_and_load(program, in_tree, out_tree, execution_devices=devices)
    except Exception:
        _log.warning("elastic: %s cannot be loaded, so the step is compiled", path, exc_info=True)
        return None


def _digest(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def _path(config: Config, devices: int) -> Path | None:
    """File of the step of `config` on so many devices; None where programs are kept in a bucket, or it is not one program."""
    folder = cache_folder()
    if "://" in folder or config.train.batch_ramp or config.memory.offload_state is not None:
        return None
    device, one = jax.devices()[0], config.model_copy(update={"memory_checkpoints": None})  # which names hosts, and is in no program
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(VIRTUAL_DEVICES)]
    parts: list[Any] = [maxlm.__version__, code_digest(), jax.__version__, device.device_kind, device.client.platform_version, devices]
    parts += [flags, os.environ.get("LIBTPU_INIT_ARGS", ""), dump(one)]
    return Path(folder) / "ahead" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.bin"
