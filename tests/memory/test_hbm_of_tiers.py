"""HBM that a compiled step with state in host memory needs, by XLA's figures."""

import contextlib
from types import SimpleNamespace

import jax
import pytest
from memory_cases import HOST
from tiny import tiny_config

from maxlm.compiler import aot
from maxlm.config.sections.mesh import AXES
from maxlm.hardware.chips import GIB
from maxlm.hardware.topologies import parse
from maxlm.models.counts import count_matrices, count_parameters
from maxlm.training import fits


def test_arguments_in_host_memory_take_no_hbm(monkeypatch, tmp_path):
    """The figures are libtpu 0.0.42's, of 26.8 B parameters on four v6e: XLA compiled the program and, with a fifth more layers, refused it
    for 33.61 GiB of temporaries. Its buffer assignment has 27.9 GiB of HBM.
    """
    stats = {"argument": 679177216, "output": 679175968, "alias": 679172096, "temp": 44937638496, "generated_code": 12311040}
    stats |= {**dict.fromkeys(("host_argument", "host_output", "host_alias"), 80220782592), "host_temp": 0}
    named = {f"{name}_size_in_bytes": size for name, size in stats.items()} | {"peak_memory_in_bytes": 110191432992}
    compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**named), as_text=lambda: "HloModule x")
    lowered = SimpleNamespace(compile=lambda **_: compiled, as_text=lambda: "x")
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[]))
    program = SimpleNamespace(lower=lambda: lowered, compiler_options={}, mesh=mesh, placement=SimpleNamespace(resident_bytes=0))
    monkeypatch.setattr(aot, "available_hbm", lambda topology: int(31.25 * GIB))
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(tmp_path))
    step = aot.compile_program(program, parse("v6e:2x2"))
    assert step.fits and step.needed / GIB == pytest.approx(27.93, abs=0.01)
    assert step.memory.host == stats["host_argument"]
    program.placement.resident_bytes = GIB  # beside the program, which is the same
    assert aot.compile_program(program, parse("v6e:2x2")).needed == step.needed + GIB
    program.placement.resident_bytes = 4 * GIB
    assert not aot.compile_program(program, parse("v6e:2x2")).fits
    for limit, enough in ((31.25, True), (27.5, False)):
        monkeypatch.setattr(fits, "memory_of_a_device", lambda device, processes, limit=limit: int(limit * GIB))
        with contextlib.nullcontext() if enough else pytest.raises(fits.TooLargeError, match="activations and gradients"):
            fits.check_compiled(compiled, jax.devices()[0])


def test_bounds_count_layers_on_the_host_there(monkeypatch):
    """4 bytes a number of a float32 model's matrices of layers leave the device for weights, and 4 for gradients."""
    sizes = dict.fromkeys(AXES, 1)
    near, far = (tiny_config(memory={"offload_state": HOST | more}) for more in ({}, {"weights": "host", "gradients": "host"}))
    layers = 4 * count_matrices(far.model, scanned=True)
    assert fits.least(near, sizes)[0].bytes - fits.least(far, sizes)[0].bytes == layers
    monkeypatch.setattr(fits, "memory_of_a_device", lambda device, processes: None)
    least = 12 * count_parameters(near.model)  # of the host: masters and moments
    for room, config in ((least, near), (least + 2 * layers, far)):
        monkeypatch.setattr(fits, "host_memory", lambda room=room: room)
        fits.check(config, sizes, jax.devices())
        monkeypatch.setattr(fits, "host_memory", lambda room=room: room - 1)
        with pytest.raises(fits.TooLargeError, match="keeping state in host memory"):
            fits.check(config, sizes, jax.devices())
