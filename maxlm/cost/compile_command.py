"""The command `maxlm compile`: settings in, report out. Imports jax only for valid settings."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from maxlm.base.console import Console, print_line
from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import check_out
from maxlm.config import assumed, rules
from maxlm.config.fields import flatten
from maxlm.config.loader import ConfigSource, LoadedConfig, read
from maxlm.cost import calibration
from maxlm.hardware.topologies import Topology

LOG_WIDTH = 120  # columns of a file or a pipe, which has no width


class NoClusterError(UserError):
    """Neither the config nor the command line names a machine."""


def run(
    name: str,
    overrides: Sequence[str],
    topology: str | None,
    slices: int | None,
    hlo_out: Path | None,
    *,
    as_json: bool,
    machine_code: bool,
) -> int:
    """Compile the step of a config and print its memory, time and communication; 0 if it fits, else 2. For TPUs XLA is ended once it has
    scheduled the step, unless `machine_code`. Raises UserError.
    """
    loaded, machine = load_to_compile(name, overrides, topology, slices)
    config = loaded.config
    if assumptions := assumed.as_text(dict(flatten(config.model_dump(mode="json"))), loaded.sources):
        sys.stderr.write(f"{name} is a model alone, so these are assumed: {assumptions}\n")
    check_out(hlo_out, "--hlo-out")
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    from maxlm.cost.compile_report import examine, show

    with progress() as show_progress:
        report = examine(config, machine, show_progress, machine_code=machine_code)
    if hlo_out is not None and report.step.fits:
        try:
            hlo_out.write_text(report.step.text, encoding="utf-8")
        except OSError as error:
            raise error_kind(error)(f"--hlo-out {hlo_out} cannot be written: {error.strerror}; give another place.") from None
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
    else:
        show(report, output_console())
    return 0 if report.step.fits else 2


def load_to_compile(
    source: ConfigSource, overrides: Sequence[str], topology: str | None, slices: int | None
) -> tuple[LoadedConfig, Topology]:
    """(config, machine with the speeds that the config says were measured on it)."""
    loaded, machine = load_for_machine(source, overrides, topology, slices, assume=True)
    return loaded, calibration.of_config(loaded.config.cost, machine)


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: one live line on a terminal, a line for each message in a log; `quiet`: nothing."""
    console = Console(stderr=True, quiet=quiet)
    with console.status("") as status:

        def show_progress(text: str) -> None:
            if console.is_terminal:
                status.update(f"{text} ...")
            else:
                print_line(console, f"{text} ...")

        yield show_progress


def output_console() -> Console:
    """The console for results: as wide as the terminal, or `LOG_WIDTH` in a file or a pipe, where long lines stay whole."""
    terminal = Console().is_terminal
    return Console(markup=False, highlight=False, soft_wrap=not terminal, width=None if terminal else LOG_WIDTH)


def load_for_machine(
    source: ConfigSource,
    overrides: Sequence[str],
    topology: str | None,
    slices: int | None,
    *,
    any_mesh: bool = False,
    assume: bool = False,
) -> tuple[LoadedConfig, Topology]:
    """(config, machine), the machine that is named in place of the config's. `any_mesh`, `assume`: as in `load`."""
    settings = list(overrides)
    if topology is not None:
        settings += [f"cluster.topology={json.dumps(topology)}", "cluster.accelerator="]  # empty: by the topology
    if slices is not None:
        settings.append(f"mesh.slices={slices}")
    if slices == 1:
        settings.append("mesh.across_slices=data")  # no axis crosses slices any more
    loaded = read(source, settings, any_mesh=any_mesh, assume=assume)
    if loaded.config.cluster is None:
        name = source if isinstance(source, str) else "the config"
        raise NoClusterError(f"{name} names no cluster to compile for: give --topology, such as v5p-128 (TPUs) or h100x8 (GPUs).")
    return loaded, rules.topology_of(loaded.config)
