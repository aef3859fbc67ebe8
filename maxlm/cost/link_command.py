"""`maxlm bench-comm --during-training` for a machine that is named: the use of its links, from the compiled step."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from maxlm.base.errors import UserError
from maxlm.base.paths import check_out
from maxlm.cost.compile_command import load_for_machine, output_console, progress


def run(name: str, overrides: Sequence[str], topology: str | None, slices: int | None, out: Path | None, *, as_json: bool) -> int:
    """Compile the step of a config and print the use of each link while it runs; 0. Raises UserError, also for a step that does not fit."""
    loaded, machine = load_for_machine(name, overrides, topology, slices, assume=True)
    config = loaded.config
    if not machine.is_tpu:
        raise UserError(
            f"cluster.topology = {machine.name}: schedules are read of TPUs only; run this on the GPUs with cluster=null, to read counters."
        )
    from maxlm.telemetry.link_use import plot, table

    check_out(out)
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    from maxlm.compiler.aot import build
    from maxlm.cost.link_schedule import link_uses, needs, needs_table, runs_of
    from maxlm.cost.step_cost import program_network, replay, unknown_loops, unknown_loops_line
    from maxlm.cost.verify import step_of
    from maxlm.hlo.parser import read
    from maxlm.telemetry.formatting import duration, percent

    with progress() as show_progress:
        show_progress(f"compiling the training step of {config.run.name} for {machine.name}")
        program = build(config, machine)
        step = step_of(program, machine)
    if not step.fits:
        raise UserError(f"the step does not fit {machine.name}: see `maxlm compile` of the same settings for what would.")
    network = program_network(program, machine)
    module = read(step.text)
    root, _ = replay(module, network)
    uses = link_uses(root, network, machine)
    found = needs(module, network, {use.kind for use in uses if use.peak > 0})
    number = f"{machine.slices} slices of {machine.name}" if machine.slices > 1 else machine.name
    exposed_s = sum(len(runs.begins) * runs.span.exposed_s for runs in runs_of(root))
    loops = unknown_loops(module)
    if as_json:
        mesh = {axis: size for axis, size in program.mesh.shape.items() if size > 1}
        facts = {"source": "schedule", "run": config.run.name, "topology": machine.name, "slices": machine.slices, "mesh": mesh}
        times = {"step_s": root.seconds, "exposed_s": exposed_s, "unknown_loops": loops}
        links = {"links": [use.to_json() for use in uses], "needs": [need.to_json() for need in found]}
        sys.stdout.write(json.dumps({**facts, **times, **links}) + "\n")
    else:
        console = output_console()
        share = percent(exposed_s / root.seconds if root.seconds else 0.0)
        step_s = duration(root.seconds)
        console.print(f"{config.run.name} on {number}: a step of {step_s} (predicted), {share} of it exposed communication.")
        if loops:
            console.print(unknown_loops_line(loops))
        console.print("Bandwidth of the busiest link of each kind at a chip, one way, by the schedule of the compiled program:")
        console.print(table(uses, "mesh axes"))
        if found:
            console.print("Step with other bandwidth of one kind of link, relative to now:")
            console.print(needs_table(found))
    if out is not None:  # after the figures, which a full disk must not take along
        plot(uses, f"{config.run.name} on {number}: links of a chip during a step, predicted", out)
        if not as_json:
            output_console().print(f"plot: {out}")
    return 0
