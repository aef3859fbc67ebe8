"""Trains the same small model with MaxText and with maxlm, in turn on this machine, and compares their speed.

    python tools/compare_maxtext.py --maxtext-python ENV/bin/python [--rounds 2] [--steps 25]
        [--maxtext-option remat_policy=minimal_with_context] [--maxlm-command "python -m maxlm train FILE"]

ENV is a virtual environment of its own with MaxText in it: `pip install 'maxtext[tpu]==0.2.5'`. The model: 4 layers, 256 wide,
MLP 1024, 4 heads of 64, vocabulary 8192, batch 4 x 512 tokens, float32, on the CPU. maxlm's settings and its number of steps are
in configs/runs/compare-maxtext.yml; its data must be prepared beforehand. Neither program sees a compilation cache.

`first step`: seconds from the command to the first finished step. `tokens/s`: the median over the steps after the first 3.
`others`: cores that other programs kept busy meanwhile; the figures count only where this is near 0. `ratio`: maxlm / MaxText.
MaxText 0.2.5 cannot train without remat: `remat_policy=none` recomputes as `full` does.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = "configs/runs/compare-maxtext.yml"
UNSTEADY_STEPS = 3
POLL_SECONDS = 0.05
MAXTEXT_STEP = re.compile(r"completed step: \d+, .*?Tokens/s/device: ([\d.]+)")
MAXTEXT_OPTIONS = (
    *("run_name=compare", "hardware=cpu", "skip_jax_distributed_system=true", "dataset_type=synthetic"),
    *("base_num_decoder_layers=4", "base_emb_dim=256", "base_mlp_dim=1024", "base_num_query_heads=4", "base_num_kv_heads=4"),
    *("head_dim=64", "vocab_size=8192", "per_device_batch_size=4", "max_target_length=512", "dtype=float32", "weight_dtype=float32"),
    *("attention=dot_product", "enable_checkpointing=false", "enable_tensorboard=false", "log_config=false", "jax_cache_dir="),
)


@dataclass(frozen=True)
class Contender:
    """A training program: its command, where it runs, and how the speed of each step is read from the file it writes."""

    name: str
    command: list[str]
    directory: Path
    steps_file: Path
    read_speeds: Callable[[str], list[float]]


@dataclass(frozen=True)
class Measurement:
    """Figures of one run."""

    first_step_s: float
    tokens_per_s: float
    cores_of_others: float


def maxtext_speeds(log: str) -> list[float]:
    """Tokens a second of each step that MaxText's log tells of. One device, so the device's speed is the machine's."""
    return [float(speed) for speed in MAXTEXT_STEP.findall(log)]


def maxlm_speeds(metrics: str) -> list[float]:
    """Tokens a second of each step in maxlm's metrics; a last line still being written does not count."""
    return [float(json.loads(line)["tokens_per_s"]) for line in metrics.splitlines(keepends=True) if line.endswith("\n")]


def contenders(arguments: argparse.Namespace, directory: Path) -> list[Contender]:
    """MaxText, then maxlm, each writing only under `directory`."""
    options = [*MAXTEXT_OPTIONS, f"steps={arguments.steps}", f"base_output_directory={directory}", *arguments.maxtext_option]
    maxtext_command = [str(arguments.maxtext_python.absolute()), "-m", "maxtext.trainers.pre_train.train", *options]
    maxlm_command = [*arguments.maxlm_command, f"run.dir={directory}"]
    metrics = directory / Path(CONFIG).stem / "metrics.jsonl"
    return [
        Contender("MaxText", maxtext_command, directory, directory / "MaxText.log", maxtext_speeds),
        Contender("maxlm", maxlm_command, REPOSITORY, metrics, maxlm_speeds),
    ]


