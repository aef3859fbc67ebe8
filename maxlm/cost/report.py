"""Everything that compiling a step tells, gathered: the figures behind `maxlm compile`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from maxlm.compiler.aot import CompiledStep, build, compile_program
from maxlm.config.schema import Config
from maxlm.cost import advice
from maxlm.cost.advice import Suggestion
from maxlm.cost.cross_slice import with_slices
from maxlm.cost.memory import Part, split
from maxlm.cost.mesh_links import axis_links, within_slice
from maxlm.cost.step_cost import StepCost, estimate
from maxlm.hardware.topologies import Topology
from maxlm.hlo.parser import Module, read

if TYPE_CHECKING:
    from maxlm.training.program import Program


@dataclass(frozen=True)
class Report:
    """A compiled step in figures. `cost` is None when it does not fit, and then `suggestions` say what would; bytes are of one device."""

    config: Config
    topology: Topology
    mesh: dict[str, int]
    parameters: int
    model_flops: float  # of one step, all devices, no recomputation counted
    step: CompiledStep
    parts: tuple[Part, ...]  # what HBM holds; sums to step.needed
    cost: StepCost | None
    remarks: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the chips could do in the predicted time."""
        if self.cost is None or self.cost.total_s == 0:
            return None
        return self.model_flops / (self.cost.total_s * self.topology.devices * self.topology.chip.peak_bf16_flops_per_device)

    def to_json(self) -> dict[str, Any]:
        """Plain values. Seconds, bytes and FLOPs; bytes and times of one device, tokens and model FLOPs of all."""
        topology, step = self.topology, self.step
        memory = {
            "available_bytes": step.available,
            "needed_bytes": step.needed,
            "missing_bytes": step.missing,
            "host_bytes": step.memory.host if step.memory else None,
            "parts": [asdict(part) for part in self.parts],
        }
        return {
            "run": self.config.run.name,
            "topology": topology.name,
            "slices": topology.slices,
            "chips": topology.chips,
            "devices": topology.devices,
            "hosts": topology.hosts,
            "mesh": self.mesh,
            "parameters": self.parameters,
            "tokens_per_step": self.config.tokens_per_step,
            "model_flops": self.model_flops,
            "fits": step.fits,
            "hbm": memory,
            "time": self._time_json(),
            "communication": [asdict(traffic) | {"remark": advice.surprise(traffic)} for traffic in self.cost.traffic] if self.cost else [],
            "warnings": list(self.remarks),
            "would_fit": [
                {"settings": dict(way.settings), "needed_bytes": way.used, "available_bytes": way.available} for way in self.suggestions
            ],
            "compile": {"seconds": step.seconds, "cached": step.cached},
        }

    def _time_json(self) -> dict[str, Any] | None:
        if self.cost is None:
            return None
        cost = {key: value for key, value in asdict(self.cost).items() if key != "traffic"}
        tokens = self.config.tokens_per_step / self.cost.total_s if self.cost.total_s else None
        return {"calibrated": self.topology.is_tpu, "step_s": self.cost.total_s, "mfu": self.mfu, "tokens_per_s": tokens, **cost}


def examine(config: Config, topology: Topology, tell: Callable[[str], None]) -> Report:
    """Compile the step of `config` for `topology` and say what comes of it; `tell` hears what is going on. Raises UserError."""
    tell(f"compiling the training step of {config.run.name} for {topology.name}")
    program = build(config, topology)
    step = compile_program(program, topology)
    from maxlm.models import count_parameters, step_flops

    sizes = dict(program.mesh.shape)
    module = read(step.text) if step.fits else None
    cost, remarks, suggestions = None, [], []
    parts = split(program, step, module)
    if module is not None:
        cost = price(program, module, topology)
        remarks = advice.remarks(config, topology, sizes, axis_links(program.mesh, topology), step, cost)
    else:
        state = sum(part.bytes for part in parts if part.group == "state")
        shards = topology.devices // sizes["data"]
        hopeless = too_small(topology, state * shards, step.available)
        remarks = [hopeless] if hopeless else []
        suggestions = [] if hopeless else advice.ways_to_fit(config, topology, sizes, tell)
    return Report(
        config=config,
        topology=topology,
        mesh=sizes,
        parameters=count_parameters(config.model),
        model_flops=step_flops(config),
        step=step,
        parts=parts,
        cost=cost,
        remarks=tuple(remarks),
        suggestions=tuple(suggestions),
    )


def price(program: "Program", module: Module, topology: Topology) -> StepCost:
    """What a step of `program`, compiled to `module`, takes on `topology`, all slices."""
    cost = estimate(module, topology.chip, *within_slice(program.mesh, topology))
    if topology.slices == 1:
        return cost
    return with_slices(cost, module, topology, program.config.mesh.across_slices)


def too_small(topology: Topology, state: int, available: int) -> str:
    """That no mesh of this machine holds `state` bytes of parameters and optimizer, all devices together; empty when one may."""
    least = state / topology.devices
    if least <= available:
        return ""
    chips = -(-state // (available * topology.chip.devices_per_chip))
    return (
        f"No mesh fits: parameters and optimizer take {least / 2**30:.1f} GiB a chip when split over all {topology.chips:,} chips, "
        f"{(least - available) / 2**30:.1f} GiB more than there is; at least {chips:,} chips are needed."
    )
