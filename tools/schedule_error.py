"""Compare what a step takes by its schedule with what it takes by its machine code, for which XLA states the cycles of matmuls.

    python tools/schedule_error.py runs/llama3-8b-v6e-256 [key=value ...]

The machine code takes minutes, unless it was made before. `maxlm.cost.efficiency.SCHEDULED_MATMULS` was read off such programs.
"""

import argparse
import re

from rich.console import Console
from rich.table import Table

from maxlm.compiler.aot import build, compile_program, leave_chips_alone
from maxlm.config import load, rules
from maxlm.cost.step_cost import StepCost, program_cost
from maxlm.hlo.parser import read

_CYCLES = re.compile(r'"estimated_cycles":"\d+",?')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    leave_chips_alone()
    config = load(arguments.config, arguments.overrides).config
    topology = rules.topology_of(config)
    program = build(config, topology)
    step = compile_program(program, topology)
    if not step.fits:
        parser.error(f"{arguments.config} does not fit {topology.name}: see `maxlm compile`.")
    coded, scheduled = (program_cost(program, read(text), topology) for text in (step.text, _CYCLES.sub("", step.text)))
    show(coded, scheduled)


def show(coded: StepCost, scheduled: StepCost) -> None:
    """Print both, part by part."""
    table = Table("", "machine code", "schedule", "error")
    for name in ("total_s", "matmul_s", "attention_s", "kernel_s", "memory_s", "exposed_s"):
        one, other = getattr(coded, name), getattr(scheduled, name)
        table.add_row(name.removesuffix("_s"), f"{one:.4f} s", f"{other:.4f} s", f"{other / one - 1:+.1%}" if one else "")
    Console().print(table)


if __name__ == "__main__":
    main()
