"""The benchmark of kernels runs from end to end where there is only a CPU, at shapes that it can do."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "bench_kernels.py"


def test_every_operation_is_timed():
    command = [sys.executable, str(PROGRAM), "--tiny", "--rounds", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert not [row for row in rows if "failed" in row]
    assert {(row["operation"], row["kernel"]) for row in rows} >= {
        (operation, kernel)
        for operation, others in {"attention": "xla", "gated_mlp": "xla", "grouped_matmul": "xla", "cross_entropy": "all logits"}.items()
        for kernel in ("ours", others)
    }
    for row in rows:
        assert row["ms"] > 0 and row["tflops"] > 0 and row["of_peak"] is None, "a CPU's peak is not known"


def test_an_unknown_operation_is_refused():
    done = subprocess.run([sys.executable, str(PROGRAM), "softmax"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no operation softmax: there are attention, gated_mlp" in done.stderr
