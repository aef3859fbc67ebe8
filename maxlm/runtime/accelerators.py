"""Traces that an accelerator leaves on a machine whether or not jax can use it, and what to do when jax cannot."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

PCI_VENDORS = {"0x1ae0": "tpu", "0x10de": "cuda"}
PCI_CLASSES = {"tpu": ("0x088000", "0x0880", "0xff00", "0x1200"), "cuda": ("0x0300", "0x0302")}  # how the class of a device of ours begins
CUDA13_DRIVER = 580  # the oldest driver that runs CUDA 13 (its release notes, table 3)


@dataclass(frozen=True)
class Evidence:
    """One kind of accelerator that is there: `kind` is the name of maxlm's extra for it."""

    kind: str  # tpu or cuda
    trace: str  # what gave it away
    driver: str | None = None  # version of NVIDIA's kernel driver, None if it is not loaded


def find_accelerators(root: Path = Path("/")) -> list[Evidence]:
    """Accelerators that the system under `root` shows signs of."""
    pci = {PCI_VENDORS[vendor]: device for device, vendor in _pci_devices(root) if vendor in PCI_VENDORS}
    tpu_nodes = sorted((root / "dev").glob("accel[0-9]*")) or (sorted((root / "dev/vfio").glob("[0-9]*")) if "tpu" in pci else [])
    gpu_nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
    found = []
    if tpu_nodes or "tpu" in pci:
        found.append(Evidence("tpu", f"/{tpu_nodes[0].relative_to(root)}" if tpu_nodes else f"PCI device {pci['tpu']}"))
    if gpu_nodes or "cuda" in pci:
        trace = f"/{gpu_nodes[0].relative_to(root)}" if gpu_nodes else f"PCI device {pci['cuda']}"
        found.append(Evidence("cuda", trace, _nvidia_driver(root)))
    return found


def remedy(evidence: Evidence, plugin: str | None, install: str, platforms: str) -> str:
    """What brings an accelerator to jax when jax does not see it.

    Args:
        evidence: the accelerator.
        plugin: name and version of the jax plugin that is installed for it, if one is.
        install: the pip command that installs maxlm with the accelerator's extra.
        platforms: JAX_PLATFORMS, or "".
    """
    if platforms and not any(name in platforms.split(",") for name in (evidence.kind, "gpu" if evidence.kind == "cuda" else "")):
        return f"unset JAX_PLATFORMS, which is {platforms}"
    if evidence.kind == "cuda":
        if evidence.driver is None:
            return "install NVIDIA's driver: it is not loaded (in a container, start it with --gpus all)"
        if int(evidence.driver.partition(".")[0]) < CUDA13_DRIVER and (plugin is None or "cuda13" in plugin):
            return f"update the driver from {evidence.driver} to {CUDA13_DRIVER} or later, or pip install 'jax[cuda12]'"
    if plugin is None:
        return install
    return f"{plugin} is installed and finds nothing: is another process using the device, and may this user open {evidence.trace}?"


def _pci_devices(root: Path) -> list[tuple[str, str]]:
    """(address, vendor) of the PCI devices that are accelerators by their class: a maker's network card is none."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if any(kind.startswith(begin) for begin in PCI_CLASSES.get(PCI_VENDORS.get(vendor, ""), ())):
            found.append((device.name, vendor))
    return found


def _nvidia_driver(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else None


def may_open(path: str) -> bool:
    """Whether this user may use a device node."""
    return os.access(path, os.R_OK | os.W_OK)
