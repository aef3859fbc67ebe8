"""Find the largest model that each kind of parallelism can train, by compiling: writes docs/lab/memory.md and docs/lab/memory.png.

    python tools/lab/memory_study.py [--devices 4 8] [--tiers [--only TEXT]]

The study follows DeepSpeed's third-party characterisation: a GPT-2-like model (16 heads, 2,048 wide, sequences of 256, 16 of them a
device) gets layers until the step no longer fits. Theirs ran on A100s of 40 GB; ours are compiled for TPU v6e chips of 32 GB, without the
hardware. Each row takes about three compiles of a minute or two: memory is linear in layers, so two compiles predict the third.

`--tiers` prints a table of `memory.offload_state` instead, for docs/explanation/memory-tiers.md, with the predicted time of a step.
`--only`: those whose name has TEXT.
"""

import argparse
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxlm.compiler.aot import leave_chips_alone

leave_chips_alone()

import jax  # noqa: E402 - it reads the environment when it is imported

from maxlm.compiler.aot import CompiledStep, build, compile_step  # noqa: E402
from maxlm.config.schema import Config  # noqa: E402
from maxlm.cost.step_cost import program_cost  # noqa: E402
from maxlm.hardware.chips import GIB  # noqa: E402
from maxlm.hardware.topologies import parse  # noqa: E402
from maxlm.hlo.parser import read  # noqa: E402
from maxlm.models import count_parameters  # noqa: E402
from maxlm.planning.analytic import HOST_SHARE  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs" / "lab"
TOPOLOGIES = {4: "v6e:2x2", 8: "v6e:2x4"}
MOST = 4000  # layers
PUBLISHED_BYTES = 40e9
STATE_BYTES = 16  # a parameter
EXACT = 0.02  # of the layers found
MODEL = {"vocab_size": 50304, "d_model": 2048, "n_heads": 16, "d_ff": 8192, "activation": "gelu", "norm": "layernorm", "bias": "all"}
MODEL |= {"learned_positions": {"max_seq_len": 256}, "tie_embeddings": True}
PARAMETERS_A_LAYER = 50.4e6
ALL, HALF = 0, -1


@dataclass(frozen=True)
class Way:
    """A kind of parallelism over n devices: the axes of the mesh, and what was published for 4 and 8, in parameters."""

    name: str
    mesh: Mapping[str, int]  # ALL stands for all devices, HALF for half of them
    published: Mapping[int, float]
    whole_bytes: int = 0  # a parameter, of weights, gradient and moments that every device holds
    microbatches: int = 1
    tiers: Mapping[str, Any] | None = None  # memory.offload_state
    offload: tuple[str, ...] = ()  # memory.offload


MEGATRON = {4: 5.5e9, 8: 11.4e9}
WAYS = (
    Way("replicated (DDP)", {"data": ALL, "fsdp": 1}, {4: 1.4e9, 8: 1.4e9}, whole_bytes=16),
    Way("ZeRO-1", {"fsdp": ALL, "zero": 1}, {4: 4.4e9, 8: 6.4e9}, whole_bytes=4),
    Way("ZeRO-2", {"fsdp": ALL, "zero": 2}, {4: 5.2e9, 8: 8.5e9}, whole_bytes=2),
    Way("tensor parallel", {"fsdp": 1, "tensor": ALL}, MEGATRON),
    Way("tensor parallel, 2 stages", {"fsdp": 1, "tensor": HALF, "stage": 2}, MEGATRON, microbatches=8),
    Way("ZeRO-3", {"fsdp": ALL, "zero": 3}, {4: 6.6e9, 8: 13.5e9}),
)

