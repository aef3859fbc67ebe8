"""The table of the study of number formats, from cells written by hand; nothing is trained."""

import json
import sys
from pathlib import Path

import fork_server

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "lab" / "precision_quality.py"
CELLS = {"bf16": (4.0, 4.02, 3.98), "moments-int8": (4.001, 4.021, 3.981), "other": (4.04, 4.06, float("nan"))}


def test_formats_are_compared_by_seed(tmp_path):
    for name, losses in CELLS.items():
        for seed, loss in enumerate(losses):
            cell = {"format": name, "settings": [], "seed": seed, "steps": 20, "held_out": loss}
            (tmp_path / f"{name}-{seed}.json").write_text(json.dumps(cell))
    command = [sys.executable, str(PROGRAM), str(tmp_path), "--steps", "20", "--table"]
    printed = fork_server.run(command, capture_output=True, text=True, check=True).stdout
    assert "between seeds): 0.0200." in printed
    assert "| moments-int8 | 3 | 4.0010 | +0.025% | yes | yes |" in printed
    assert "| other | 3 | 4.0500 | diverged |  |  |" in printed
    rows = {row["format"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert rows["moments-int8"]["spread"] < 1e-6 and rows["other"]["diverged"] == 1
