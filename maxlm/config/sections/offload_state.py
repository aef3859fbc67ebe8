"""State that lives off the device between its uses: in host memory, or in files on NVMe disks."""

from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from maxlm.base import paths
from maxlm.config.capability import Capability, Problems, State, excludes
from maxlm.config.fields import LocalPath, Section
from maxlm.config.sections.mesh import MeshConfig
from maxlm.config.sections.optimizer_state import HALVES

COPY = "copy that matmuls read"


class NvmeConfig(Section):
    """A file of offloaded state on each host. It is scratch: a run continues from its checkpoints, and writes the file anew."""

    dir: LocalPath
    """Existing folder on a local disk of each host. The file in it has no name, and is gone when the process ends."""
    threads: Annotated[int, Strict(), Field(ge=1, le=64)] = 4
    """Reads and writes in flight at once. Unit: threads."""


class OffloadStateConfig(Section):
    """State that leaves the device between updates (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857). Absent: on
    the device. Norms, biases and routers stay there: they are small.
    """

    optimizer: Literal["host", "nvme"] | None = None
    """Place of the optimizer's moments between updates. host: host memory; nvme: files on NVMe disks; null: the device."""
    master: Literal["host", "nvme"] | None = None
    """Place of the float32 master weights and their moving average (`ema`) between updates; the device computes with a copy in
    precision.compute, made once an update. host: host memory; nvme: files on NVMe disks; null: the device.
    """
    gradients: Literal["host"] | None = None
    """Place of the gradients of the layers' matrices. host: each layer's gradients move to host memory as the backward pass forms them;
    null: the device.
    """
    weights: Literal["host"] | None = None
    """Place of the copy of the layers' matrices that matmuls read. host: host memory, with two layers at a time on the device; null: the
    device.
    """
    nvme: NvmeConfig | None = None
    """Folder and threads of the files on NVMe disks; required where `optimizer` or `master` is nvme."""

    @property
    def layers_on_host(self) -> bool:
        """True if layers pass through the device one by one."""
        return self.gradients is not None or self.weights is not None

    @property
    def on_nvme(self) -> bool:
        """True if any state is kept in files."""
        return "nvme" in (self.optimizer, self.master)

    @model_validator(mode="after")
    def _complete(self) -> "OffloadStateConfig":
        if self.optimizer is None and self.master is None:
            paths.refuse("name a kind of state", "write optimizer: host, or remove the section")
        if self.gradients is not None and self.optimizer != "host":
            paths.refuse("have optimizer: host with gradients: host: moments take more memory than gradients", "write optimizer: host")
        if self.weights is not None and self.master != "host":
            paths.refuse("have master: host with weights: host: masters take more memory than their copy", "write master: host")
        if self.layers_on_host and self.on_nvme:
            paths.refuse(
                "have no state in files when gradients or weights are on the host", "write host for nvme, or remove gradients and weights"
            )
        if self.on_nvme and self.nvme is None:
            paths.refuse("have the setting nvme.dir where state is kept in files", "name a folder on a local disk")
        if self.nvme is not None and not self.on_nvme:
            paths.refuse("have no nvme section where nothing is kept in files", "remove it, or write optimizer: nvme")
        return self


ON_DEVICE = {  # what reads the state on the device between updates
    "diloco": "updates the states of workers where they lie",
    "health.layers": "compares parameters before and after every update on the device",
    "integrity": "compares copies of the state on the devices",
    "memory_checkpoints": "copies the state on the devices",
    "compression": "has feedback on the devices",
}


def _layers_on_host(
    tiers: OffloadStateConfig,
    mesh: MeshConfig,
    memory_remat: str | tuple[str, ...],
    memory_unroll: bool,
    memory_offload: tuple[str, ...],
    precision_matmul: object,
    model_lora: object,
    train_noise_scale: object,
    samples: object,
    evaluation: object,
) -> Problems:
    """Settings that need all layers on the device at once."""
    if not tiers.layers_on_host:
        return
    weights = tiers.weights is not None
    which = "memory.offload_state.weights" if weights else "memory.offload_state.gradients"
    others = set(memory_offload) - {"layer_input"}
    stages, zero = "divides the layers into stages that run by themselves", "gathers or reduces all layers at once"
    frozen, remove = "has no gradients of matrices, and frozen weights that stay on the device", "remove one of them"
    problems = (
        ("mesh.stage", mesh.stage, mesh.stage != 1, stages, "use 1, and a larger mesh.fsdp"),
        ("mesh.zero", mesh.zero, mesh.zero != 3, zero, "use 3"),
        ("precision.matmul", "set", precision_matmul is not None, "quantizes all layers before the first is computed", remove),
        ("model.lora", "set", model_lora is not None, frozen, remove),
        ("train.noise_scale", "set", train_noise_scale is not None, "reads the gradient of every microbatch on the device", remove),
        ("memory.remat", memory_remat, memory_remat != "full", "keeps more of a layer than its input", "use full"),
        ("memory.unroll", True, memory_unroll, "computes all layers without a loop", "use false"),
        ("memory.offload", list(memory_offload), bool(others), "keeps more of a layer than its input", "use [layer_input] or []"),
        ("samples", "set", weights and samples is not None, "generates text with all layers on the device", remove),
        ("evaluation", "set", weights and evaluation is not None, "computes likelihoods with all layers on the device", remove),
    )
    for field, value, refused, rule, fix in problems:
        if refused:
            yield field, value, f"{rule}, and with {which} = host they pass through it one by one", fix


def _state(tiers: OffloadStateConfig, state: State) -> State:
    """State of matrices in its tiers; the copy of masters that matmuls read is on the device, or half of each master."""
    if not state.matrix:
        return state
    if tiers.master is not None:
        state = state.move("masters", tiers.master)
        state = state.add(COPY, state.compute) if HALVES not in state.entries else state
    return state if tiers.optimizer is None else state.move("moments", tiers.optimizer)


CAPABILITY = Capability(
    key="memory.offload_state",
    rules=(excludes(ON_DEVICE, ", and memory.offload_state keeps it elsewhere"), _layers_on_host),
    state=_state,
    needs=("maxlm.training.memory_needs:OffloadedState",),
    placement=("maxlm.training.offloaded:Offloaded", "maxlm.training.nvme_step:InFiles"),
)
