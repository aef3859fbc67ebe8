"""`maxlm plan --calibrate` on this CPU: a file with what was measured, which no plan takes for a GPU's."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from test_plan import run

from maxlm.cost.calibration import Measured, read
from maxlm.hlo.cpu_work import cpu_dots, transposes
from maxlm.hlo.parser import read as read_program
from maxlm.planning import calibrate


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "MATMUL_SIZES", (64,))
    monkeypatch.setattr(calibrate, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(calibrate, "COLLECTIVE_BYTES", {"cpu": (2**12,)})
    small = {"SIDES": (8, 16), "LONG_SIDE": 32, "TRANSPOSED_SIDES": (8, 16), "TOKENS": 64, "WIDTH": 24, "FUNCTION_VALUES": 64}
    for name, value in {**small, "FRESH_BYTES": 2**20}.items():
        monkeypatch.setattr(calibrate, name, value)

    return functools.partial(run, capfd)


def test_the_file_holds_what_was_measured_and_says_that_it_is_no_factor(command, tmp_path):
    code, out, err = command("--calibrate")
    assert code == 0, err
    found = read(tmp_path / "calibration-cpu.json")
    assert (found.chip, found.factors, found.devices) == (None, None, jax.local_device_count())
    assert found.measured.matmul_flops > 1e6 and found.measured.hbm_bytes_per_s > 1e6
    assert (found.measured.all_gather_bytes_per_s is None) == (jax.local_device_count() == 1)
    cpu = found.measured.cpu
    assert [speed.side for speed in cpu.matmuls] == [8, 16, 64] and [speed.side for speed in cpu.transposed_matmuls] == [8, 16]
    assert min(cpu.transposed_bytes_per_s, cpu.fresh_bytes_per_s) > 1e6 and 0 < cpu.function_s < 1e-3 and 0 < cpu.op_s < 1e-2
    assert found.versions["jax"] == jax.__version__
    assert "cost.calibration=" in out


def test_what_is_timed_is_what_it_is_called():
    """XLA leaves the transposed operand, the two narrow matmuls and the transposing copy as they are written."""

    def ops(step, *dims):
        module = read_program(jax.jit(step).lower(jnp.ones(dims)).compile().as_text())
        return [(module, run.op, module.computations[run.computation]) for run in module.executed()]

    narrow = [dot for op in ops(calibrate._narrow(16, 256), 256, 16) for dot in cpu_dots(*op)]
    assert [(dot.side, dot.transposed, dot.flops) for dot in narrow] == [(16, False, 2 * 16 * 256**2)] * 2
    gradient = [dot for op in ops(calibrate._gradient(64), calibrate.TOKENS, 64) for dot in cpu_dots(*op)]
    assert [(dot.side, dot.transposed, dot.flops) for dot in gradient] == [(64, True, 2 * calibrate.TOKENS * 64**2)]
    assert any(transposes(*op) for op in ops(calibrate._transposed, 256, 48))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--out", "no/x.json"), "make it first"), (("runs/quickstart",), "measures this machine"), (("--tokens", "1e9"), "alone")],
)
def test_bad_input_is_one_line(command, arguments, said):
    code, out, err = command(*arguments, "--calibrate")
    assert (code, out) == (2, "") and said in err.splitlines()[-1]


def test_a_gpu_gets_factors_and_impossible_ones_are_not_written(monkeypatch):
    """A stand-in for the device: achieved over stated, and a refusal where a share is impossible."""
    device = jax.local_devices()[0]
    stand_in = type("Device", (), {"device_kind": "NVIDIA H200", "client": device.client})()
    monkeypatch.setattr(jax, "local_devices", lambda: [stand_in])
    figures = {"matmul_dtype": "bfloat16", "matmul_size": 8192, "all_gather_bytes_per_s": None, "reduce_scatter_bytes_per_s": None}
    good = calibrate.record(Measured(**figures, matmul_flops=0.8 * 989e12, hbm_bytes_per_s=0.9 * 4.8e12), None)
    assert good.chip == "H200" and good.factors is not None
    assert (good.factors.matmul, good.factors.hbm, good.factors.links) == (pytest.approx(0.8), pytest.approx(0.9), None)
    assert json.loads(good.model_dump_json())["device_kind"] == "NVIDIA H200"
    with pytest.raises(calibrate.UserError, match="impossible"):
        calibrate.record(Measured(**figures, matmul_flops=5 * 989e12, hbm_bytes_per_s=4e12), None)
