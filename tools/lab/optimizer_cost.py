"""Price the updates of several optimizers beside the training step of a run, all compiled ahead of time for its machine.

    python tools/lab/optimizer_cost.py runs/llama3-8b-v5p-128 muon soap [--step 3.1] [cluster.topology=v5p:4x8x8 ...]

Prints for each the seconds of its update alone (reduced gradients to new parameters), its memory, and its share of the step. Updates of
SOAP that renew the bases are priced apart; the mean leaves out the first, which finds them. The step is that of the run as `maxlm compile`
predicts it, or of `--step` seconds, which spares a long compilation. Figures are those of the compiled program: nothing is measured on a
chip.
"""

import argparse
import time
from unittest import mock

from maxlm.compiler.aot import build, compile_program, leave_chips_alone

leave_chips_alone()

import jax  # noqa: E402 - it reads the environment when it is imported
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from maxlm.config import Config, ConfigError, UserError, load, rules  # noqa: E402
from maxlm.config.choices import names as names_of  # noqa: E402
from maxlm.config.sections.optimizer import SoapConfig  # noqa: E402
from maxlm.cost.step_cost import StepCost, program_cost  # noqa: E402
from maxlm.hardware.chips import GIB  # noqa: E402
from maxlm.hardware.topologies import Topology  # noqa: E402
from maxlm.hlo.parser import read  # noqa: E402
from maxlm.training.program import Program  # noqa: E402
from maxlm.training.soap import SoapState  # noqa: E402


def main() -> None:
    """Price what the arguments name; wrong ones are one line, and exit code 2."""
    known = names_of("optimizer")
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a config: a path, or a name under configs/")
    parser.add_argument("given", nargs="+", metavar="RULE or KEY=VALUE", help=f"optimizers ({', '.join(known)}) and settings")
    parser.add_argument("--step", type=float, help="seconds of the step")
    arguments = parser.parse_intermixed_args()
    names = [one for one in arguments.given if "=" not in one]
    if not names or not set(names) <= set(known):
        unknown = next((f"{name} is none" for name in names if name not in known), "none is named")
        parser.error(f"name optimizers to price, of {', '.join(known)}: {unknown}")
    try:
        price(arguments.run, names, [one for one in arguments.given if "=" in one], arguments.step)
    except UserError as error:
        parser.error(str(error))


def price(run: str, names: list[str], overrides: list[str], step_s: float | None) -> None:
    """Print the cost of the update of each of the optimizers `names`, beside a step of `step_s` seconds or of the run's own."""
    config = load(run, overrides).config
    if config.cluster is None:
        raise ConfigError("cluster.topology", None, "is not set, and an update is priced for a machine", "add one, such as v5p:4x4x4")
    topology = rules.topology_of(config)
    if step_s is None:
        program = build(config, topology)
        step_s = program_cost(program, read(compile_program(program, topology).text), topology).total_s
    print(f"{run} {' '.join(overrides)} on {topology.name}: estimates alone, step {step_s:.3f} s", flush=True)
    for name in names:
        settings = load(run, [*overrides, f"optimizer.name={name}"]).config
        program = build(settings, topology)
        bytes_of = sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(program.abstract_state.opt_state))
        numbers = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.params))
        total_s, temporaries = 0.0, 0
        for kind, (updates, weight) in kinds_of_update(settings).items():
            begun = time.perf_counter()
            cost, bytes_here = update_cost(program, topology, updates)
            total_s, temporaries = total_s + weight * cost.total_s, max(temporaries, bytes_here)
            print(
                f"{name}, {kind}: {cost.total_s * 1e3:.2f} ms ({cost.exposed_s * 1e3:.2f} ms of communication), "
                f"{bytes_here / GIB:.2f} GiB of temporaries; compiled in {time.perf_counter() - begun:.0f} s",
                flush=True,
            )
            for op in cost.top[:5]:
                print(f"    {op.kind} {op.seconds * 1e3:.2f} ms, {op.times} times: {op.where[-90:]}")
            if cost.unknown_loops:
                print(f"    {len(cost.unknown_loops)} loops are counted once, since data decide how often they turn")
        print(
            f"{name}: {total_s * 1e3:.2f} ms in the mean, {total_s / step_s:.2%} of the step, "
            f"{bytes_of / numbers:.2f} bytes a parameter, {temporaries / GIB:.2f} GiB of temporaries",
            flush=True,
        )


def kinds_of_update(config: Config) -> dict[str, tuple[int | None, float]]:
    """Kind -> (count of updates at which it is compiled, None for any; its share of the updates of a run)."""
    if config.optimizer.name != "soap":
        return {"every update": (None, 1.0)}
    every = (config.optimizer.soap or SoapConfig()).every
    return {"bases kept": (1, 1 - 1 / every), "bases renewed": (every, 1 / every)}


def update_cost(program: Program, topology: Topology, updates: int | None) -> tuple[StepCost, int]:
    """(cost of one update from gradients that are split as the parameters, bytes of its temporaries on a device). `updates`: of SOAP, the
    number before this one, known to the compiler. Eigenvectors, which only the first finds, are then left out: their programs are long.
    """
    state = program.abstract_state

    def known(own: object) -> object:
        return own._replace(updates=jnp.int32(updates)) if isinstance(own, SoapState) and updates is not None else own

    def update(grads: object, opt_state: object, params: object) -> object:
        opt_state = jax.tree.map(known, opt_state, is_leaf=lambda own: isinstance(own, SoapState))
        changes, opt_state = program.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    eigh = jnp.linalg.eigh if updates is None else lambda x: (x[..., 0], x)
    with jax.set_mesh(program.mesh), mock.patch.object(jnp.linalg, "eigh", eigh):
        jitted = jax.jit(update, out_shardings=(program.state_shardings.params, program.state_shardings.opt_state), donate_argnums=(1, 2))
        compiled = jitted.lower(state.params, state.opt_state, state.params).compile(compiler_options=program.compiler_options)
    memory = compiled.memory_analysis()
    return program_cost(program, read(compiled.as_text() or ""), topology), memory.temp_size_in_bytes if memory else 0


if __name__ == "__main__":
    main()
