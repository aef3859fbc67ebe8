"""The benchmark of kernels runs from end to end where there is only a CPU, at shapes that it can do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "bench_kernels.py"


@pytest.mark.soak
def test_every_operation_is_timed():
    command = [sys.executable, str(PROGRAM), "--tiny", "--rounds", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert not [row for row in rows if row["problem"]]
    assert {(row["operation"], row["implementation"]) for row in rows} >= {
        (operation, kernel)
        for operation in ("attention", "gated_mlp", "grouped_matmul", "linear_cross_entropy")
        for kernel in ("ours", "all logits" if operation == "linear_cross_entropy" else "xla")
    }
    for row in rows:
        assert row["milliseconds"] > 0 and row["tflops"] > 0 and row["peak"] is None, "a CPU's peak is not known"


def test_an_unknown_operation_is_refused(monkeypatch, capsys):
    import bench_kernels

    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "softmax"])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    assert ended.value.code == 2 and "no operation softmax: there are attention, gated_mlp" in capsys.readouterr().err
