"""The command line: a short function a verb. Anything heavy is imported inside, so help and config errors are instant."""

import errno
import math
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import maxlm
from maxlm.config.errors import ExitCode, UnavailableError, UserError, shorten

NAMED = 3  # runs that the name of a report holds at most
CTRL_C = 130  # what typer ends with after it
MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
WRONG_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Pretrain transformers in JAX, from a laptop to a TPU pod.",
)
data_app = typer.Typer(no_args_is_help=True, help="Turn text into a token store, and look into one.")
app.add_typer(data_app, name="data")
kernels_app = typer.Typer(no_args_is_help=True, help="Look at the kernels.")
app.add_typer(kernels_app, name="kernels")


def _shipped(incomplete: str) -> list[str]:
    """Names of configs, for the shell to complete."""
    from maxlm.config.loader import SHIPPED

    names = (path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.rglob("*.yml"))
    return sorted(name for name in names if name.startswith(incomplete))


ConfigName = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A path, or a name under configs/ such as runs/quickstart.", autocompletion=_shipped)
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the config, such as train.steps=100.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"maxlm {maxlm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version and stop.")] = False,
) -> None:
    """Pretrain transformers in JAX, from a laptop to a TPU pod."""


@app.command()
def train(config: ConfigName, overrides: Overrides = None) -> None:
    """Train a model, or continue where the run stopped."""
    from maxlm.config import load
    from maxlm.runtime.cluster_env import split

    cluster, rest = split(overrides or [])
    settings = load(config, rest).config
    from rich.console import Console

    from maxlm.telemetry.phases import Phases

    phases = Phases(Console())
    with phases("importing libraries"):
        from maxlm.inference.text import print_samples
        from maxlm.runtime.run import run

    raise typer.Exit(run(settings, phases, print_samples, cluster))


@app.command(name="config")
def show_config(
    config: ConfigName,
    overrides: Overrides = None,
    diff: Annotated[str | None, typer.Option(metavar="OTHER", help="Show only where OTHER, another config, differs.")] = None,
    json_: Json = False,
) -> None:
    """Show the resolved config, where each value comes from, and the parameters, tokens and FLOPs it comes to; of a model alone, too."""
    from maxlm.config import load, show

    loaded = load(config, overrides or [], assume=True)
    other = load(diff, assume=True) if diff is not None else None
    from maxlm.models import counts

    typer.echo(show.as_json(counts, loaded, other) if json_ else show.as_text(counts, loaded, other))


@app.command(name="compile")
def compile_(
    config: ConfigName,
    overrides: Overrides = None,
    topology: Annotated[str | None, typer.Option(metavar="T", help="Such as v5p:4x4x4; the config's own if not given.")] = None,
    slices: Annotated[int | None, typer.Option(min=1, help="How many of them, joined by the data-centre network.")] = None,
    hlo_out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the scheduled program.")] = None,
    json_: Json = False,
) -> None:
    """Compile the training step ahead of time, without the hardware, and say what it needs and where its time goes."""
    from maxlm.cost import compile_command as planning
    from maxlm.runtime import deadline

    with deadline.allow(deadline.KEEP):  # Ctrl-C among the suggestions leaves it at those found
        raise typer.Exit(planning.run(config, overrides or [], topology, slices, hlo_out, as_json=json_))


@app.command(name="plan")
def plan_(
    config: ConfigName,
    overrides: Overrides = None,
    topology: Annotated[str | None, typer.Option(metavar="T", help="Such as v5p:4x4x4; the config's own if not given.")] = None,
    slices: Annotated[int | None, typer.Option(min=1, help="How many of them, joined by the data-centre network.")] = None,
    chips_at_most: Annotated[int | None, typer.Option(metavar="N", min=1, help="Compare topologies of up to N chips instead.")] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="Of the run whose days are told, such as 15e12.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The config to write; default: NAME-planned.yml.")] = None,
    json_: Json = False,
) -> None:
    """Find the fastest mesh, microbatches and remat policy for a TPU topology, with no TPU, and write them as a config."""
    from maxlm.planning import choose_topology, plan
    from maxlm.runtime import deadline

    request = plan.Request(config, tuple(overrides or ()), topology, slices, tokens, out)
    with deadline.allow(deadline.KEEP):  # Ctrl-C keeps what was found
        if chips_at_most is not None:
            raise typer.Exit(choose_topology.compare(request, chips_at_most, as_json=json_))
        raise typer.Exit(plan.run(request, as_json=json_))


