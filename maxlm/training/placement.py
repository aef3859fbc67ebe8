"""Where the state of a run lives and how its step is compiled: on the devices, unless a section says otherwise (`Capability.placement`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.memory.spaces import on_device
from maxlm.models.layers import Scan
from maxlm.models.parameters import Parameters
from maxlm.training.step import TrainState, build_train_step

Program = Any  # `training.program.Program`, which imports this module


class Placement:
    """The state on the devices, and its update as one program."""

    resident_bytes = 0  # of the state on a device that the largest program does not hold
    on_device = True  # all of the state, always
    scan: Scan | None = None  # over layers that are not on the device
    run: Any = None  # computes the update, where `Program.update` itself does not

    def __init__(self, program: Program) -> None:
        self.program = program

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "Placement | None":
        """The placement that a section asks for; None if it asks for none. Gets the section, and the `program` (`table.build`)."""
        raise NotImplementedError

    def shardings(self, shardings: TrainState) -> TrainState:
        """`shardings` of a state on the devices, with the memory in which each leaf lives."""
        return shardings

    def create(self, make: Callable[..., TrainState], *given: Parameters) -> TrainState:
        """`make(*given)`, a state created where it will live; `given` is donated."""
        shardings, options = self.program.state_shardings, self.program.compiler_options
        made: TrainState = jax.jit(make, out_shardings=shardings, donate_argnums=tuple(range(len(given))), compiler_options=options)(*given)
        return made

    def adopt(self, state: TrainState) -> TrainState:
        """A state that lies on the shardings, with what belongs in files written there."""
        return state

    def readable(self, state: TrainState) -> TrainState:
        """The state with parameters that programs of the model can read: on the device."""
        return state

    def read_shardings(self) -> Parameters:
        """Shardings of the parameters of a `readable` state."""
        shardings: Parameters = jax.tree.map(on_device, self.program.state_shardings.params)
        return shardings

    def lower(self) -> jax.stages.Lowered:
        """The update, traced and lowered; called on the mesh."""
        program = self.program
        states, whole = program.state_shardings, NamedSharding(program.mesh, PartitionSpec())
        step, split = build_train_step(program.update, self.run), (states, program.batch_sharding)
        jitted = partial(jax.jit, in_shardings=split, out_shardings=(states, whole), donate_argnums=0)
        return jitted(step).lower(program.abstract_state, program.abstract_batch)

    def step(self, compiled: jax.stages.Compiled) -> Any:
        """The step, (state, batch) -> (state, Metrics), from the program that `lower` describes."""
        return compiled
