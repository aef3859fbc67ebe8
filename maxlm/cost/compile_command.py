"""The command `maxlm compile`: settings in, report out. Imports jax only once the settings are known to be good."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from maxlm.config import assumed, load, rules
from maxlm.config.errors import UserError
from maxlm.config.loader import LoadedConfig, flatten
from maxlm.hardware.topologies import Topology

LOG_WIDTH = 120  # columns of a file or a pipe, which do not say how wide they are


class NoClusterError(UserError):
    """Neither the config nor the command line says for which machine."""


def run(name: str, overrides: Sequence[str], topology: str | None, slices: int | None, hlo_out: Path | None, *, as_json: bool) -> int:
    """Compile the step of a config and print what it needs, takes and waits for; 0 when it fits, else 2. Raises UserError."""
    loaded, machine = meant(name, overrides, topology, slices, assume=True)
    config = loaded.config
    if assumptions := assumed.as_text(dict(flatten(config.model_dump(mode="json"))), loaded.sources):
        sys.stderr.write(f"{name} is a model alone, so these are assumed: {assumptions}\n")
    if hlo_out is not None and not hlo_out.absolute().parent.is_dir():
        raise UserError(f"--hlo-out {hlo_out}: there is no folder {hlo_out.absolute().parent}; make it first.")
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    from maxlm.cost.render import show
    from maxlm.cost.report import examine

    with progress() as tell:
        report = examine(config, machine, tell)
    if hlo_out is not None and report.step.fits:
        _write(hlo_out, report.step.text)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
    else:
        show(report, screen())
    return 0 if report.step.fits else 2


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Says on stderr what is going on: a live line on a terminal, a line each in a log."""
    console = Console(stderr=True)
    with console.status("") as status:

        def tell(text: str) -> None:
            if console.is_terminal:
                status.update(f"{text} ...")
            else:
                console.print(f"{text} ...", markup=False, highlight=False, soft_wrap=True)

        yield tell


def screen() -> Console:
    """Where results go: as wide as the terminal, or as a log should be."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def meant(
    name: str, overrides: Sequence[str], topology: str | None, slices: int | None, *, any_mesh: bool = False, assume: bool = False
) -> tuple[LoadedConfig, Topology]:
    """The config, with the machine of the command line in the place of its own, and that machine. `any_mesh`, `assume`: as in `load`."""
    said = list(overrides)
    if topology is not None:
        said += [f"cluster.topology={json.dumps(topology)}", "cluster.accelerator="]
    if slices is not None:
        said.append(f"mesh.slices={slices}")
    if slices == 1:
        said.append("mesh.across_slices=data")  # which axis would cross them does not matter any more
    loaded = load(name, said, any_mesh=any_mesh, assume=assume)
    if loaded.config.cluster is None:
        raise NoClusterError(f"{name} names no cluster to compile for: give --topology, such as --topology v5p:4x4x4.")
    return loaded, rules.topology_of(loaded.config)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--hlo-out {path} cannot be written: {error.strerror}; give another place.") from None
