"""The examples of docs/reference/python.md run, one after another, as the page says; and the notebooks of docs/notebooks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "python.md"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
AHEAD = "## Before any chip is paid for"  # whose examples call the compiler for TPUs


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(code: list[str], folder: Path, capsys) -> str:
    """Run blocks in one namespace in `folder`; return the text they print."""
    before, names = Path.cwd(), {"__name__": "page"}
    os.chdir(folder)
    try:
        for number, block in enumerate(code, 1):
            exec(compile(block, f"block {number}", "exec"), names)
    finally:
        os.chdir(before)
    return capsys.readouterr().out


def test_examples_of_the_page_run(tmp_path, capsys):
    here, _, _ = PAGE.read_text(encoding="utf-8").partition(AHEAD)
    code = blocks(here)
    assert len(code) >= 9
    printed = run(code, tmp_path, capsys)
    assert "6 2" in printed and "done 6" in printed and "step 6: loss" in printed and (tmp_path / "runs/letters/report.html").is_file()


@pytest.mark.soak
def test_examples_of_compiling_and_planning_run(tmp_path, capsys):
    _, _, ahead = PAGE.read_text(encoding="utf-8").partition(AHEAD)
    printed = run(["import maxlm", *blocks(ahead)], tmp_path, capsys)
    assert "scheduled" in printed and "Chosen" in printed and (tmp_path / "planned.yml").is_file()


def test_notebooks_hold_no_output_and_go_on_from_each_other():
    assert len(NOTEBOOKS) == 4
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code"), path.name
        named = re.findall(r"\]\(([\w-]+\.ipynb)\)", json.dumps(cells))
        assert all((path.parent / name).is_file() for name in named), path.name


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, tmp_path):
    """In a kernel of its own, which prints nothing on stderr but what our own progress does."""
    nbformat, client = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    kernel = {"name": "python3"}
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    client.NotebookClient(notebook, timeout=900, kernel_name=kernel["name"], resources={"metadata": {"path": tmp_path}}).execute()
    streams = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs if output.output_type == "stream"]
    noise = "".join(output.text for output in streams if output.name == "stderr")
    assert not re.search(r"libtpu|absl|InitGoogle|E0000|W0000|TPU_", noise), noise


def test_a_script_prints_no_noise_of_libraries(tmp_path):
    """Of a whole process, with the file descriptors that C++ writes to."""
    code = 'import maxlm; print(maxlm.build(maxlm.load_config("runs/quickstart")))'
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("Program('quickstart', one device)", "")
