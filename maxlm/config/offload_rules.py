"""Rules of `memory.offload_state`: what needs on the device the state, the weights or the gradients that it keeps elsewhere."""

from collections.abc import Iterator

from maxlm.config.errors import Problem
from maxlm.config.schema import Config


def problems(config: Config) -> Iterator[Problem]:
    """Sections that read the state on the device between updates, and settings that need all layers there."""
    if config.memory.offload_state is None:
        return
    refused = {
        "diloco": (config.diloco, "has workers whose states are updated where they lie"),
        "health.layers": (
            None if config.health is None else config.health.layers,
            "compares parameters before and after every update on the device",
        ),
        "integrity": (config.integrity, "compares copies of the state on the devices"),
        "memory_checkpoints": (config.memory_checkpoints, "copies the state on the devices"),
        "compression": (config.compression, "has feedback on the devices"),
    }
    for field, (value, rule) in refused.items():
        if value:
            yield field, "set", f"{rule}, and memory.offload_state keeps it elsewhere", "remove one of them"
    if config.memory.layers_on_host:
        yield from _layers_on_host(config)


def _layers_on_host(config: Config) -> Iterator[Problem]:
    """Settings that need all layers on the device at once."""
    memory, mesh = config.memory, config.mesh
    weights = memory.offload_state is not None and memory.offload_state.weights is not None
    which = "memory.offload_state.weights" if weights else "memory.offload_state.gradients"
    others = set(memory.offload) - {"layer_input"}
    stages, zero = "divides the layers into stages that run by themselves", "gathers or reduces all layers at once"
    frozen, remove = "has no gradients of matrices, and frozen weights that stay on the device", "remove one of them"
    problems = (
        ("mesh.stage", mesh.stage, mesh.stage != 1, stages, "use 1, and a larger mesh.fsdp"),
        ("mesh.zero", mesh.zero, mesh.zero != 3, zero, "use 3"),
        ("precision.matmul", "set", config.precision.matmul is not None, "quantizes all layers before the first is computed", remove),
        ("model.lora", "set", config.model.lora is not None, frozen, remove),
        ("train.noise_scale", "set", config.train.noise_scale is not None, "reads the gradient of every microbatch on the device", remove),
        ("memory.remat", memory.remat, memory.remat != "full", "keeps more of a layer than its input", "use full"),
        ("memory.loop.unroll", True, memory.unrolled, "computes all layers without a loop", "use false"),
        ("memory.offload", list(memory.offload), bool(others), "keeps more of a layer than its input", "use [layer_input] or []"),
        ("samples", "set", weights and config.samples is not None, "generates text with all layers on the device", remove),
        ("evaluation", "set", weights and config.evaluation is not None, "computes likelihoods with all layers on the device", remove),
    )
    for field, value, refused, rule, fix in problems:
        if refused:
            yield field, value, f"{rule}, and with {which} = host they pass through it one by one", fix
