"""The time of a step by measured speeds: matmuls by their FLOPs, the rest by its bytes; a calibration of other devices is refused."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config

from maxlm.base.errors import UserError
from maxlm.config.schema import Config
from maxlm.cost.calibration import Calibration, Factors, Measured
from maxlm.cost.expected import EVEN_LOADS
from maxlm.cost.prediction import _prediction, cpu_chip, predictor, topology_of
from maxlm.cost.step_cost import estimate
from maxlm.hardware.chips import chip_of
from maxlm.hardware.topologies import parse
from maxlm.hlo.parser import read
from maxlm.planning.plan import scale_of

N, FLOPS, BYTES = 256, 1e10, 1e9


def measured(kind="cpu", chip=None, factors=None):
    speeds = Measured(
        matmul_dtype="float32",
        matmul_size=N,
        matmul_flops=FLOPS,
        hbm_bytes_per_s=BYTES,
        all_gather_bytes_per_s=None,
        reduce_scatter_bytes_per_s=None,
    )
    return Calibration(
        chip=chip, device_kind=kind, devices=1, machine="m", date="2026-11-25", versions={}, measured=speeds, factors=factors
    )


def config(path):
    model = {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32}
    sections = {"train": {"steps": 1, "global_batch": 8}, "optimizer": {"peak_lr": 1e-3}, "cost": {"calibration": str(path)}}
    return Config.model_validate({"model": model, "data": {"store": "s", "seq_len": 8}, **sections})


def test_a_loop_of_matmuls_and_a_sum():
    """FLOPs of all iterations at the measured speed, and the bytes of what is no matmul."""

    def step(x_NN, y_M):
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ x), x_NN), y_M + 1.0

    compiled = jax.jit(step).lower(jnp.ones((N, N)), jnp.ones(2**22)).compile()
    cost = estimate(read(compiled.as_text()), cpu_chip(measured()), {"data": 1}, {})
    assert cost.matmul_flops == 5 * 2 * N**3
    assert cost.matmul_s == pytest.approx(5 * 2 * N**3 / FLOPS, rel=0.01)
    moved = 2 * 4 * 2**22 / BYTES
    assert moved <= cost.memory_s <= 1.5 * moved
    assert cost.total_s == cost.matmul_s + cost.memory_s


def test_speeds_that_were_measured_replace_what_is_assumed():
    """Of a GPU the chip gets the factors, of a TPU nothing; nodes are processes."""

    class Device:
        def __init__(self, process_index, coords=None):
            self.process_index, self.coords = process_index, coords

    kind = "NVIDIA H100 80GB HBM3"
    found = measured(kind, chip_of(kind).name, Factors(matmul=0.6, hbm=0.9, links=0.7))
    topology = topology_of(found, [Device(i // 8) for i in range(16)])
    assert (topology.sides, topology.chip.achieved.matmul) == ((2, 8), 0.6)
    pod = topology_of(measured("TPU v5p", "v5p"), [Device(0, tuple(place)) for place in np.ndindex(2, 2, 4)])
    assert (pod.name, pod.chip.achieved.matmul) == ("v5p:2x2x4", None)


@pytest.mark.parametrize("text", [None, "", "{}", '{"chip": 3}'])
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"cost\.calibration") as error:
        predictor(config(path))
    assert "\n" not in str(error.value)


def test_other_devices_are_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(measured("TPU v5p", "v5p").model_dump_json())
    with pytest.raises(UserError, match=r"cost.calibration = .* was measured on TPU v5p, and this run is on cpu"):
        predictor(config(path))


def test_several_cpu_devices_are_refused_and_one_is_not(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text(measured().model_dump_json())
    with pytest.raises(UserError, match="share the cores"):
        predictor(config(path))
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    assert callable(predictor(config(path)))
    ramped = config(path)
    ramp = [{"global_batch": 4, "until_tokens": 32}]
    ramped = ramped.model_copy(update={"train": ramped.train.model_copy(update={"batch_ramp": ramp})})
    with pytest.raises(UserError, match="a step of one program"):
        predictor(ramped)


def test_a_step_on_a_tpu_is_predicted_with_the_correction_of_its_chip_first():
    """Its speeds are XLA's own: published runs correct them, and experts are assumed to be loaded evenly."""
    scale = scale_of(tiny_config(model={"moe": {"n_experts": 4, "top_k": 2, "d_ff": 48}}), parse("v5p:2x2x1"), 1e9)
    said = _prediction(scale, 2.0)
    assert list(said) == ["expected_step_s", "step_s", "basis", "assumes"]
    assert said["expected_step_s"]["middle"] == pytest.approx(2 * scale.correction.middle) != 2.0 == said["step_s"]
    assert said["assumes"] == [EVEN_LOADS] and "published run" in said["basis"]


def test_a_loop_whose_turns_are_not_known_is_named_in_the_log(tmp_path, monkeypatch, caplog):
    """It counts once: the time is too small."""
    path = tmp_path / "c.json"
    path.write_text(measured().model_dump_json())
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)

    def until(limit, x_NN):
        return jax.lax.while_loop(lambda carried: carried.sum() < limit, lambda carried: carried @ x_NN, x_NN)

    step = jax.jit(until).lower(1.0, jnp.ones((N, N))).compile()
    mesh = jax.make_mesh((1,), ("data",), devices=one)
    found = config(path)
    said = predictor(found)(SimpleNamespace(step=step, mesh=mesh, config=found))
    assert said["step_s"] == pytest.approx(2 * N**3 / FLOPS, rel=0.5)
    assert said["expected_step_s"] == dict.fromkeys(("low", "middle", "high"), said["step_s"]), "its speeds are measured"
    assert "measured on this machine" in said["basis"] and said["assumes"] == []
    assert "predicted time of a step: How often these loops turn is not in the compiled program: while" in caplog.text


def test_several_devices_whose_links_are_not_known_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text(measured("NVIDIA X").model_dump_json())
    gpus = [SimpleNamespace(platform="gpu", device_kind="NVIDIA X", process_index=0) for _ in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    with pytest.raises(UserError, match="here 2 devices have links of unknown bandwidth"):
        predictor(config(path))


def test_processes_that_share_a_host_are_refused_on_gpus(tmp_path, monkeypatch):
    """NVLink would be charged as the network."""
    path, kind = tmp_path / "c.json", "NVIDIA H100 80GB HBM3"
    path.write_text(measured(kind, chip_of(kind).name, Factors(matmul=0.6, hbm=0.9, links=0.7)).model_dump_json())
    gpus = [SimpleNamespace(platform="gpu", device_kind=kind, process_index=number) for number in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    assert callable(predictor(config(path), ("node1", "node2")))
    with pytest.raises(UserError, match="takes each process for a host of its own"):
        predictor(config(path), ("node1", "node1"))
