"""Rules of `optimizer.name: schedule_free`: its rate is constant, and what is evaluated is a point of its own."""

from collections.abc import Iterator

from maxlm.config.errors import Problem
from maxlm.config.optimizer_state import FLOAT32
from maxlm.config.schema import Config

NAMED = "optimizer.name = schedule_free"
LEAST_BETA1 = 0.1  # the average is divided by it: errors of float32 grow tenfold


def problems(config: Config) -> Iterator[Problem]:
    """Settings that contradict the average, or that would evaluate another point."""
    optimizer = config.optimizer
    if optimizer.name != "schedule_free":
        return
    if optimizer.schedule != "constant":
        rule = f"decays the learning rate, and {NAMED} averages in place of a decay"
        yield "optimizer.schedule", optimizer.schedule, rule, "use optimizer.schedule=constant, which warms up first"
    if optimizer.beta1 < LEAST_BETA1:
        rule = f"takes gradients so near to z that the average of {NAMED}, which is computed from them, would be their rounding"
        yield "optimizer.beta1", optimizer.beta1, rule, "use 0.9 to 0.98"
    state = optimizer.state
    if state is not None and state.moments != FLOAT32:
        fix = "remove it, and set optimizer.state.second_moment instead"
        yield "optimizer.state.moments", state.moments, f"{NAMED} has no first moment, and its point z is float32", fix
    if state is not None and state.masters != FLOAT32:
        rule = f"stores weights in two parts, and the average of {NAMED} is computed from float32"
        yield "optimizer.state.masters", state.masters, rule, "use float32"
    beside = {
        "ema": (config.ema, "averages parameters, as is done already by"),
        "diloco": (config.diloco, "takes the mean of workers' parameters, and leaves behind the points z of"),
        "memory.offload_state": (config.memory.offload_state, "keeps state off the device, where evaluations compute the average of"),
    }
    for field, (section, rule) in beside.items():
        if section is not None:
            yield field, "set", f"{rule} {NAMED}", "remove it, or use optimizer.name=adamw"
