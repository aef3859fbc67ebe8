"""MaxText's training step, scheduled for a TPU by MaxText's own stack: tools/truth.py and tools/tuned_peer.py price the programs.

As `maxlm.compiler.schedule` does with ours: XLA writes the scheduled program after some seconds, and its process is ended.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxlm.compiler.schedule import options_to_write, written

ALONE = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
DEFAULTS = ("compile_topology_num_slices=1", "enable_checkpointing=false", "dataset_type=synthetic", "run_name=compare")
CROSS_COMPILE = "--tokamax_cross_compile=true"  # else tokamax refuses its grouped matmuls for the CPU that it finds
WHERE = "import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])"
POLL_S = 0.2
TAIL = 600  # characters of what it printed, where it fails


def schedule(python: Path, settings: Sequence[str], flags: Sequence[str], out: Path) -> None:
    """Write the scheduled program of MaxText's step to `out`. `python`: of an environment with MaxText; `settings`: key=value, as it takes
    them; `flags`: XLA's, each --name=value. Raises RuntimeError with the end of what it printed if it fails.
    """
    try:
        where = subprocess.run([python, "-c", WHERE], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"--maxtext-python {python}: must be the Python of an environment with MaxText in it ({error})") from None
    base = Path(where) / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        kept, named = Path(folder), {setting.partition("=")[0] for setting in settings}
        more = (one for one in (*DEFAULTS, f"base_output_directory={kept}") if one.partition("=")[0] not in named)
        xla = " ".join((*flags, *(f"--{name}={value}" for name, value in options_to_write(kept / "xla").items() if value != "")))
        arguments = [str(base), CROSS_COMPILE, *settings, *more, f"compile_xla_flags={xla}"]
        command = [str(python), "-m", "maxtext.trainers.pre_train.train_compile", *arguments]
        with subprocess.Popen(command, env=_environment(), stdout=said, stderr=subprocess.STDOUT) as process:
            try:
                while not (found := _whole(kept / "xla")) and process.poll() is None:
                    time.sleep(POLL_S)
            finally:
                process.kill()
        program = found or _whole(kept / "xla")
        if not program:
            said.seek(0)
            raise RuntimeError(said.read()[-TAIL:])
        out.write_text(program, encoding="utf-8")


def schedule_missing(python: Path | None, wanted: Mapping[str, tuple[Sequence[str], Sequence[str]]], folder: Path) -> None:
    """Write FOLDER/NAME.hlo of each of `wanted`, {name: (settings, flags)}, that is missing there; the end of what fails goes to stderr.
    Ends the program with status 2 if there is none in the end.
    """
    if python is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for name, (settings, flags) in wanted.items():
        out = folder / f"{name}.hlo"
        if python is None or out.exists():
            continue
        began = time.monotonic()
        try:
            schedule(python, settings, flags, out)
            sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
        except RuntimeError as error:
            sys.stderr.write(f"{name}: {error}\n")
    if not any((folder / f"{name}.hlo").exists() for name in wanted):
        sys.stderr.write(f"{folder} has none of {', '.join(f'{name}.hlo' for name in wanted)}: give --maxtext-python\n")
        raise SystemExit(2)


def _whole(folder: Path) -> str:
    """The scheduled program in `folder` once all of it is there; until then ""."""
    program, *_ = written(folder) or ("",)
    return program if program.rstrip().endswith("\n}") else ""


def _environment() -> dict[str, str]:
    """Without the library of our own compiler, which importing jax has put there."""
    return {**{name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}, **ALONE}
