"""Tensors saved for the backward pass."""

from typing import Literal

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Bool, Section
from maxlm.config.sections.model import ModelConfig
from maxlm.config.sections.offload_state import OffloadStateConfig

RematName = Literal["layer_input", "query", "key", "value", "attention", "attention_out", "gate", "up", "mlp_out"]


class MemoryConfig(Section):
    """Tensors saved for the backward pass. `remat`: a policy, or the names of the tensors to save; the rest is recomputed."""

    remat: Literal["none", "full", "dots"] | tuple[RematName, ...] = "full"
    """Activations that are saved for the backward pass; all others are recomputed. none: nothing is recomputed; full: only the input of
    each layer is saved; dots: the results of matmuls are saved; or a list of the names of saved tensors.
    """
    offload: tuple[RematName, ...] = ()
    """Names of activations that are saved in host memory rather than on the device."""
    unroll: Bool = False
    """Compute layers one after another without a loop: nothing is copied to stacked arrays and back, and the compiler sees every layer, at
    the price of a longer compilation.
    """
    offload_state: OffloadStateConfig | None = None
    """Optimizer state and master weights in host memory or in files on NVMe disks; null: on the device."""

    @property
    def layers_on_host(self) -> bool:
        """True if weights or gradients of the layers are in host memory."""
        return self.offload_state is not None and self.offload_state.layers_on_host

    @property
    def offload_by_policy(self) -> tuple[RematName, ...]:
        """Names of `offload` that the remat policy moves; none where layers are streamed, since `layer_stream` keeps their inputs."""
        return () if self.layers_on_host else self.offload


def _problems(memory: MemoryConfig, model: ModelConfig) -> Problems:
    if memory.offload and isinstance(memory.remat, str) and memory.remat != "full":
        rule = f"contradicts memory.remat = {memory.remat}, which keeps tensors on the device"
        yield "memory.offload", list(memory.offload), rule, "use remat: full or a list of names"
    named = {"remat": () if isinstance(memory.remat, str) else memory.remat, "offload": memory.offload}
    for field, names in named.items():
        if "gate" in names and not model.gated:
            yield f"memory.{field}", list(names), f"model.activation = {model.activation} has no gate to keep", "take `gate` out"
    both = set(named["offload"]) & set(named["remat"])
    if both:
        yield "memory.offload", sorted(both), "these names are in memory.remat too", "keep a tensor on the device or on the host, not both"


CAPABILITY = Capability(key="memory", rules=(_problems,))