def machine_seconds() -> float:
    """Seconds that this machine's cores have been busy since it started, what its host took included."""
    user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Seconds that this program and its finished children have kept a core busy."""
    return sum(os.times()[:4])


def first_step_seconds(process: subprocess.Popen[bytes], contender: Contender, begin: float, limit_s: float) -> float:
    """Seconds from `begin` until the first step is told of; infinite where the program ends without one."""
    while process.poll() is None:
        if contender.steps_file.exists() and contender.read_speeds(contender.steps_file.read_text(errors="replace")):
            return time.monotonic() - begin
        if time.monotonic() - begin > limit_s:
            raise subprocess.TimeoutExpired(contender.command, limit_s)
        time.sleep(POLL_SECONDS)
    return float("inf")


def measure(contender: Contender, log: Path, limit_s: float) -> Measurement:
    """Run the program to its end. Exits with the end of its log where it fails, takes too long or tells of too few steps."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    no_programs_kept = str(log.with_suffix(".compiled"))  # a new folder
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": no_programs_kept}
    others_before, begin = machine_seconds() - own_seconds(), time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            contender.command, cwd=contender.directory, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            first_step_s = first_step_seconds(process, contender, begin, limit_s)
            process.wait(timeout=max(0.0, limit_s - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            fail(contender, log, f"took more than {limit_s:g} seconds")
        finally:
            process.kill()
            process.wait()
    others = (machine_seconds() - own_seconds() - others_before) / (time.monotonic() - begin)
    if process.returncode != 0:
        fail(contender, log, f"ended with exit code {process.returncode}")
    speeds = contender.read_speeds(contender.steps_file.read_text(errors="replace")) if contender.steps_file.exists() else []
    if len(speeds) <= UNSTEADY_STEPS:
        fail(contender, log, f"told of {len(speeds)} steps in {contender.steps_file}, which is too few")
    return Measurement(first_step_s, statistics.median(speeds[UNSTEADY_STEPS:]), max(0.0, others))


def fail(contender: Contender, log: Path, reason: str) -> NoReturn:
    """End this program, showing how the other one ended."""
    ending = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise SystemExit(f"{ending}\n\n{contender.name} {reason}. The command was:\n{shlex.join(contender.command)}")


def middle(measurements: list[Measurement]) -> Measurement:
    columns = zip(*(asdict(measurement).values() for measurement in measurements), strict=True)
    return Measurement(*(statistics.median(column) for column in columns))


def report(rounds: dict[str, list[Measurement]]) -> None:
    """The table, and the same figures as one line of JSON."""
    table = Table("", "round", "first step (s)", "tokens/s", "others (cores)")
    medians = {name: middle(measurements) for name, measurements in rounds.items()}
    for name, measurements in rounds.items():
        numbered = [(str(number), found) for number, found in enumerate(measurements, 1)]
        for label, found in [*numbered, ("median", medians[name])]:
            table.add_row(name, label, f"{found.first_step_s:.1f}", f"{found.tokens_per_s:,.0f}", f"{found.cores_of_others:.2f}")
    maxtext, maxlm = medians["MaxText"], medians["maxlm"]
    ratios = {name: getattr(maxlm, name) / getattr(maxtext, name) for name in ("first_step_s", "tokens_per_s")}
    table.add_row("ratio", "", f"{ratios['first_step_s']:.2f}", f"{ratios['tokens_per_s']:.2f}", "")
    Console().print(table)
    every = {name: [asdict(measurement) for measurement in measurements] for name, measurements in rounds.items()}
    print(json.dumps({"ratio": ratios, "median": {name: asdict(found) for name, found in medians.items()}, "rounds": every}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maxtext-python", type=Path, required=True, help="the Python of the environment MaxText is in")
    parser.add_argument("--maxlm-command", type=shlex.split, default=[sys.executable, "-m", "maxlm", "train", CONFIG])
    parser.add_argument("--maxtext-option", action="append", default=[], metavar="KEY=VALUE", help="given to MaxText; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each program")
    parser.add_argument("--steps", type=int, default=25, help="of each MaxText run")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds one run may take")
    arguments = parser.parse_args()
    rounds: dict[str, list[Measurement]] = {"MaxText": [], "maxlm": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="compare-maxtext-") as directory:
            for contender in contenders(arguments, Path(directory)):
                log = Path(directory) / f"{contender.name}.log"
                rounds[contender.name].append(measure(contender, log, arguments.limit))
    report(rounds)


if __name__ == "__main__":
    main()