@data_app.command()
def prepare(config: ConfigName, overrides: Overrides = None) -> None:
    """Build the token store of a config's data.prepare section."""
    from maxlm.config import load

    settings = load(config, overrides or []).config
    if settings.data.prepare is None:
        raise UserError(f"data.prepare is not set in {config}: say where the text comes from, as in data.prepare.sources=[texts/].")
    from maxlm.data.prepare import prepare as build

    info = build(settings.data)
    typer.echo(f"{settings.data.store}: {info.summary()}")


@data_app.command()
def inspect(store: Annotated[str, typer.Argument(help="A token store: folder or gs://.")], json_: Json = False) -> None:
    """Count and sample what a token store holds."""
    from maxlm.config.paths import store_argument

    place = store_argument(store)
    from maxlm.data.inspect import describe, render

    if json_:
        import json

        typer.echo(json.dumps(describe(place)))
    else:
        from rich.console import Console

        Console().print(render(describe(place)), highlight=False)


@kernels_app.command(name="report")
def kernels_report(
    chip: Annotated[list[str] | None, typer.Option(metavar="CHIP", help="Such as v6e or h200; every TPU if not given. Repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="SHAPE", help="Such as llama-8k; all if not given. May be repeated.")] = None,
    operation: Annotated[str, typer.Option(metavar="OPERATION", help="What the kernels compute.")] = "attention",
    json_: Json = False,
) -> None:
    """Time kernels on the chip that is here; for others compile them, and say what their machine code does, beside the library's."""
    from maxlm.kernel_lab import report as lab

    raise typer.Exit(lab.run(chip or [], operation, shape or [], as_json=json_))


@kernels_app.command(name="sweep")
def kernels_sweep(
    chip: Annotated[list[str] | None, typer.Option(metavar="CHIP", help="Such as v6e; every TPU if not given. May be repeated.")] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="SHAPE", help="Such as llama-8k; all if not given. May be repeated.")] = None,
    operation: Annotated[str, typer.Option(metavar="OPERATION", help="What the kernels compute.")] = "attention",
    write: Annotated[bool, typer.Option("--write", help="Put the best into the table that the kernels read.")] = False,
    json_: Json = False,
) -> None:
    """Compile our kernels for TPUs that are not there at several choices of blocks, count them, and say which are best."""
    from maxlm.kernel_lab import sweep as lab

    raise typer.Exit(lab.run(chip or [], operation, shape or [], write=write, as_json=json_))


@app.command()
def generate(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most this many new tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among this many; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the draw.")] = 0,
    step: Annotated[int | None, typer.Option(help="A checkpoint's step; the newest if not given.")] = None,
) -> None:
    """Continue a prompt with the model of a run."""
    if not math.isfinite(temperature):
        raise UserError(f"--temperature {temperature} is no number: give one such as 0.8.")
    from maxlm.inference import Sampler
    from maxlm.inference.text import generate_from_run
    from maxlm.runtime.jax_setup import look_for_devices
    from maxlm.telemetry.log import RunLog
    from maxlm.training.fits import explain_out_of_memory

    look_for_devices()
    sampler = Sampler(max_new_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    with RunLog(), explain_out_of_memory("generating", "ask for fewer --tokens, or shorten the prompt"):
        typer.echo(prompt + generate_from_run(run_dir, prompt, sampler, step))


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs; several are overlaid.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write; default: report.html in the run's folder, of several report-A-B.html here.")
    ] = None,
) -> None:
    """Write a self-contained HTML report of one or several runs."""
    from maxlm.telemetry.report import write_report

    names = [run_dir.resolve().name for run_dir in run_dirs]
    several = Path(f"report-{'-'.join(names) if len(names) <= NAMED else f'{names[0]}-and-{len(names) - 1}-more'}.html")
    typer.echo(write_report(run_dirs, out or (several if len(names) > 1 else run_dirs[0] / "report.html")))


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, such as: -- train runs/quickstart.")],
    restarts: Annotated[int, typer.Option(min=0, help="How often to start it again.")] = 10,
    backoff: Annotated[float, typer.Option(min=0, help="Seconds before a restart; twice as many each time without progress.")] = 5.0,
) -> None:
    """Run a command of maxlm, and start it again after a crash or a lost host."""
    if not math.isfinite(backoff):
        raise UserError(f"--backoff {backoff} is no number of seconds: give one such as 5.")
    from maxlm.runtime.launch import Supervisor

    program = [sys.executable, "-m", "maxlm", *command]
    raise typer.Exit(Supervisor(program, restarts=restarts, backoff=backoff, say=lambda line: typer.echo(line, err=True)).run())


