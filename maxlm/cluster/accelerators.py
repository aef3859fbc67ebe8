"""Detection of accelerators without jax, and the fix where jax does not use one."""

import re
from dataclasses import dataclass
from pathlib import Path

# TPUs are recognized by PCI device id, since Google's network cards share the vendor (v2-v3, v4, v5p, v5e, v6e, tpu7x; source: jax's
# hardware_utils.py), GPUs by PCI class (display, 3D).
TPU_IDS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
GPU_CLASSES = ("0x0300", "0x0302")
CUDA13_DRIVER = 580  # the oldest driver that runs CUDA 13 (NVIDIA's CUDA 13.0 release notes)


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator that is present: `kind` is the name of maxlm's extra for it."""

    kind: str  # tpu or cuda
    trace: str  # device file or PCI address
    node: bool  # True if the kernel has a device file for it
    driver: str | None = None  # version of NVIDIA's kernel driver, if known


def find_accelerators(root: Path = Path("/")) -> list[Accelerator]:
    """Return the accelerators of the system under `root`."""
    pci = _pci_accelerators(root)
    nodes = {"tpu": sorted((root / "dev").glob("accel[0-9]*")), "cuda": sorted((root / "dev").glob("nvidia[0-9]*"))}
    if "tpu" in pci and not nodes["tpu"]:  # newer TPU machines pass them through vfio, as other PCI devices too
        nodes["tpu"] = sorted((root / "dev" / "vfio").glob("[0-9]*"))
    found = []
    for kind in ("tpu", "cuda"):
        if nodes[kind] or kind in pci:
            trace = f"/{nodes[kind][0].relative_to(root)}" if nodes[kind] else f"PCI device {pci[kind]}"
            found.append(Accelerator(kind, trace, bool(nodes[kind]), _nvidia_driver(root) if kind == "cuda" else None))
    return found


def any_device_file(root: Path = Path("/")) -> bool:
    """True if there is a device file of any accelerator, known here or not."""
    device = root / "dev"
    return any(next(device.glob(pattern), None) for pattern in ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg", "kfd"))


def remedy(accelerator: Accelerator, plugin: str | None, install: str, platforms: str) -> str:
    """Return the fix for an accelerator that jax does not see.

    `plugin`: the installed jax plugin for it and its version; `install`: the pip command for it; `platforms`: JAX_PLATFORMS, or "".
    """
    names = {"tpu": {"tpu"}, "cuda": {"cuda", "gpu"}}[accelerator.kind]
    if platforms and not names.intersection(platforms.split(",")):
        return f"unset JAX_PLATFORMS, which is {platforms}"
    if accelerator.kind == "cuda" and accelerator.driver is None and not accelerator.node:
        return "install NVIDIA's driver, which is not loaded (a container needs to be started with --gpus all)"
    if accelerator.driver is not None and int(accelerator.driver.partition(".")[0]) < CUDA13_DRIVER and "cuda12" not in (plugin or ""):
        return f"update NVIDIA's driver from {accelerator.driver} to {CUDA13_DRIVER} or later, or pip install 'jax[cuda12]'"
    if plugin is None:
        return install
    return f"{plugin} is installed and finds no device: see whether another process holds it, and whether you may open {accelerator.trace}"


def _pci_accelerators(root: Path) -> dict[str, str]:
    """Return kind -> PCI address of an accelerator of that kind."""
    found: dict[str, str] = {}
    for device in sorted((root / "sys" / "bus" / "pci" / "devices").glob("*")):
        try:
            vendor, number, kind = ((device / name).read_text().strip() for name in ("vendor", "device", "class"))
        except OSError:
            continue
        if vendor == "0x1ae0" and number in TPU_IDS:
            found.setdefault("tpu", device.name)
        if vendor == "0x10de" and kind.startswith(GPU_CLASSES):
            found.setdefault("cuda", device.name)
    return found


def _nvidia_driver(root: Path) -> str | None:
    try:
        text = (root / "proc" / "driver" / "nvidia" / "version").read_text()
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d[\d.]*)\s", text)
    return match.group(1) if match else None
