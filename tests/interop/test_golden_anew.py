"""Soaks with the Hugging Face library itself: the recorded cases are made anew, and it loads what `maxlm export` makes of them.

Run where torch and transformers can be imported; elsewhere MAXLM_HF_PYTHON names a Python that has them.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_hf import CASES, drawn
from safetensors.numpy import save_file

from maxlm.interop.exporting import export_model
from maxlm.interop.importing import import_model

TOOL = Path(__file__).resolve().with_name("golden_hf.py")
GOLDEN = Path(__file__).parent / "golden"
HERE = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors"))
PYTHON = os.environ.get("MAXLM_HF_PYTHON") or (sys.executable if HERE else None)
WHY = "needs torch and transformers; MAXLM_HF_PYTHON may name a Python"
pytestmark = [pytest.mark.soak, pytest.mark.skipif(PYTHON is None, reason=WHY)]


def run(folder: Path, *arguments: str) -> str:
    assert PYTHON is not None
    theirs = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it has other packages than we
    done = subprocess.run([PYTHON, str(TOOL), *arguments], cwd=folder, env=theirs, text=True, capture_output=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_library_still_says_what_was_recorded(tmp_path):
    """Within what the suite allows our own: 1e-5 of logits and loss, 1e-4 of gradients."""
    run(tmp_path, str(tmp_path / "anew"))
    names = sorted(path.name for path in GOLDEN.glob("*.npz"))
    assert sorted(path.name for path in (tmp_path / "anew").iterdir()) == names
    assert {name.removesuffix(".npz") for name in names} == {*CASES, "mxfp4", "fp8"}
    for name in names:
        old, new = np.load(GOLDEN / name), np.load(tmp_path / "anew" / name)
        assert sorted(old.files) == sorted(new.files), name
        for key in old.files:
            if key == "config":
                continue  # its version of the library
            bound = 1e-4 if key.startswith("grad ") else 1e-5
            scale = max(np.abs(old[key]).max(), 1e-3)
            assert np.abs(new[key].astype(np.float64) - old[key]).max() <= bound * scale, (name, key)


def test_the_library_loads_every_export(tmp_path):
    for name in CASES:
        recorded, source = np.load(GOLDEN / f"{name}.npz"), tmp_path / "source" / name
        source.mkdir(parents=True)
        (source / "config.json").write_text(str(recorded["config"]))
        keys = [key.removeprefix("grad ") for key in recorded.files if key.startswith("grad ")]
        save_file({key: drawn(key, recorded[f"grad {key}"].shape) for key in keys}, source / "model.safetensors")
        import_model(source, tmp_path / "in" / name, [], lambda done, total: None)
        export_model(tmp_path / "in" / name, tmp_path / "out" / name, "float32", "5GB", None, lambda done, total: None)
    told = dict(re.findall(r"^([\w.-]+): ([\d.e+-]+)$", run(tmp_path, "--compare", str(tmp_path / "out")), flags=re.MULTILINE))
    assert told.keys() == CASES.keys()
    assert {name: value for name, value in told.items() if float(value) > 1e-5} == {}
