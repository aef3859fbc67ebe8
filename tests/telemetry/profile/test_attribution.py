"""Attribution of time in synthetic traces of TPUs and GPUs, to the microsecond, and in a recorded one of this CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synthetic_trace import Event, PlaneWriter

from maxlm.telemetry.profile import TRACE, Facts, xplane
from maxlm.telemetry.profile.attribution import _place, profile_of
from maxlm.telemetry.profile.page import render
from maxlm.telemetry.profile.record import start_trace, stop_trace
from maxlm.telemetry.profile.xplane import Trace

US = 1_000_000

GRAPHS = "xla_gpu_enable_command_buffer."


def reduced(path):
    trace = Trace(path)
    return profile_of(trace)


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_a_tpu(tpu_file, monkeypatch, block):
    """Waiting for a gather is communication; what lies under the loop is not counted twice."""
    monkeypatch.setattr(xplane, "BLOCK", block)
    profile = reduced(tpu_file)
    assert {scope: {phase: time / US for phase, time in phases.items()} for scope, phases in profile.table().items()} == {
        "attn": {"forward": 40, "recomputed": 20},
        "mlp": {"forward": 38},
        "collectives": {"forward": 42},
        "optimizer": {"update": 30},
        "layers": {"forward": 0},
    }
    (device,) = profile.devices
    assert (device.name, device.window / US, device.busy / US) == ("TPU:0", 190, 170)
    assert device.communication / US == 80  # of the gathers, start to end
    assert device.exposed / US == 42  # but for the 19 us of the mlp in each
    assert profile.attributed == 1
    assert {name: spans.total / US for name, spans in profile.host.items()} == {"maxlm:data_wait": 4, "maxlm:step": 20}


@pytest.mark.parametrize(
    ("tf_op", "where"), [("a/b:", "a/b"), ("a/b:Mul", "a/b"), ("a/(b/c:d/e)", "a/(b/c:d/e)"), ("a/(b/c:d/e):", "a/(b/c:d/e)"), ("", "")]
)
def test_the_place_of_an_event_of_a_tpu_ends_before_its_type(tf_op, where):
    assert _place(tf_op) == where


def test_allocations_are_a_line_over_time(tmp_path):
    """Allocations of a synthetic trace; the page shows the peak."""
    device, host = PlaneWriter("/device:TPU:0"), PlaneWriter("/host:CPU")
    device.line("XLA Ops", [Event("fusion.1", 0, US)])
    sizes = [1 << 30, 3 << 30, 2 << 30]
    names = ("MemoryAllocation", "MemoryAllocation", "MemoryDeallocation")
    stats = [{"bytes_allocated": size, "allocator_name": "GPU_0_bfc"} for size in sizes]
    other = [Event(names[0], i * US + 5, 1, {"bytes_allocated": 7, "allocator_name": "GPU_1_bfc"}) for i in range(3)]
    host.line("allocator", [*(Event(n, i * US, 1, s) for i, (n, s) in enumerate(zip(names, stats, strict=True))), *other])
    host.line("another", [Event("MemoryAllocation", 0, 1)])  # without stats
    path = tmp_path / "memory.xplane.pb"
    path.write_bytes(device.written() + host.written())
    profile = reduced(path)
    assert profile.memory == [(i * US, size) for i, size in enumerate(sizes)]
    assert "at most 3.2 GB" in render(profile, Facts("memory"))


def test_a_gpu(gpu_file):
    """Streams run beside each other; another program, and copies, are told apart."""
    profile = reduced(gpu_file)
    assert {scope: {phase: time / US for phase, time in phases.items()} for scope, phases in profile.table().items()} == {
        "attn": {"forward": 40},
        "mlp": {"backward": 30},
        "collectives": {"backward": 30},
        "other programs": {"update": 5},
        "copies": {"update": 2},
    }
    (device,) = profile.devices
    assert (device.window / US, device.busy / US, device.exposed / US) == (102, 40 + 40 + 7, 10)
    assert profile.attributed == pytest.approx(105 / 107)


def test_a_recorded_step_of_this_cpu(tmp_path):
    """The parts of a small scan with a gradient and recomputation are found in what XLA:CPU records."""

    @jax.named_scope("mlp")
    def mlp(w, x):
        return jnp.tanh(x @ w)

    @jax.named_scope("attn")
    def attention(w, x):
        return jax.nn.softmax(x @ w, axis=-1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(x, w):
        return x + mlp(w, attention(w, x)), None

    @jax.jit
    def train_step(weights, x):
        grads = jax.grad(lambda weights: jnp.sum(jax.lax.scan(block, x, weights)[0] ** 2))(weights)
        return weights - 1e-3 * grads

    weights, x = jnp.ones((4, 256, 256)) / 256, jnp.asarray(np.linspace(-1, 1, 256 * 256, dtype=np.float32).reshape(256, 256))
    weights = jax.block_until_ready(train_step(weights, x))
    start_trace(tmp_path)
    with jax.profiler.TraceAnnotation("maxlm:step"):
        jax.block_until_ready(train_step(weights, x))
    assert stop_trace(tmp_path) == tmp_path / TRACE
    assert [path.name for path in tmp_path.iterdir()] == [TRACE]
    profile = reduced(tmp_path / TRACE)
    table = profile.table()
    assert profile.is_cpu
    assert profile.attributed >= 0.95
    assert set(table["mlp"]) >= {"forward", "backward"}
    assert set(table["attn"]) >= {"forward", "backward", "recomputed"}
    assert "optimizer" in table
    assert profile.host["maxlm:step"].total >= profile.devices[0].busy > 0


def test_kernels_of_no_program_do_not_make_the_step_another_program(tmp_path):
    plane = PlaneWriter("/device:GPU:0")
    named = Event("gemm_a", 0, 10 * US, {"hlo_op": "gemm.1", "hlo_module": "jit_train_step"})
    plane.line("Stream #13(Compute)", [named, Event("gemm_b", 50 * US, 30 * US, {"kernel_details": "regs:64"})])
    path = tmp_path / "mixed.xplane.pb"
    path.write_bytes(plane.written())
    assert reduced(path).table() == {"unknown": {"update": 40 * US}}


def test_kernels_of_a_gpu_without_a_name_are_device_time(tmp_path, gpu_file):
    """As XLA's command buffers leave them: hlo_op is that of the buffer, which is no operation of the program, or absent."""
    plane = PlaneWriter("/device:GPU:0")
    of_buffer = {"hlo_op": "command_buffer_1", "hlo_module": "jit_train_step", "program_id": 5, "kernel_details": "regs:32 grid:1,1,1"}
    kernels = [Event("gemm_a", 0, 40 * US, of_buffer), Event("gemm_b", 50 * US, 30 * US, {"kernel_details": "regs:64 grid:8,1,1"})]
    beside = Event("MemoryResidency", 0, 1000 * US, {"memory_residency_details": "kind:device"})
    plane.line("Stream #13(Compute)", [*kernels, beside])
    path = tmp_path / "graphs.xplane.pb"
    path.write_bytes(plane.written())
    profile = reduced(path)
    (device,) = profile.devices
    assert (device.window / US, device.compute / US, device.busy / US) == (80, 70, 70)
    assert profile.table() == {"unknown": {"update": 70 * US}}
    assert profile.attributed == 0
    assert GRAPHS in render(profile, Facts("graphs"))
    assert GRAPHS not in render(reduced(gpu_file), Facts("named"))
