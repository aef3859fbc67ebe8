"""`maxlm bench-comm --during-training` on the devices of this process or cluster: counters of their links while steps run."""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from maxlm.base.console import Console, print_line
from maxlm.base.errors import ConfigError
from maxlm.base.paths import check_out
from maxlm.cluster import agree, cluster
from maxlm.cluster.cluster import Cluster
from maxlm.config import Config
from maxlm.hardware.chips import chip_of
from maxlm.parallel import build_mesh
from maxlm.run.consistency import check_devices
from maxlm.run.jax_setup import enable_compilation_cache, select_platform
from maxlm.run.open_data import open_data_on_all_hosts
from maxlm.telemetry.formatting import duration
from maxlm.telemetry.gpus import visible_gpus
from maxlm.telemetry.link_counters import PERIOD_S, Sampler, read_host
from maxlm.telemetry.link_use import LinkUse, plot, table
from maxlm.telemetry.phases import Phases
from maxlm.training import fits
from maxlm.training.program import build_program

WARM_UP = 2  # steps before the counters are read: connections are made in the first
WIDTH = 120  # columns of a table
MOST_ROWS = 24  # of a table; --json has them all


@dataclass(frozen=True)
class Found:
    """Use of the links of this process's host during `steps` of `step_s` seconds each; [] where another process reads them. `nvml`: if the
    GPUs' driver was read; None without GPUs.
    """

    step_s: float
    steps: int
    nvml: bool | None
    uses: list[LinkUse]


def run(config: Config, named: Mapping[str, str], steps: int, out: Path | None, *, as_json: bool) -> int:
    """Train for a few steps and print the use of every link of every host on process 0. Returns 0. Raises UserError before training.

    Nothing is saved. `named`: settings of the cluster on the command line.
    """
    check_out(out)
    if config.objective is not None and config.objective_facts.reference:
        rule, fix = "needs the figures of a reference model, which this command does not compute", "use sft, which sends the same"
        raise ConfigError("objective.kind", config.objective.kind, rule, fix)
    log = Console(stderr=True)
    phases = Phases(log)
    select_platform()
    with (
        cluster.stdout_to_stderr(),
        cluster.joined(named, partial(print_line, log)) as here,
    ):
        enable_compilation_cache()
        phases.primary = jax.process_index() == 0
        check_devices(config.cluster, config.mesh.slices, jax.devices())
        with fits.explain_out_of_memory("training"):
            found = measure(config, here, steps, phases)
        rows = agree.agree([use.to_json() for use in found.uses])
    if phases.primary:
        _print(config.run.name, found, [LinkUse.from_json(row) for part in rows for row in part], here, out, as_json=as_json)
    return 0


def measure(config: Config, here: Cluster, steps: int, phases: Phases) -> Found:
    """Run `WARM_UP` steps, then `steps` while the links of this host are sampled. Nothing is saved or evaluated."""
    data = open_data_on_all_hosts(config, phases).train
    data.check_length(WARM_UP + steps)
    program = build_program(config, build_mesh(config))
    with phases("compiling the step"):
        state, step = program.init(), program.step
    batches = data.batches(0, program.batch_sharding, WARM_UP + steps)
    metrics = None
    try:
        with jax.set_mesh(program.mesh), contextlib.ExitStack() as sampling, phases(f"training for {steps} steps"):
            samplers, nvml = _samplers(here)
            for number in range(WARM_UP + steps):
                if number == WARM_UP:
                    jax.block_until_ready(state)
                    for sampler in samplers:
                        sampling.enter_context(sampler)
                    began = time.monotonic()  # the first reading of PCIe takes 40 ms a GPU
                before, (state, metrics) = metrics, step(state, batches.get())
                jax.block_until_ready(before)  # one step ahead of the device, as in training
            jax.block_until_ready((state, metrics))
            step_s = (time.monotonic() - began) / steps
    finally:
        batches.close()
    host = here.hosts[jax.process_index()]
    return Found(step_s, steps, nvml, [use for sampler in samplers for use in sampler.uses(host)])


def _samplers(here: Cluster) -> tuple[list[Sampler], bool | None]:
    """(samplers of the links of this host, if NVML is there; None without GPUs). The first process on a host reads for all."""
    if here.hosts.index(here.hosts[jax.process_index()]) != jax.process_index():
        return [], None
    samplers = [Sampler(read_host)]
    if jax.default_backend() != "gpu":
        return samplers, None
    chip = chip_of(jax.local_devices()[0].device_kind)
    links = visible_gpus(None if chip is None else chip.ici_links * chip.ici_bytes_per_s_per_link, {})
    samplers += [] if links is None else [Sampler(links.nvlink), Sampler(links.pcie, rates=True)]
    return samplers, links is not None


def _print(name: str, found: Found, uses: list[LinkUse], here: Cluster, out: Path | None, *, as_json: bool) -> None:
    kind = jax.devices()[0].device_kind
    hosts = dict.fromkeys(here.hosts)
    where = (
        f"{jax.device_count()} x {kind}, {len(here.hosts)} process{'es' * (len(here.hosts) > 1)}, {len(hosts)} host{'s' * (len(hosts) > 1)}"
    )
    if as_json:
        facts = {"source": "counters", "run": name, "device_kind": kind, "devices": jax.device_count(), "hosts": list(hosts)}
        times = {"jax": jax.__version__, "steps": found.steps, "step_s": found.step_s, "sampled_every_s": PERIOD_S, "nvml": found.nvml}
        sys.stdout.write(json.dumps({**facts, **times, "links": [use.to_json() for use in uses]}) + "\n")
    else:
        _show(name, found, uses, where)
    if out is not None:  # after the figures, which a full disk must not take along
        plot(found.uses, f"{name} on {where}: links of {here.hosts[0]} during {found.steps} steps", out)
        if not as_json:
            sys.stdout.write(f"plot: {out}\n")


def _show(name: str, found: Found, uses: list[LinkUse], where: str) -> None:
    console = Console(width=max(WIDTH, Console().width))
    say = partial(print_line, console)
    say(f"{name} on {where}: {found.steps} steps of {duration(found.step_s)}")
    if found.nvml is False:
        say("NVLink and PCIe are not counted: there is no NVML, the library of NVIDIA's driver.")
    if not uses:
        say("No link of any host carried anything, or none is counted.")
        return
    say(f"Bandwidth of links, one way, by their counters, read every {1e3 * PERIOD_S:.0f} ms:")
    busiest = sorted(uses, key=lambda use: -use.average)
    console.print(table(busiest[:MOST_ROWS], "host"))
    if len(uses) > MOST_ROWS:
        say(f"{len(uses) - MOST_ROWS} more links carried less; --json has them all.")
