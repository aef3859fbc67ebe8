"""A run of no steps, its export and tasks, shared by the tests of this room."""

import json

import jax
import pytest
from eval_cases import ITEMS, TASKS
from small_run import make_workspace

from maxlm.checkpoint import Checkpoints
from maxlm.config import load
from maxlm.config.loader import dump
from maxlm.data.prepare import prepare
from maxlm.data.tokenizer import copy_tokenizer
from maxlm.interop.exporting import export_model
from maxlm.parallel import build_mesh
from maxlm.training.program import build_program


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with a run of no steps, its export, and tasks. The weights are large, so that choices differ."""
    folder = make_workspace(tmp_path_factory.mktemp("evaluation"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load("small.yml", ["mesh.fsdp=1", "model.init_std=0.2"]).config
        prepare(config.data)
        program = build_program(config, build_mesh(config, jax.devices()[:1]))
        run = folder / "run"
        run.mkdir()
        (run / "config.yml").write_text(dump(config))
        copy_tokenizer("store", run / "tokenizer")
        checkpoints = Checkpoints(run / "checkpoints", config.checkpoint, {})
        checkpoints.save(7, program.init(), {})
        checkpoints.close()
        export_model(run, folder / "hf", "float32", "5GB", None, lambda done, total: None)
        (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
        for name, task in TASKS.items():
            (folder / f"{name}.yml").write_text(json.dumps(task))
    return folder
