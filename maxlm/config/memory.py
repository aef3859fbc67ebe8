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
    nvme: NvmeConfig | None = None

    @property
    def on_nvme(self) -> bool:
        """True if any state is kept in files."""
        return "nvme" in (self.optimizer, self.master)

    @model_validator(mode="after")
    def _complete(self) -> "OffloadStateConfig":
        if self.optimizer is None and self.master is None:
            paths.refuse("name a kind of state", "write optimizer: host, or remove the section")
        if self.on_nvme and self.nvme is None:
            paths.refuse("have the setting nvme.dir where state is kept in files", "name a folder on a local disk")
        if self.nvme is not None and not self.on_nvme:
            paths.refuse("have no nvme section where nothing is kept in files", "remove it, or write optimizer: nvme")
        return self
