"""`maxlm doctor`: checks of this machine, each with a fix."""

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from maxlm.base.errors import shorten
from maxlm.base.host import host_memory, python_command
from maxlm.base.installing import install_command
from maxlm.base.paths import is_remote
from maxlm.cluster.accelerators import Accelerator, find_accelerators, remedy
from maxlm.config.extension_files import GROUP, Declared, declared
from maxlm.hardware.chips import chip_of

GIB = 2**30
PYTHONS = ((3, 11), (3, 13))  # oldest and newest that maxlm is tested on
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore")
PLUGINS = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}  # extra -> the packages that bring the platform
PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}  # extra -> jax's name for it
PROBE_SECONDS = 120  # a TPU slice initializes only when all of its hosts do
LOW_FILES = 1024  # open files
LOW_MEMORY, LOW_DISK, NO_DISK = 4 * GIB, 10 * GIB, GIB


@dataclass(frozen=True)
class Finding:
    """Result of one check. A problem prevents training; a warning does not."""

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """Results of all checks, and the figures behind them."""

    findings: tuple[Finding, ...]
    facts: dict[str, Any]

    @property
    def healthy(self) -> bool:
        """True if no problem was found."""
        return all(finding.state != "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types; memory and disk in bytes."""
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings], **self.facts}


def diagnose() -> Report:
    """Check this machine. Changes nothing; devices are probed in a separate process, which a broken driver may crash."""
    versions = {name: _version(name) for name in (*SHOWN, *(name for names in PLUGINS.values() for name in names))}
    devices = ask_for_devices(python_command("-m", "maxlm.diagnostics.device_probe"))
    disk, memory = shutil.disk_usage(Path.cwd()).free, host_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [
        python_finding(sys.version_info[:2]),
        *package_findings(importlib.metadata.requires("maxlm") or [], _version),
        *device_findings(devices, find_accelerators(), versions, os.environ.get("JAX_PLATFORMS", "")),
        *training_findings(devices),
        *cache_findings(devices["compilation_cache"]),
        *extension_findings(extensions := declared()),
        Finding("cores", "ok", str(cores)),
        memory_finding(memory),
        disk_finding(disk, Path.cwd()),
        files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
    ]
    facts = {"python": platform.python_version(), "system": platform.platform(), "versions": versions, **devices}
    facts["extensions"] = [
        {"name": one.value, "distribution": one.distribution.name, "version": one.distribution.version} for one in extensions
    ]
    return Report(tuple(findings), {**facts, "cores": cores, "memory_bytes": memory, "disk_free_bytes": disk})


def as_text(report: Report, ready: str = "This machine is ready.") -> str:
    """Format the findings with their fixes, and a summary: `ready` without problems and warnings."""
    state, name = (max(len(getattr(finding, column)) for finding in report.findings) for column in ("state", "name"))
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.state:{state}}  {finding.name:{name}}  {finding.found}".rstrip())
        if finding.fix:
            lines.append(f"{'':{state}}  {'':{name}}  fix: {finding.fix}")
    counts = Counter(finding.state for finding in report.findings)
    summary = [f"{counts[state]} {state}{'s' if counts[state] > 1 else ''}" for state in ("problem", "warning") if counts[state]]
    return "\n".join([*lines, "", f"{' and '.join(summary)}." if summary else ready])


