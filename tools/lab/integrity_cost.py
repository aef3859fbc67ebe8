"""Price the checks for silent corruption beside the training step, all compiled ahead of time for the machine of a run.

    python tools/lab/integrity_cost.py runs/llama3-8b-v5p-128 mesh.data=4

Prints seconds and memory of the step, of one comparison of copies and of one replay, and the shares of the run's time that they take at the
intervals of `integrity` (defaults where the config has none). Figures are those of `maxlm compile`: nothing is measured on a chip.
"""

import sys

from maxlm.compiler.aot import build, compile_program, leave_chips_alone

leave_chips_alone()

import jax  # noqa: E402 - it reads the environment when it is imported

from maxlm.config import load, rules  # noqa: E402
from maxlm.config.schema import IntegrityConfig  # noqa: E402
from maxlm.cost.step_cost import program_cost  # noqa: E402
from maxlm.hardware.chips import GIB  # noqa: E402
from maxlm.hardware.topologies import Topology  # noqa: E402
from maxlm.hlo.parser import read  # noqa: E402
from maxlm.training.cell_replay import CellReplay  # noqa: E402
from maxlm.training.program import Program  # noqa: E402
from maxlm.training.replicas import Replicas  # noqa: E402

REPLAY_EVERY = 1000  # where the config has none


def main(run: str, *overrides: str) -> None:
    config = load(run, list(overrides)).config
    settings, topology = config.integrity or IntegrityConfig(), rules.topology_of(config)
    program = build(config, topology)
    step = program_cost(program, read(compile_program(program, topology).text), topology)
    sizes = {axis: size for axis, size in program.mesh.shape.items() if size > 1}
    print(f"{run} {' '.join(overrides)} on {topology.name}, mesh {sizes}: estimates alone, step {step.total_s:.3f} s")
    replicas = Replicas(program.mesh, program.abstract_state)
    _show("comparison of copies", program, replicas.program, step.total_s, settings.every_steps, topology)
    print(f"    reads {replicas.bytes_on_a_device / GIB:.3f} GiB of a device, {len(replicas.names)} leaves")
    _show("replay", program, CellReplay(program).program, step.total_s, settings.replay_every or REPLAY_EVERY, topology)


def _show(name: str, program: Program, compiled: jax.stages.Compiled, step_s: float, every: int, topology: Topology) -> None:
    cost, memory = program_cost(program, read(compiled.as_text() or ""), topology), compiled.memory_analysis()
    share, beside = cost.total_s / step_s, memory.temp_size_in_bytes / GIB if memory else float("nan")
    print(
        f"{name}: {cost.total_s * 1e3:.2f} ms ({cost.exposed_s * 1e3:.2f} ms of communication), {share:.3%} of a step, "
        f"{share / every:.5%} of the time at one in {every} steps; {beside:.2f} GiB beside the state"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
