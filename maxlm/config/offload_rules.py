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
    problems = (
        ("mesh.stage", mesh.stage, mesh.stage != 1, "divides the layers into stages that run by themselves"),
        ("mesh.zero", mesh.zero, mesh.zero != 3, "gathers or reduces all layers at once"),
        ("precision.matmul", "set", config.precision.matmul is not None, "quantizes all layers before the first is computed"),
        ("model.lora", "set", config.model.lora is not None, "has no gradients of matrices, and frozen weights that stay on the device"),
        ("train.noise_scale", "set", config.train.noise_scale is not None, "reads the gradient of every microbatch on the device"),
        ("memory.remat", memory.remat, memory.remat != "full", "keeps more than a layer's input, from which it is recomputed"),
        ("memory.offload", list(memory.offload), bool(set(memory.offload) - {"layer_input"}), "keeps more than a layer's input"),
        ("samples", "set", weights and config.samples is not None, "generates text with all layers on the device"),
        ("evaluation", "set", weights and config.evaluation is not None, "computes likelihoods with all layers on the device"),
    )
    for field, value, refused, rule in problems:
        if refused:
            yield field, value, f"{rule}, and with {which} = host they pass through it one by one", "remove one of them"
