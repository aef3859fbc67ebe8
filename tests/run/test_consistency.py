"""Training refuses devices other than those of the config's `cluster` section."""

import importlib.metadata
import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from tiny import tiny_config

from maxlm.cluster import agree
from maxlm.config import UserError
from maxlm.config.schema import ClusterConfig
from maxlm.run import consistency
from maxlm.run.consistency import check_devices


def config(topology: str | None, slices: int = 1):
    plain = tiny_config(mesh={"fsdp": 8})
    mesh = plain.mesh.model_copy(update={"slices": slices})
    cluster = None if topology is None else ClusterConfig(topology=topology)
    return plain.model_copy(update={"cluster": cluster, "mesh": mesh})


def devices(kind: str, count: int):
    return [SimpleNamespace(device_kind=kind)] * count


def check(config, found):
    check_devices(config.cluster, config.mesh.slices, found)


def test_the_machine_that_is_promised_is_taken():
    check(config("v5p:2x2x1"), devices("TPU v5", 4))
    check(config("v5p:2x2x1", slices=2), devices("TPU v5", 8))
    check(config("tpu7x:2x2x1"), devices("TPU7x", 8))
    check(config("h200:1x8"), devices("NVIDIA H200", 8))
    check(config(None), devices("cpu", 1))


@pytest.mark.parametrize(("kind", "count"), [("cpu", 1), ("cpu", 4), ("TPU v5", 8), ("TPU v6 lite", 4), ("NVIDIA H100 80GB HBM3", 4)])
def test_another_machine_is_refused(kind, count):
    with pytest.raises(UserError, match=rf"v5p:2x2x1 is 4 x TPU v5, and this run has {count} x {kind}: .*cluster=null") as told:
        check(config("v5p:2x2x1"), devices(kind, count))
    assert told.value.exit_code == 2


def beside_another(monkeypatch, facts, problem=""):
    """This process and another, of the host `other`, which sends `facts` and `problem`."""
    other = json.dumps({"host": "other", "unavailable": False, "problem": problem, "facts": facts})
    monkeypatch.setattr(agree.jax, "process_count", lambda: 2)
    monkeypatch.setattr(agree, "agree", lambda mine: [mine, json.loads(other)])


def same(name, find):
    agree.on_all(find, lambda found: {name: found})


def test_what_one_host_cannot_find_is_told_to_all(monkeypatch):
    """Also in the host that has found it: both are told why before either waits for the other."""
    beside_another(monkeypatch, {}, "models/x holds no config.yml")
    with pytest.raises(UserError, match=r"other.*: models/x holds no config\.yml"):
        same("train.start_from", lambda: "1234")
    beside_another(monkeypatch, {"train.start_from": "5678"})
    with pytest.raises(UserError, match=r"train\.start_from is "):
        same("train.start_from", lambda: "1234")


def test_what_this_host_cannot_find_is_raised():
    def fail():
        raise UserError("no such folder")

    with pytest.raises(UserError, match="no such folder"):
        same("train.start_from", fail)


def test_any_number_of_facts_is_compared(monkeypatch):
    """The last one too, of a hundred tasks, and one that a process lacks."""
    facts = {f"task {number}": f"{number:012x}" for number in range(100)}
    beside_another(monkeypatch, {**facts, "task 99": "f" * 12})
    with pytest.raises(UserError, match="task 99 is ffffffffffff"):
        agree.require_equal(facts)
    beside_another(monkeypatch, {**facts, "task 100": "0"})
    with pytest.raises(UserError, match="task 100 is 0, and not set on 1 other"):
        agree.require_equal(facts)


DIFFERENT = (
    ("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false"),
    ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=16384"),
    ("JAX_DEFAULT_MATMUL_PRECISION", "float32"),
    ("JAX_ENABLE_X64", "1"),
    ("JAX_THREEFRY_PARTITIONABLE", "0"),
    ("NVIDIA_TF32_OVERRIDE", "0"),
    ("NCCL_ALGO", "Ring"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2"),
)
THE_SAME = (
    ("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_gpu_kernel_cache_file=a --xla_force_host_platform_device_count=3"),
    ("XLA_FLAGS", ""),
    ("LIBTPU_INIT_ARGS", "--megascale_port=81 --megascale_slice_id=1"),
    ("JAX_PROCESS_ID", "3"),
    ("JAX_LOCAL_DEVICE_IDS", "0,1"),
    ("JAX_COORDINATOR_ADDRESS", "a:1"),
    ("JAX_COMPILATION_CACHE_DIR", "/tmp/x"),
    ("JAX_DUMP_IR_TO", "/tmp/x"),
    ("JAX_LOG_COMPILES", "1"),
    ("NCCL_SOCKET_IFNAME", "eth1"),
    ("CUDA_VISIBLE_DEVICES", "1"),
)


@pytest.mark.parametrize(("name", "value", "same"), [(*pair, False) for pair in DIFFERENT] + [(*pair, True) for pair in THE_SAME])
def test_hosts_differ_by_what_changes_a_program_and_by_nothing_else(monkeypatch, name, value, same):
    for known in (name for name, _ in (*DIFFERENT, *THE_SAME)):
        monkeypatch.delenv(known, raising=False)
    before = consistency.machine_facts()
    monkeypatch.setenv(name, value)
    assert (consistency.machine_facts() == before) == same
    beside_another(monkeypatch, before)
    with nullcontext() if same else pytest.raises(UserError, match=rf"{name}.* is not set, and .* on 1 other, .*environment"):
        agree.require_equal(consistency.machine_facts())


def test_flags_are_compared_as_xla_reads_them(monkeypatch, tmp_path):
    """In any order, the last of two, from a file, and with quotes."""

    def facts(value):
        monkeypatch.setenv("XLA_FLAGS", value)
        return consistency.machine_facts()

    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b")
    same = [
        facts(text) for text in ("--xla_b=true --xla_a=1", "--xla_a=2 --xla_b  --xla_a=1", "'--xla_a=1' --xla_b", str(tmp_path / "flags"))
    ]
    assert all(one == same[0] for one in same)
    assert facts("--xla_a=1") != same[0]
    assert facts("--xla_a='1") != same[0], "an open quote"


def test_files_that_options_name_are_compared_by_content(monkeypatch, tmp_path):
    """In whatever place they are; a name of no file, or of a pipe, counts as it is written."""

    def facts(name):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_load_autotune_results_from={tmp_path / name}")
        return consistency.machine_facts()

    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(content)
    os.mkfifo(tmp_path / "pipe")
    assert facts("a") == facts("b") != facts("c")
    assert facts("pipe")["XLA_FLAGS --xla_gpu_load_autotune_results_from"] == str(tmp_path / "pipe")
    before = facts("a")
    (tmp_path / "a").write_text("3")
    assert facts("a") != before


def test_the_version_in_use_is_compared(monkeypatch, tmp_path):
    """Of two folders of sys.path that hold a library, the first is imported."""
    for place, version in (("first", "9.9.9"), ("second", "9.9.8")):
        for name in ("optax", "jax_rocm7_plugin"):
            (tmp_path / place / f"{name}-{version}.dist-info").mkdir(parents=True)
            metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            (tmp_path / place / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    for place in ("second", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / place))
    found = consistency.machine_facts()
    assert importlib.metadata.version("optax") == found["optax"] == found["jax-rocm7-plugin"] == "9.9.9"


def test_versions_of_the_libraries_that_compute_are_compared():
    assert {"jax", "jaxlib", "flax", "numpy", "Python"} <= consistency.machine_facts().keys()
    assert "pytest" not in consistency.machine_facts()
