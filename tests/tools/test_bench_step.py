"""The benchmark of the step runs from end to end where there is only a CPU; against torch where torch is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import maxlm
from maxlm.config import load

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "bench_step.py"
TINY = ["model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.d_ff=48", "model.vocab_size=128"]
TINY += ["data.seq_len=32", "train.global_batch=2", "optimizer.name=adamw", "optimizer.warmup_steps=2", "optimizer.peak_lr=1e-3"]
LLAMA3 = ["model.rope={theta: 500000, scaling: {kind: llama3, factor: 32, original_seq_len: 16}}", "model.tie_embeddings=false"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(maxlm.__file__).parents[1])}
    command = [sys.executable, str(PROGRAM), "--rounds", "1", "--steps", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """The one line of the program, which ends with 2, in this process."""
    import bench_step

    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--rounds", "1", "--steps", "2", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_step.main()
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (ended.value.code, out) == (2, "")
    return line


@pytest.mark.soak
def test_the_product_is_compared_with_a_bare_function():
    done = bench("runs/quickstart", *TINY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ratio"] == pytest.approx(found["step_s"] / found["bare_step_s"]) and found["step_s"] > 0
    assert found["loop_overhead_s"] > 0


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: it is no dependency")
@pytest.mark.parametrize("rope", [[], LLAMA3], ids=["tied", "llama3-scaling"])
def test_torch_trains_the_same_model_to_the_same_losses(rope):
    done = bench("--against", "torch", "--torch-mode", "eager", "runs/quickstart", *TINY, *rope)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = found["losses"]
    assert len(ours) == 7 and ours[-1] < ours[0]
    assert theirs == pytest.approx(ours, rel=1e-4)
    assert found["ratio"] == pytest.approx(found["ours"]["step_s"] / found["torch"]["step_s"])
    assert found["ours"]["mfu"] is None and found["ours"]["tflops"] > 0, "a CPU's peak is not known"
    assert found["ours"]["tflops"] * found["ours"]["step_s"] == pytest.approx(found["torch"]["tflops"] * found["torch"]["step_s"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--torch-python", "nowhere/python", "runs/quickstart", *TINY], "nowhere/python has no torch: pip install torch"),
        (["runs/quickstart"], "optimizer.name = muon: the torch model of this benchmark has only adamw"),
        (["runs/quickstart", *TINY, "model.activation=geglu"], "model.activation = geglu"),
        (["runs/quickstart", *TINY, "model.window=8", "model.layer_pattern=[local]"], "model.layer_pattern"),
    ],
)
def test_what_torch_cannot_do_is_one_line(monkeypatch, capsys, arguments, said):
    assert said in refused(monkeypatch, capsys, "--against", "torch", *arguments)


@pytest.mark.soak
def test_a_config_is_raced_with_itself_without_8_bits():
    done = bench("--against", "high-precision", "runs/quickstart", *TINY, "precision.matmul.format=fp8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ratio"] == pytest.approx(found["quantized"]["step_s"] / found["float32"]["step_s"])
    quantized, plain = found["losses"]
    assert quantized != plain and quantized == pytest.approx(plain, rel=0.02)


def test_a_config_without_8_bits_is_no_race(monkeypatch, capsys):
    assert "precision.matmul is not set" in refused(monkeypatch, capsys, "--against", "high-precision", "runs/quickstart")


def test_each_side_of_a_race_has_the_peak_of_its_own_format(monkeypatch):
    """fp8 by fp8's peak, bfloat16 by its own; torch, which knows no peak, by ours."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import against_torch

    ours = {"step_s": 0.5, "tokens": 100, "model_flops": 1e12, "peak_flops": 8e12, "peak_bytes": None, "warmup_s": 1.0, "version": "0"}
    ours |= {"device": "chip", "losses": [1.0]}
    plain = ours | {"step_s": 1.0, "peak_flops": 4e12}
    torch = {key: ours[key] for key in ("step_s", "peak_bytes", "warmup_s", "version", "losses")}
    config = load("runs/quickstart", TINY).config
    for second in (plain, torch):
        found = against_torch.take_turns(config, {"first": lambda _: ours, "second": lambda _, turn=second: turn}, 1)
        assert (found["first"]["mfu"], found["second"]["mfu"]) == (0.25, 0.25)