HOST = {"optimizer": "host", "master": "host"}
LAYERS = HOST | {"gradients": "host", "weights": "host"}
FILE = {"optimizer": "nvme", "master": "nvme", "nvme": {"dir": "/mnt/disk"}}
WITH_CPU, WITH_NVME = {4: 14.2e9, 8: 28.4e9}, {4: 33.3e9, 8: 66.6e9}  # on four GPUs; for eight devices twice as much
TIERED = (
    Way("moments in host memory", {"fsdp": ALL}, WITH_CPU, tiers={"optimizer": "host"}),
    Way("moments and masters in host memory", {"fsdp": ALL}, WITH_CPU, tiers=HOST),
    Way("the same, and layers' inputs", {"fsdp": ALL}, WITH_CPU, tiers=HOST, offload=("layer_input",)),
    Way("all of them, and layers' weights and gradients", {"fsdp": ALL}, WITH_NVME, tiers=LAYERS, offload=("layer_input",)),
    Way("moments and masters in a file, layers' inputs in host memory", {"fsdp": ALL}, WITH_NVME, tiers=FILE, offload=("layer_input",)),
)


def config_of(way: Way, devices: int, layers: int) -> Config:
    return Config.model_validate(
        {
            "model": {**MODEL, "n_layers": layers},
            "data": {"store": "unused", "seq_len": 256},
            "train": {"steps": 10, "global_batch": 16 * devices, "microbatches": way.microbatches},
            "mesh": {axis: {ALL: devices, HALF: devices // 2}.get(size, size) for axis, size in way.mesh.items()},
            "memory": {"remat": "full", "offload": way.offload, "offload_state": way.tiers},
            "cluster": {"topology": TOPOLOGIES[devices]},
        }
    )


def largest(way: Way, devices: int) -> tuple[int, CompiledStep]:
    """(most layers that fit, within EXACT of them; their compiled step)."""
    compiled: dict[int, CompiledStep] = {}
    layers = round(way.published[devices] / PARAMETERS_A_LAYER)
    while True:
        step = compile_step(config_of(way, devices, layers), parse(TOPOLOGIES[devices]))
        compiled[layers] = step
        used = f"{step.needed / GIB:.2f} of {step.available / GIB:.2f} GiB"
        print(f"{way.name}, {devices} devices, {layers} layers: {used}, {load(step, devices):.3f} of what there is", flush=True)
        fitting = max((n for n in compiled if compiled[n].fits and load(compiled[n], devices) <= 1), default=0)
        failing = min((n for n in compiled if n > fitting), default=MOST)
        if failing - fitting <= max(1, EXACT * fitting):
            return fitting, compiled[fitting]
        layers = min(max(_guess(compiled, devices), fitting + 1), failing - max(1, int(EXACT / 2 * failing)))  # memory is not quite linear


def load(step: CompiledStep, devices: int) -> float:
    """Share that a step takes of a chip's HBM, or of what a chip has of host memory for state, if that is larger."""
    room = HOST_SHARE * (parse(TOPOLOGIES[devices]).chip.host_bytes or float("inf"))
    return max(step.needed / step.available, step.memory.host / room if step.memory is not None else 0.0)


def _guess(compiled: Mapping[int, CompiledStep], devices: int) -> int:
    """The layers that just fit, on the line through the two compiled that come nearest to it."""
    loads = {n: load(step, devices) for n, step in compiled.items()}
    nearest = sorted(compiled, key=lambda n: abs(loads[n] - 1))[:2]
    if len(nearest) == 1:  # 1.5 GiB are not of layers
        other = 1.5 * GIB / compiled[nearest[0]].available
        return int(nearest[0] * (1 - other) / (loads[nearest[0]] - other))
    one, two = nearest
    return one + int((1 - loads[one]) // ((loads[one] - loads[two]) / (one - two)))


HEAD = """# Largest model that fits in memory

`python tools/lab/memory_study.py`, {date}, jax {jax}: a GPT-2-like model (16 heads, 2,048 wide, sequences of 256, 16 a device, AdamW,
float32 master weights, bfloat16 compute, full remat) with the most layers that the compiler fits into {available:.2f} GiB of a TPU v6e
chip; it refuses 2% more. The published figures are from DeepSpeed's third-party characterisation, for A100s of 40 GB, {more:.2f} times
as much.

| parallelism | devices | layers | parameters | published | ours / published, equal memory | to replicated: ours | published | limit |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
The limit is computed from the bytes of the state per parameter. Replicas hold 16 (weights, gradient and two moments in float32). ZeRO-1
holds 2 + 2 on every device and splits 12, ZeRO-2 holds 2 on every device and splits 14, the others split all 16. Most of the published
ratios are above this limit, because the published replicated model held 28 bytes a parameter (1.4 B in 40 GB) and ours holds 16.3.
Compare the column at equal memory instead.

![Bar chart of the table](memory.png)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=sorted(TOPOLOGIES), choices=sorted(TOPOLOGIES))
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--only", metavar="TEXT", default="")
    arguments = parser.parse_args()
    if arguments.tiers:
        study_tiers(arguments.devices, arguments.only)
        return
    found: dict[tuple[str, int], int] = {}
    available = 0
    for devices in arguments.devices:
        for way in WAYS:
            found[way.name, devices], step = largest(way, devices)
            available = step.available
    write(found, available)


def study_tiers(counts: Sequence[int], only: str) -> None:
    """Print a row for each way of TIERED with `only` in its name, on each number of devices. With a file: the time of gradients alone."""
    heads = ("state", "chips", "layers", "parameters", "published, scaled by memory", "step, s", "GB of host memory a chip")
    print(f"| {' | '.join(heads)} |\n{len(heads) * '|---'}|")
    for devices in counts:
        for way in (way for way in TIERED if only in way.name):
            layers, step = largest(way, devices)
            config, topology = config_of(way, devices, layers), parse(TOPOLOGIES[devices])
            seconds = program_cost(build(config, topology), read(step.text), topology).total_s
            scaled = way.published[devices] * step.available / PUBLISHED_BYTES
            host = step.memory.host / 1e9 if step.memory is not None else 0.0
            sizes = f"{count_parameters(config.model) / 1e9:.1f} B | {scaled / 1e9:.1f} B"
            print(f"| {way.name} | {devices} | {layers} | {sizes} | {seconds:.2f} | {host:.0f} |", flush=True)


def write(found: Mapping[tuple[str, int], int], available: int) -> None:
    """Write docs/lab/memory.md and its chart: the layers `found` by way and devices, where a chip has `available` bytes."""
    ways = {way.name: way for way in WAYS}
    sizes = {(name, n): count_parameters(config_of(ways[name], n, layers).model) for (name, n), layers in found.items()}
    more = PUBLISHED_BYTES / available
    head = HEAD.format(date=datetime.date.today(), jax=jax.__version__, available=available / GIB, more=more)
    lines = []
    for (name, n), layers in found.items():
        size, published = sizes[name, n], ways[name].published[n]
        whole = ways[name].whole_bytes
        most = STATE_BYTES / (whole + (STATE_BYTES - whole) / n)
        ours, theirs = size / sizes[WAYS[0].name, n], published / WAYS[0].published[n]
        compared = f"{published / 1e9:.1f} B | {size / published * more:.2f} | {ours:.1f} | {theirs:.1f} | {most:.1f}"
        lines.append(f"| {name} | {n} | {layers} | {size / 1e9:.2f} B | {compared} |")
    (DOCS / "memory.md").write_text(head + "\n".join(lines) + "\n" + TAIL, encoding="utf-8")
    draw(sizes)


def draw(found: Mapping[tuple[str, int], int]) -> None:
    """Write a bar chart of our figures beside the published ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = sorted({devices for _, devices in found})
    figure, panels = plt.subplots(1, len(counts), figsize=(5.5 * len(counts), 3.6), squeeze=False, layout="constrained")
    for panel, devices in zip(panels[0], counts, strict=True):
        for shift, label, sizes in (
            (-0.2, "maxlm, v6e, 32 GB", [found[way.name, devices] for way in WAYS]),
            (0.2, "published, A100, 40 GB", [way.published[devices] for way in WAYS]),
        ):
            bars = panel.barh([i + shift for i in range(len(WAYS))], [size / 1e9 for size in sizes], height=0.38, label=label)
            panel.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        panel.set_yticks(range(len(WAYS)), [way.name for way in WAYS])
        panel.invert_yaxis()
        panel.set_title(f"{devices} devices")
        panel.set_xlabel("parameters, billions")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(loc="upper right", frameon=False, fontsize=8)
    figure.savefig(DOCS / "memory.png", dpi=130)


if __name__ == "__main__":
    main()
