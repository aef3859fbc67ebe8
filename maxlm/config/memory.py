"""Where training state lives between its uses: on the device, in host memory, or in files on NVMe disks."""

from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from maxlm.config import paths
from maxlm.config.fields import LocalPath, Section


class NvmeConfig(Section):
    """A file of offloaded state on each host. It is scratch: a run continues from its checkpoints, and writes the file anew."""

    dir: LocalPath  # an existing folder on a disk of each host; the file in it has no name, and goes with the process
    threads: Annotated[int, Strict(), Field(ge=1, le=64)] = 4  # reads and writes in flight


class OffloadStateConfig(Section):
    """State that leaves the device between updates (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857). Absent: on
    the device. Norms, biases and routers stay there: they are small.
    """

    optimizer: Literal["host", "nvme"] | None = None  # moments
    # float32 parameters, and their moving average (`ema`). The device computes with a copy in precision.compute, made once an update.
    master: Literal["host", "nvme"] | None = None
    # Of the matrices of the layers: their gradients, as the backward pass makes them, and the copy that the device computes with, of which
    # it then holds two layers at a time.
    gradients: Literal["host"] | None = None
    weights: Literal["host"] | None = None
    nvme: NvmeConfig | None = None

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
            paths.refuse("have optimizer: host beside gradients: host: moments take more memory than gradients", "write optimizer: host")
        if self.weights is not None and self.master != "host":
            paths.refuse("have master: host beside weights: host: masters take more memory than their copy", "write master: host")
        if self.layers_on_host and self.on_nvme:
            paths.refuse(
                "have no state in files beside gradients or weights on the host", "write host for nvme, or remove gradients and weights"
            )
        if self.on_nvme and self.nvme is None:
            paths.refuse("have the setting nvme.dir where state is kept in files", "name a folder on a local disk")
        if self.nvme is not None and not self.on_nvme:
            paths.refuse("have no nvme section where nothing is kept in files", "remove it, or write optimizer: nvme")
        return self