def ask_for_devices(command: list[str], timeout: float = PROBE_SECONDS) -> dict[str, Any]:
    """Run the device probe; return `platform`, `devices` and `compilation_cache`, or `error`, in a line, if jax could not start."""
    unknown: dict[str, Any] = {"platform": None, "devices": [], "compilation_cache": None, "training": None}
    read_end, write_end = os.pipe()  # the probe exits when `write_end` is closed, also by kill -9 of this process
    try:
        answer = subprocess.run(command, stdin=read_end, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {
            **unknown,
            "error": f"jax did not answer within {timeout:g} seconds; on a TPU slice all hosts must run this at the same time",
        }
    finally:
        os.close(read_end)
        os.close(write_end)
    last = (answer.stdout.strip().splitlines() or [""])[-1]
    try:
        return {**unknown, **json.loads(last), "error": None}
    except json.JSONDecodeError:
        errors = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        return {**unknown, "error": f"the device probe failed: {errors[-1] if errors else f'exit code {answer.returncode}'}"}


def python_finding(version: tuple[int, ...]) -> Finding:
    """Check that maxlm is tested on this Python."""
    full_version = platform.python_version()
    if version > PYTHONS[1]:
        newest = ".".join(map(str, PYTHONS[1]))
        return Finding(
            "python", "warning", f"{full_version}, and maxlm is tested up to {newest}", f"use Python {newest} if something fails"
        )
    return Finding("python", "ok", full_version)


def package_findings(requirements: list[str], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Check that every package of `requirements`, as `name>=version`, is installed and new enough."""
    fix = f"run {install_command()}"
    good = []
    for name, wanted in re.findall(r"^([\w.-]+)\s*(?:>=([\w.]+))?\s*$", "\n".join(requirements), re.MULTILINE):
        version = version_of(name)
        if version is None:
            yield Finding(name, "problem", "is not installed", fix)
        elif wanted and _numbers(version) < _numbers(wanted):
            yield Finding(name, "problem", f"is {version}, and maxlm needs {wanted} or later", fix)
        elif name in SHOWN:
            good.append(f"{name} {version}")
    yield Finding("packages", "ok", ", ".join(good))


def device_findings(
    devices: dict[str, Any], accelerators: list[Accelerator], versions: dict[str, str | None], platforms: str
) -> Iterator[Finding]:
    """Report the devices of jax, and every accelerator of the machine that jax does not use."""
    if devices["error"]:
        fix = f"unset JAX_PLATFORMS, which is {platforms}" if platforms else f"run {install_command()} again"
        yield Finding("devices", "problem", devices["error"], fix)
    for kind, count in Counter((device["kind"], device["memory_bytes"]) for device in devices["devices"]).items():
        yield _device_finding(devices["platform"], *kind, count)
    for accelerator in accelerators:
        if devices["platform"] == PLATFORMS[accelerator.kind]:
            continue
        plugin = next((f"{name} {versions[name]}" for name in PLUGINS[accelerator.kind] if versions.get(name)), None)
        fix = remedy(accelerator, plugin, f"run {install_command(accelerator.kind)}", platforms)
        hidden = fix.startswith("unset")  # perhaps intended
        name = {"tpu": "TPU", "cuda": "NVIDIA GPU"}[accelerator.kind]
        yield Finding(name, "warning" if hidden else "problem", f"is present ({accelerator.trace}), and jax does not use it", fix)
    yield from _plugin_findings(versions)


def _device_finding(backend: str, kind: str, memory: int | None, count: int) -> Finding:
    memory_text = f", {memory / GIB:.1f} GiB each for jax" if memory else ""
    if backend == "cpu":
        return Finding("devices", "ok", f"{count} x CPU; its peak is unknown, so no MFU is shown")
    chip = chip_of(kind)
    if chip is None:
        fix = "add the chip to maxlm/hardware/facts.toml, with the source of its peak"
        return Finding("devices", "warning", f"{count} x {kind}{memory_text}; its peak is unknown, so no MFU is shown", fix)
    peak = f"{chip.peak_bf16_flops_per_device / 1e12:,.0f} TFLOP/s in bfloat16"
    return Finding("devices", "ok", f"{count} x {kind} ({chip.name}){memory_text}, {peak} each")


def _plugin_findings(versions: dict[str, str | None]) -> Iterator[Finding]:
    for names in PLUGINS.values():
        for name in names:
            version, jaxlib = versions.get(name), versions.get("jaxlib")
            if version is None:
                continue
            if name.startswith("jax-") and jaxlib is not None and version != jaxlib:  # released together
                fix = f"run {install_command('cuda')} again"
                yield Finding(name, "problem", f"is {version}, and must be {jaxlib} as jaxlib is", fix)
            else:
                yield Finding(name, "ok", version)


def extension_findings(extensions: list[Declared]) -> Iterator[Finding]:
    """List the extensions that installed packages declare, which a config may name, and what no config can name."""
    owners = Counter(one.module for one in extensions)
    for one in extensions:
        name = one.distribution.name
        if not one.module:
            fix = f'declare a module, as in [project.entry-points."{GROUP}"] name = "my_package.my_module"'
            yield Finding("extension", "warning", f"{shorten(one.value)} of {name} is no plain name of a module", fix)
        elif owners[one.module] > 1:
            yield Finding("extension", "warning", f"{one.module} is declared by {name} and by another package", "uninstall one of them")
        else:
            yield Finding("extension", "ok", f"{one.module} ({one.owner})")


def training_findings(devices: dict[str, Any]) -> Iterator[Finding]:
    """Report the probe's update of a small model in the default precision."""
    if devices["error"]:
        return
    if devices["training"] is None:
        yield Finding("training", "ok", "a small model was trained for a step, in bfloat16")
    else:
        fix = "try precision.compute=float32, and report this if that trains"
        yield Finding("training", "problem", f"a small model cannot be trained in bfloat16: {devices['training']}", fix)


def files_finding(most: int) -> Finding:
    """Check the limit of open files; `most` is negative for no limit."""
    if 0 <= most < LOW_FILES:
        fix = f"raise it to {LOW_FILES}: ulimit -Hn {LOW_FILES}, or LimitNOFILE in systemd"
        return Finding("open files", "warning", f"{most} at most, and checkpoints of a large model and many hosts need more", fix)
    return Finding("open files", "ok", "no limit" if most < 0 else f"{most:,} at most")


def cache_findings(folder: str | None) -> Iterator[Finding]:
    """Check that the compilation cache in `folder` is writable, so that a restart need not compile again."""
    if folder is None:
        return
    existing = next(parent for parent in (Path(folder), *Path(folder).absolute().parents) if parent.exists())
    if is_remote(folder) or os.access(existing, os.W_OK):
        yield Finding("compiled programs", "ok", folder)
    else:
        fix = "set JAX_COMPILATION_CACHE_DIR to a folder that can"
        yield Finding("compiled programs", "warning", f"{folder} cannot be written, so every start compiles again", fix)


def memory_finding(total: int | None) -> Finding:
    """Check the machine's memory, in bytes."""
    if total is None:
        return Finding("memory", "ok", "unknown")
    if total < LOW_MEMORY:
        fix = f"models beyond a few million parameters need {LOW_MEMORY // GIB} GiB"
        return Finding("memory", "warning", f"{total / GIB:.1f} GiB", fix)
    return Finding("memory", "ok", f"{total / GIB:.1f} GiB")


def disk_finding(free: int, folder: Path) -> Finding:
    """Check that `folder`, the default for runs, is writable and has space for checkpoints; `free` in bytes."""
    space = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", "warning", f"{folder} cannot be written", "give run.dir and data.store folders that can")
    if free < NO_DISK:
        return Finding("disk", "problem", space, f"free {NO_DISK // GIB} GiB, or give run.dir and data.store another disk")
    if free < LOW_DISK:
        return Finding("disk", "warning", space, "checkpoints of a larger model fill this: a parameter takes 12 bytes in each")
    return Finding("disk", "ok", space)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
