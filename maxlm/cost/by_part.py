"""The predicted time of a compiled step by part of the model and phase, to compare with a profile."""

from collections.abc import Iterable

from maxlm.config import Config, rules
from maxlm.config.errors import UserError
from maxlm.cost.calibration import of_config
from maxlm.cost.mesh_links import within_slice
from maxlm.cost.step_cost import OpCost, estimate, unknown_loops_line
from maxlm.hlo.parser import read
from maxlm.parallel import build_mesh
from maxlm.telemetry.profile.page import Predicted
from maxlm.telemetry.profile.scopes import COLLECTIVES, Phase, phase_of, scope_of

_ALL = 1 << 30  # operations to list


def predict(config: Config, text: str) -> tuple[Predicted | None, str]:
    """(seconds of a step on one device by part and phase, a note) of the compiled program `text`; None where there is no prediction."""
    if config.cluster is None:
        return None, "No prediction: the config has no cluster.topology, so the hardware's figures are not known (a CPU has none)."
    if not text:
        return None, "No prediction: the step of this run is not one program."
    try:
        topology = of_config(config.cost, rules.topology_of(config))
        cost = estimate(read(text), topology.chip, *within_slice(build_mesh(config), topology), top=_ALL)
    except UserError as error:
        return None, f"No prediction: {error}"
    notes = [f"Predicted: from the same program, for {topology.name}, as `maxlm compile` does; of collectives what is exposed."]
    notes += ["Without transfers between slices."] if topology.slices > 1 else []
    return by_part(cost.top), " ".join(filter(None, [*notes, unknown_loops_line(cost.unknown_loops)]))


def by_part(costs: Iterable[OpCost]) -> Predicted:
    """Sums of seconds; waits for communication under collectives."""
    sums: dict[str, dict[Phase, float]] = {}
    for cost in costs:
        scope = COLLECTIVES if cost.kind == "communication" else scope_of(cost.where)
        phases = sums.setdefault(scope, {})
        phases[phase_of(cost.where)] = phases.get(phase_of(cost.where), 0.0) + cost.seconds
    return sums