@app.command(name="bench-comm")
def bench_comm(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="Whose mesh; or mesh.data=2 alone.")
    ] = None,
    operation: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Such as all-reduce; all if not given. Repeatable.")] = None,
    smallest: Annotated[str, typer.Option(metavar="SIZE", help="Of a device's full buffer; 1KB is 1024 bytes.")] = "1KB",
    largest: Annotated[str, typer.Option(metavar="SIZE", help="Each size is four times the one before.")] = "1GB",
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to draw it, as a PNG.")] = None,
    json_: Json = False,
) -> None:
    """Measure collectives over each axis of a mesh, of all hosts, against what their links can do."""
    from maxlm.runtime.cluster_env import split
    from maxlm.runtime.comm import sizes

    cluster, rest = split(arguments or [])
    asked, some = sizes.chosen(operation or []), sizes.between(smallest, largest)
    from maxlm.cost.bus_bandwidth import bus_limit
    from maxlm.runtime.comm.command import Request, run

    request = Request(*Request.mesh_of(rest), tuple(asked), tuple(some), out)
    raise typer.Exit(run(request, cluster, bus_limit, as_json=json_))


@app.command()
def doctor(
    place: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="With --cluster: coordinator= and the like.")] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="On every host at once: compare them, and name the slow one.")] = False,
    json_: Json = False,
) -> None:
    """Check devices, versions, disk and what is missing, and say how to get it; or the hosts of a cluster."""
    from maxlm.runtime.cluster_env import split

    named, rest = split(place or [])
    if rest or (named and not cluster):
        raise UserError(
            f"{(rest or list(named))[0]}: only --cluster takes settings, which are coordinator=, process_count= and process_id=."
        )
    if cluster:
        from maxlm.runtime.comm.examine import run

        raise typer.Exit(run(named, as_json=json_))
    from maxlm.runtime.doctor import as_text, examine

    found = examine()
    if json_:
        import json

        typer.echo(json.dumps(found.to_json()))
    else:
        typer.echo(as_text(found))
    raise typer.Exit(0 if found.healthy else 2)


def main() -> None:
    """Run the command line. What the user, storage or a signal ends is one line and its exit code, without a traceback."""
    try:
        code = _run()
    except (UserError, typer.TyperException) as error:  # typer's are mistakes in the command itself
        message = str(error) if isinstance(error, UserError) else str(UserError(error.format_message()))
        _end(message, getattr(error, "exit_code", ExitCode.WRONG_INPUT))
    except KeyboardInterrupt:
        code = CTRL_C  # `__main__` says which signal it was, and ends with STOPPED
    except BrokenPipeError:
        _close_output()
        _end("the program that read this output has ended.", ExitCode.STOPPED)
    except OSError as error:
        if error.errno not in (*MAY_PASS, *WRONG_PLACE):
            raise
        kind = UnavailableError if error.errno in MAY_PASS else UserError
        message = f"{shorten(str(error.filename or 'the output'))}: cannot be read or written: {error.strerror}."
        _close_output()
        _end(str(kind(message)), kind.exit_code)
    sys.exit(code)


def _run() -> int | None:
    """The command's exit code, once all that it printed is written."""
    for argument in sys.argv[1:]:
        if any("\udc80" <= char <= "\udcff" for char in argument):  # how Python holds bytes that are no text
            raise UserError(f"{shorten(argument)} on the command line is not UTF-8 text: rename it, or type it again.")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows no such letter
    try:
        code: int | None = app(standalone_mode=False)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's own way to end then
            raise ended.__context__ from None
        raise
    sys.stdout.flush()
    return code


def _end(message: str, code: int) -> NoReturn:
    if message:  # a command that lacks everything has printed its help instead
        typer.echo(f"maxlm: {message}", err=True)
    sys.exit(code)


def _close_output() -> None:
    """Let the interpreter's own flush at the end find no one to fail for."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
