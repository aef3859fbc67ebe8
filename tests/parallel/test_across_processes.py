"""Each axis across the boundary between processes joined by `jax.distributed`: the samples and losses of one process with one device."""

import functools
import shutil

import numpy as np
import pytest
from small_run import finish, free_port, make_workspace, metrics, start

SETTINGS = ("train.steps=3", "model.n_kv_heads=4", "mesh.fsdp=1", "optimizer.warmup_steps=1", "train.eval_batches=0")
AXES = {
    "data": ("mesh.data=4",),
    "fsdp": ("mesh.fsdp=4",),
    "zero 1": ("mesh.fsdp=4", "mesh.zero=1"),
    "stage": ("mesh.stage=4", "model.n_layers=4", "train.microbatches=4"),
    "context ring": ("mesh.context=4",),
    "context gather": ("mesh.context=4", "mesh.context_attention=gather"),
    "context ulysses": ("mesh.context=4", "mesh.context_attention=ulysses"),
    "tensor": ("mesh.tensor=4",),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function of a number of layers: the folder with a run by one process on one device."""
    folder = make_workspace(tmp_path_factory.mktemp("alone"))

    @functools.cache
    def reference(layers):
        finish(start(folder, *SETTINGS, f"model.n_layers={layers}", f"run.name=layers-{layers}"))
        return folder

    return reference


QUICK = ("fsdp",)  # rows of the batch in each process; gathers and reductions


@pytest.mark.parametrize(
    ("axis", "processes"),
    [pytest.param(axis, n, marks=[] if n == 2 and axis in QUICK else [pytest.mark.soak]) for axis in AXES for n in (2, 4)],
)
def test_every_axis_may_cross_the_boundary(alone, tmp_path, axis, processes):
    folder, layers = tmp_path / "work", 4 if axis == "stage" else 2
    shutil.copytree(alone(layers), folder, ignore=shutil.ignore_patterns("runs"))
    port = free_port()
    joined = [
        start(
            folder,
            *SETTINGS,
            *AXES[axis],
            devices=4 // processes,
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES=str(processes),
            JAX_PROCESS_ID=str(number),
        )
        for number in range(processes)
    ]
    for process in joined:
        finish(process)
    mine, wanted = metrics(folder), metrics(alone(layers), f"layers-{layers}")
    assert [r["step"] for r in mine] == [1, 2, 3], "one process writes the metrics, once"
    assert [r["batch_digest"] for r in mine] == [r["batch_digest"] for r in wanted]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in mine], [r[name] for r in wanted], rtol=1e-5, err_msg=name)
