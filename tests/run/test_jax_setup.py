"""Configuration of jax before it touches a device."""

import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from maxlm.base.errors import UserError
from maxlm.base.paths import user_path
from maxlm.cluster.accelerators import Accelerator
from maxlm.compiler import program_cache
from maxlm.data.tokenizer import read_if_present
from maxlm.diagnostics.inspect_data import _is_store
from maxlm.hardware.chips import GPU_MEMORY_SHARE
from maxlm.hardware.xla_flags import VIRTUAL_DEVICES
from maxlm.run import jax_setup
from maxlm.run.jax_setup import enable_compilation_cache, select_platform, use_virtual_devices


@pytest.fixture
def cache(monkeypatch):
    """Environment of one CPU device; afterwards the cache is what it was."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    program_cache._say_no_home.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    enable_compilation_cache()


def test_without_a_home_nothing_is_kept_and_that_is_said_once(cache, caplog):
    """As in a container whose user has no entry in /etc/passwd."""

    def unknown(*_):
        raise KeyError("no such user")

    for name in ("HOME", "JAX_COMPILATION_CACHE_DIR", "MAXLM_CACHE_DIR"):
        cache.delenv(name, raising=False)
    for name in ("getpwuid", "getpwnam"):
        cache.setattr(pwd, name, unknown)
    assert [enable_compilation_cache(), enable_compilation_cache()] == [None, None]
    program_cache.write("key", {}, "text")
    assert program_cache.read("key") is None
    assert len(caplog.records) == 1 and "set HOME" in caplog.text
    for find in (_is_store, user_path, read_if_present):
        with pytest.raises(UserError, match=r"^~/x: the home of `~` is not known"):
            find("~/x")


def test_homes_in_the_cache_variables(cache, tmp_path):
    cache.setenv("HOME", str(tmp_path))
    cache.setenv("JAX_COMPILATION_CACHE_DIR", "~/x")
    cache.setenv("MAXLM_CACHE_DIR", "~/y")
    assert enable_compilation_cache() == f"{tmp_path}/x"
    assert program_cache.folder() == tmp_path / "y" / "planning"
    cache.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/~")
    assert enable_compilation_cache() == "gs://bucket/~"


def test_homes_are_expanded_in_one_place():
    """`Path.expanduser` and `Path.home` raise RuntimeError where no home is known."""
    root = Path(jax_setup.__file__).parents[1]
    own = re.compile(r"(?<!os\.path)\.expanduser\(|Path\.home")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if own.search(path.read_text())}
    checked = {"data/storage.py", "data/token_store.py"}  # folders of a store, which were expanded when they were given
    assert found - checked == {"base/paths.py"}


@pytest.mark.parametrize("make", [None, lambda path: path.mkdir(), os.mkfifo, lambda path: path.write_bytes(b"\xff")])
def test_a_file_of_flags_that_cannot_be_read_is_refused(monkeypatch, tmp_path, make):
    path = tmp_path / "flags"
    if make is not None:
        make(path)
    monkeypatch.setenv("XLA_FLAGS", str(path))
    with pytest.raises(UserError, match=r"XLA_FLAGS = .*flags: must be options.*unset it"):
        select_platform()


def test_a_file_of_flags_is_read(monkeypatch, tmp_path):
    path = tmp_path / "flags"
    path.write_text(f"--xla_a=1\n{VIRTUAL_DEVICES}8")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    select_platform()
    use_virtual_devices(2)
    assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {VIRTUAL_DEVICES}2"


def test_a_pipe_in_the_compilation_cache_is_removed(tmp_path):
    cache = jax_setup.SealedCache(str(tmp_path), max_size=-1)
    os.mkfifo(tmp_path / "maxlm-key-cache")
    assert cache.get("key") is None
    cache.put("key", b"program")
    assert cache.get("key") == b"program"


OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("own", "then"),
    [({}, {NEW: str(GPU_MEMORY_SHARE)}), ({NEW: "0.5"}, {NEW: "0.5"}), ({OLD: "0.5"}, {OLD: "0.5"})],
    ids=["none", "new", "old"],
)
def test_jax_takes_what_planning_counts_on_unless_told_otherwise(monkeypatch, own, then):
    for name in (OLD, NEW):
        monkeypatch.setenv(name, "")  # so that what the call sets is undone afterwards
        monkeypatch.delenv(name)
    for name, share in own.items():
        monkeypatch.setenv(name, share)
    select_platform()
    assert {name: os.environ[name] for name in (OLD, NEW) if name in os.environ} == then


def test_programs_of_several_cpu_devices_are_not_kept(monkeypatch, tmp_path):
    """Loaded again they forget the order of their collectives, and a run may stop for ever."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    try:
        assert enable_compilation_cache() is None
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        assert enable_compilation_cache() == jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        monkeypatch.undo()
        enable_compilation_cache()


ATTACKS = """
import logging, os, pathlib, sys
import jax
from maxlm.run.jax_setup import enable_compilation_cache

warnings = []
logging.getLogger("maxlm").addHandler(logging.Handler())
logging.getLogger("maxlm").handlers[0].emit = warnings.append
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
folder = pathlib.Path(enable_compilation_cache())
for change in (
    None,
    lambda files: files[1:] + files[:1],
    lambda files: [file[:-9] for file in files],
    lambda files: [b"" for _ in files],
):
    files = sorted(folder.glob("maxlm-*-cache")) if change else []
    for file, content in zip(files, change([file.read_bytes() for file in files]) if change else ()):
        file.write_bytes(content)
    for again in (False, True):
        jax.clear_caches()
        warnings.clear()
        values = [float(jax.jit(function)(3.0)) for function in (lambda x: x * 2 + 1, lambda x: x * x - 5)]
        print(values, len(warnings), again or change is None)
"""


def test_exchanged_and_damaged_files_of_the_compilation_cache_are_compiled_again(tmp_path):
    """And kept again. jax alone runs the other program, or fails in an assertion."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "XLA_FLAGS": ""}
    said = subprocess.run([sys.executable, "-c", ATTACKS], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 8
    for line in said:
        values, count, well = re.fullmatch(r"(\[.*\]) (\d+) (\w+)", line).groups()
        assert values == "[7.0, 4.0]"
        assert (count == "0") == (well == "True"), said


def test_a_cpu_is_as_many_devices_as_asked_and_keeps_the_other_flags(monkeypatch):
    code = "from maxlm.run.jax_setup import use_virtual_devices as use; import jax; use(3); print(jax.device_count())"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout == "3\n"
    monkeypatch.setenv("XLA_FLAGS", environment["XLA_FLAGS"])
    use_virtual_devices(2)
    assert os.environ["XLA_FLAGS"] == "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"


def test_a_cpu_is_not_split_where_there_is_an_accelerator_unless_that_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for found, file, said in (([Accelerator("cuda", "/dev/nvidia0", True)], True, "cuda at /dev/nvidia0"), ([], True, "a device file")):
        monkeypatch.setattr(jax_setup, "find_accelerators", lambda found=found: found)
        monkeypatch.setattr(jax_setup, "any_device_file", lambda file=file: file)
        with pytest.raises(UserError, match=f"--devices 8: .*{said}.* leave the option out, or set JAX_PLATFORMS=cpu"):
            use_virtual_devices(8)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    use_virtual_devices(8)
    assert os.environ["XLA_FLAGS"].endswith("device_count=8")
