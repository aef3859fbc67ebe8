"""Predicted time of a compiled step: in a run, by what `maxlm plan --calibrate` measured on its devices, and by part, for a profile."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from maxlm.base.errors import ConfigError, UserError
from maxlm.config import rules
from maxlm.config.schema import Config
from maxlm.cost import calibration
from maxlm.cost.calibration import FIELD, Calibration, of_config
from maxlm.cost.expected import StepScale, step_scale
from maxlm.cost.mesh_links import pod_of, within_slice
from maxlm.cost.step_cost import OpCost, estimate, program_cost, unknown_loops_line
from maxlm.hardware.chips import Achieved, Chip, chip_of
from maxlm.hardware.topologies import Topology, is_tpu
from maxlm.hlo.parser import read, with_bounds
from maxlm.parallel import build_mesh
from maxlm.telemetry.predicted import ASSUMES, BASIS, EXPECTED, STEP
from maxlm.telemetry.profile.page import Predicted
from maxlm.telemetry.profile.scopes import COLLECTIVES, Phase, phase_of, scope_of

if TYPE_CHECKING:
    from maxlm.training.program import Program


_log = logging.getLogger(__name__)
_ALL = 1 << 30  # operations to list
MAPPED_BYTES = 32 * 2**20  # from here on glibc always returns what is freed to the system (mallopt(3), DEFAULT_MMAP_THRESHOLD_MAX)


def predictor(config: Config, hosts: Sequence[str] = ()) -> Callable[["Program"], dict[str, Any]]:
    """A function that predicts the step of a program by `cost.calibration`, as `telemetry.predicted` has it; `hosts`: of each process.
    Raises UserError for a file that is invalid, or was measured on other devices or on links between other processes.
    """
    path, devices = config.cost.calibration if config.cost is not None else None, jax.devices()
    assert path is not None, "asked for only where it is set"
    found = calibration.read(Path(path), FIELD)
    if devices[0].device_kind != found.device_kind:
        rule = f"was measured on {found.device_kind}, and this run is on {devices[0].device_kind}"
        raise ConfigError(FIELD, path, rule, "measure here, with `maxlm plan --calibrate`")
    if chip_of(found.device_kind) is None and len(devices) > 1:
        joined = "CPU devices share the cores" if devices[0].platform == "cpu" else "devices have links of unknown bandwidth"
        rule = f"is of one device, and here {len(devices)} {joined}"
        raise ConfigError(FIELD, path, rule, "train on one device, or remove it")
    if devices[0].platform == "gpu" and len(set(hosts)) < len(hosts):
        rule = "takes each process for a host of its own, and here several share one"
        raise ConfigError(FIELD, path, rule, "start one process a host, or remove it")
    if config.train.batch_ramp or (config.memory.offload_state is not None and config.memory.offload_state.on_nvme):
        rule = "is for a step of one program, and train.batch_ramp or memory.offload_state makes several of it"
        raise ConfigError(FIELD, path, rule, "remove it")
    topology = topology_of(found, devices)
    scale = step_scale(config.model, config.precision.matmul, config.data.seq_len, config.tokens_per_step, topology)
    return lambda program: _prediction(scale, _step_s(program, topology))


def _prediction(scale: StepScale, step_s: float) -> dict[str, Any]:
    """Expected and estimated seconds of a step, the sentence on what corrects the estimate, and assumptions."""
    return {EXPECTED: scale.expected_times(step_s), STEP: step_s, BASIS: scale.corrected_by, ASSUMES: list(scale.assumes)}


def _step_s(program: "Program", topology: Topology) -> float:
    step = program.step
    assert isinstance(step, jax.stages.Compiled), "a step of one program"
    text = step.as_text()
    assert text is not None, "XLA shows it"
    module = read(text) if topology.chip.cpu is None else with_bounds(read(text))
    cost = program_cost(program, module, topology)
    if cost.unknown_loops:
        _log.warning("predicted time of a step: %s", unknown_loops_line(cost.unknown_loops))
    return cost.total_s + _first_touch_s(step, topology.chip)


def _first_touch_s(step: jax.stages.Compiled, chip: Chip) -> float:
    """Seconds in which the system maps and clears the temporary arrays of a step on a CPU, which jaxlib allocates anew for each."""
    if chip.cpu is None or (memory := step.memory_analysis()) is None or memory.temp_size_in_bytes < MAPPED_BYTES:
        return 0.0
    return float(memory.temp_size_in_bytes / chip.cpu.fresh_bytes_per_s)


def topology_of(found: Calibration, devices: Sequence[jax.Device]) -> Topology:
    """`devices` as a topology, their chip with the speeds that were measured. TPUs are priced by counted shares of peak."""
    chip = chip_of(found.device_kind)
    if chip is None:
        return Topology(cpu_chip(found), (1, len(devices)))
    if is_tpu(chip):
        return pod_of(chip, devices)
    if found.factors is not None:
        factors = found.factors
        chip = replace(chip, achieved=Achieved(factors.matmul, factors.hbm, factors.links, source=f"{found.machine}, {found.date}"))
    nodes = len({device.process_index for device in devices})
    return Topology(chip, (nodes, len(devices) // nodes))


def cpu_chip(found: Calibration) -> Chip:
    """A CPU as a chip with measured speeds as peaks. It has no links: there is one device."""
    measured = found.measured
    return Chip(
        name="cpu",
        device_kinds=(found.device_kind,),
        peak_bf16_flops=measured.matmul_flops,
        hbm_bytes=0,
        hbm_bytes_per_s=measured.hbm_bytes_per_s,
        ici_bytes_per_s_per_link=0.0,
        ici_links=0,
        dcn_bytes_per_s=0.0,
        source=f"{found.machine}, {found.date}",
        achieved=Achieved(source=f"{found.machine}, {found.date}"),  # its peaks are measured: nothing corrects its estimates
        cpu=measured.cpu,
    )


def predict(config: Config, text: str) -> tuple[Predicted | None, float, str]:
    """(estimated seconds of a step on one device by part and phase, the factor that corrects them, a note) of the compiled program `text`;
    None where there is no prediction.
    """
    if config.cluster is None:
        return None, 1.0, "No prediction: the config has no cluster.topology, so the hardware's figures are not known (a CPU has none)."
    if not text:
        return None, 1.0, "No prediction: the step of this run is not one program."
    try:
        topology = of_config(config.cost, rules.topology_of(config))
        cost = estimate(read(text), topology.chip, *within_slice(build_mesh(config), topology), top=_ALL)
    except UserError as error:
        return None, 1.0, f"No prediction: {error}"
    scale = step_scale(config.model, config.precision.matmul, config.data.seq_len, config.tokens_per_step, topology)
    notes = [f"Estimate: from the same program, for {topology.name}, as `maxlm compile` does; of collectives what is exposed."]
    notes += ["Without transfers between slices."] if topology.slices > 1 else []
    factor = scale.correction.middle
    corrected = f"Expected: {factor:.3g} times the estimate; {scale.corrected_by}."
    return by_part(cost.top), factor, " ".join(filter(None, [corrected, *notes, *scale.assumes, unknown_loops_line(cost.unknown_loops)]))


def by_part(costs: Iterable[OpCost]) -> Predicted:
    """Sums of seconds; waits for communication under collectives."""
    sums: dict[str, dict[Phase, float]] = {}
    for cost in costs:
        scope = COLLECTIVES if cost.kind == "communication" else scope_of(cost.where)
        phases = sums.setdefault(scope, {})
        phases[phase_of(cost.where)] = phases.get(phase_of(cost.where), 0.0) + cost.seconds
    return sums
