"""The command line: one short function per command. Heavy imports are inside, so help and config errors are instant."""

import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import maxlm
from maxlm.base.errors import UserError, printable, shorten
from maxlm.base.host import python_command
from maxlm.base.installing import install_command
from maxlm.command_examples import add_examples
from maxlm.command_line import run_app, weights_kind
from maxlm.config import extensions
from maxlm.telemetry.runs import command as runs_command

if TYPE_CHECKING:
    from maxlm.hardware.prices import Term

CORPUS_PACKAGES = ("chardet", "duckdb", "ftfy", "numba", "resiliparse")  # of maxlm.corpus, some imported only when needed

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Pretrain transformers in JAX, from a laptop to a TPU pod.",
)
data_app = typer.Typer(no_args_is_help=True, help="Turn text into a token store, and look into one.")
app.add_typer(data_app, name="data")
corpus_app = typer.Typer(no_args_is_help=True, help="Turn raw text into clean documents.")
app.add_typer(corpus_app, name="corpus")
kernels_app = typer.Typer(no_args_is_help=True, help="Look at the kernels.")
app.add_typer(kernels_app, name="kernels")


def _shipped(incomplete: str) -> list[str]:
    """Names of configs, for the shell to complete."""
    from maxlm.config.loader import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


CONFIG = typer.Argument(
    metavar="CONFIG", help="A path, a name under configs/ such as runs/quickstart, or the folder of a run.", autocompletion=_shipped
)
ConfigName = Annotated[str, CONFIG]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the config, such as train.steps=100.")]
Topology = Annotated[str | None, typer.Option(metavar="T", help="Such as v5p:4x4x4, v5p-128 or h100x16; the config's own if not given.")]
Slices = Annotated[int | None, typer.Option(min=1, help="Number of slices, joined by the data-centre network.")]
Shapes = Annotated[list[str] | None, typer.Option(metavar="SHAPE", help="Such as llama-8k; all if not given. May be repeated.")]
Kernel = Annotated[str, typer.Option(metavar="OPERATION", help="Operation of the kernels.")]
Weights = Annotated[str, typer.Option(metavar="KIND", help="raw, or ema: their moving average, which a run with `ema` keeps.")]
Devices = Annotated[int | None, typer.Option(min=1, max=1024, metavar="N", help="Split the CPU into N devices, to try meshes on it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"maxlm {maxlm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version and stop.")] = False,
    extension: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Load an extension with any command (docs/how-to/extensions.md). Repeatable."),
    ] = None,
    extension_path: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="A folder with extensions that a config may name. Repeatable.")
    ] = None,
) -> None:
    """Pretrain transformers in JAX, from a laptop to a TPU pod."""
    extensions.accept(extension or (), extension_path or ())


@app.command()
def train(config: ConfigName, overrides: Overrides = None, devices: Devices = None) -> None:
    """Train a model, or continue where the run stopped."""
    from maxlm.cluster.environment import split_arguments
    from maxlm.run.frozen import load_frozen

    cluster, rest = split_arguments(overrides or [])
    loaded = load_frozen(config, rest)
    settings = loaded.config
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    from maxlm.base.console import Console
    from maxlm.telemetry.phases import Phases

    phases = Phases(Console())
    with phases("importing libraries"):
        _split_cpu(devices)
        from maxlm.api.training import train as run

    raise typer.Exit(run(settings, phases, cluster).code)


def _split_cpu(devices: int | None) -> None:
    if devices is not None:
        from maxlm.run.jax_setup import use_virtual_devices

        use_virtual_devices(devices)


@app.command(name="config")
def show_config(
    config: Annotated[str | None, CONFIG] = None,
    overrides: Overrides = None,
    diff: Annotated[str | None, typer.Option(metavar="OTHER", help="Show only where OTHER, another config, differs.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="KEY", help="Explain a setting or a section instead, such as mesh.fsdp; CONFIG may be left out.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configs, for editors; without CONFIG.")] = False,
    json_: Json = False,
) -> None:
    """Show the resolved config or model, the source of each value, and the parameters, tokens and FLOPs that follow."""
    from maxlm.config import show
    from maxlm.config.explain_setting import without_values

    if (answer := without_values(config, overrides or [], diff, explain, schema=schema, as_json=json_)) is not None:
        typer.echo(answer)
        return
    if config is None:
        raise UserError("maxlm config needs a CONFIG, such as runs/quickstart; only --explain and --schema go without.")
    from maxlm.models import counts

    typer.echo(show.answer(counts, config, overrides or [], diff, lambda line: typer.echo(f"note: {line}", err=True), as_json=json_))


@app.command(name="compile")
def compile_(
    config: ConfigName,
    overrides: Overrides = None,
    topology: Topology = None,
    slices: Slices = None,
    hlo_out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the scheduled program.")] = None,
    machine_code: Annotated[
        bool,
        typer.Option(
            "--machine-code", help="For TPUs, make it too, in minutes: adds XLA's own cycles, finds kernels that the chip refuses."
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """Compile the training step ahead of time, without the hardware; show its memory and predicted time."""
    from maxlm.cluster import deadline
    from maxlm.cost import compile_command

    with deadline.allow(deadline.KEEP):  # Ctrl-C among the suggestions leaves it at those found
        settings = config, overrides or [], topology, slices, hlo_out
        raise typer.Exit(compile_command.run(*settings, as_json=json_, machine_code=machine_code))


@app.command(name="plan")
def plan_(
    context: typer.Context,
    config: Annotated[str | None, CONFIG] = None,
    overrides: Overrides = None,
    topology: Topology = None,
    slices: Slices = None,
    chips_at_most: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compare topologies of up to N chips, of the config's or --topology's kind.")
    ] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="Length of the run to predict, such as 15e12.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The config to write; default: NAME-planned.yml.")] = None,
    any_format: Annotated[bool, typer.Option("--any-format", help="Choose the matmuls' format as well: int8 or fp8 if faster.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Compile a few layouts only, in seconds to a minute for a small model.")] = False,
    prices: Annotated[str | None, typer.Option(metavar="FILE", help="Prices to use; list prices if not given.")] = None,
    buy: Annotated[str, typer.Option(metavar="TERM", help="on-demand, spot, reserved-1y or reserved-3y.")] = "on-demand",
    region: Annotated[str | None, typer.Option(metavar="NAME", help="Buy there; where it is cheapest if not given.")] = None,
    days_at_most: Annotated[
        float | None, typer.Option(metavar="D", help="Name the cheapest topology that is done in D days; needs --chips-at-most.")
    ] = None,
    dollars_at_most: Annotated[
        float | None, typer.Option(metavar="X", help="Name the fastest topology for X dollars; needs --chips-at-most.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="Choose size and length for so many model FLOPs, such as 1e22; needs --ladder.")
    ] = None,
    ladder: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The `folder` of a ladder that `maxlm ladder` has fitted.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine instead, and write --calibration's FILE.")] = False,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help="What --calibrate measured on such a GPU.")] = None,
    json_: Json = False,
) -> None:
    """Find the fastest mesh, microbatches and remat policy for TPUs or GPUs, with none of them, and write them as a config."""
    from maxlm.cluster import deadline
    from maxlm.planning import plan_command
    from maxlm.planning.price_file import read_prices
    from maxlm.planning.run_cost import Wanted

    if calibrate:
        if any(_is_given(context, name) for name in context.params if name not in ("calibrate", "out", "json_")):
            raise UserError("--calibrate measures this machine, and goes with --out and --json alone.")
        from maxlm.planning.calibrate import calibrate as measure

        raise typer.Exit(measure(out, as_json=json_))
    if config is None:
        raise UserError("maxlm plan needs a CONFIG, such as runs/quickstart; only --calibrate goes without.")
    wanted = Wanted(read_prices(prices), cast("Term", buy), region, days_at_most, dollars_at_most)
    settings = tuple(overrides or ())
    if (flops is None) != (ladder is None):
        raise UserError("--flops and --ladder go together: the budget, and the ladder that tells the best size for it.")
    if flops is not None and tokens is not None:
        raise UserError("--tokens goes without --flops: the ladder tells the tokens for a budget.")
    if flops is not None and ladder is not None:
        from maxlm.ladder.recommend import recommend

        recommended = recommend(ladder, config, settings, flops)
        for line in recommended.sentences:
            typer.echo(line, err=json_)
        settings, tokens = (*settings, *recommended.overrides), recommended.tokens
    request = plan_command.Request(config, settings, topology, slices, tokens, out, wanted, any_format, calibration, prices, quick)
    with deadline.allow(deadline.KEEP):  # Ctrl-C keeps what was found
        if chips_at_most is not None:
            raise typer.Exit(plan_command.compare(request, chips_at_most, as_json=json_))
        raise typer.Exit(plan_command.run(request, as_json=json_))


@app.command()
def ladder(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A ladder file, or a name under configs/ such as ladders/quickstart.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and their state; write nothing.")] = False,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="Write the configs for another scheduler, and fit the runs that are done.")
    ] = False,
    without_failed: Annotated[bool, typer.Option("--without-failed", help="Fit although runs are missing.")] = False,
    compare: Annotated[str | None, typer.Option(metavar="A,B,...", help="Tune and compare these optimizers instead; A: baseline.")] = None,
) -> None:
    """Train a grid of sizes and lengths, fit the loss over them, and predict larger runs. The same command goes on where it stopped."""
    from maxlm.ladder import ladder_command

    options = ladder_command.Options(dry_run, not no_train, without_failed)

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if compare is None:
        ladder_command.run(file, overrides or [], options, say)
        return
    if dry_run or without_failed:
        raise UserError("--compare goes without --dry-run and --without-failed: it needs the losses of all its runs.")
    ladder_command.run_comparison(file, overrides or [], compare, options, say)


@corpus_app.command("run")
def run_corpus(file: Annotated[str, typer.Argument(metavar="FILE", help="A corpus file (YAML).")], overrides: Overrides = None) -> None:
    """Read, filter, deduplicate and decontaminate the documents of a corpus file. The same command goes on after an interruption."""
    from maxlm.config.loader import load_as

    with _needs_corpus():
        from maxlm.corpus.command import run
        from maxlm.corpus.settings import CorpusSettings
    settings, scorer = load_as(CorpusSettings, file, overrides or []), None
    perplexity = settings.filters and settings.filters.perplexity
    if perplexity and perplexity.checkpoint:
        from maxlm.evaluation.opening import find_checkpoint

        scorer = find_checkpoint(perplexity.checkpoint)
    run(settings, lambda line: typer.echo(line, err=True), scorer)


@corpus_app.command("report")
def report_corpus(output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The `output` of a corpus file.")]) -> None:
    """Show what a finished run removed and why, and write its report.html anew."""
    with _needs_corpus():
        from maxlm.corpus.command import report
    report(output, typer.echo)


@contextmanager
def _needs_corpus() -> Iterator[None]:
    if missing := [name for name in CORPUS_PACKAGES if importlib.util.find_spec(name) is None]:
        raise UserError(f"maxlm corpus needs the package{'s' * (len(missing) > 1)} {', '.join(missing)}: {install_command('corpus')}.")
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"maxlm corpus needs the package {error.name}: {install_command('corpus')}.") from None


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
def inspect(
    place: Annotated[str, typer.Argument(metavar="PLACE", help="A token store (folder or gs://), the folder of a run, or a config.")],
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=2**31 - 1, help="Show the documents in the batch of update N of a run.")
    ] = None,
    json_: Json = False,
) -> None:
    """Count and sample what a token store holds; of a run or a config, show the shares of its sources and where a batch comes from."""
    from maxlm.diagnostics import inspect_data

    raise typer.Exit(inspect_data.run(place, overrides or [], step, as_json=json_))


@kernels_app.command(name="report")
def kernels_report(
    chip: Annotated[list[str] | None, typer.Option(metavar="CHIP", help="Such as v6e or h200; every TPU if not given. Repeatable.")] = None,
    shape: Shapes = None,
    operation: Kernel = "attention",
    json_: Json = False,
) -> None:
    """Time kernels on this machine's chip; compile them for others and compare their machine code to the library's."""
    from maxlm.kernel_lab import kernel_commands

    raise typer.Exit(kernel_commands.report(chip or [], operation, shape or [], as_json=json_))


@kernels_app.command(name="sweep")
def kernels_sweep(
    chip: Annotated[list[str] | None, typer.Option(metavar="CHIP", help="Such as v6e; every TPU if not given. May be repeated.")] = None,
    shape: Shapes = None,
    operation: Kernel = "attention",
    write: Annotated[bool, typer.Option("--write", help="Write the best into the table that the kernels read.")] = False,
    json_: Json = False,
) -> None:
    """Compile our kernels and the library's for TPUs ahead of time at several block sizes, count their instructions, and rank them."""
    from maxlm.kernel_lab import kernel_commands

    raise typer.Exit(kernel_commands.sweep(chip or [], operation, shape or [], write=write, as_json=json_))


@app.command()
def generate(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run, or of an imported model.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]... [mesh.KEY=VALUE]...", help="Texts to continue; settings such as mesh.fsdp=8.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="More: a text a line, or .jsonl: strings, `prompt`, `messages`.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most this many new tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many; 0: all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Sample among the most likely that together have this probability; 1: all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Sample among those with this share of the largest probability; 0: all.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Divide the logits of tokens that are there already by this; 1: not.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text. May be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: of matrices, activations and caches.")] = "float32",
    step: Annotated[int | None, typer.Option(help="A checkpoint's step; the newest if not given.")] = None,
    weights: Weights = "raw",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages to the assistant, rendered by the chat template.")] = False,
    special: Annotated[bool, typer.Option("--special-tokens", help="Special tokens in prompts are those tokens, not text.")] = False,
) -> None:
    """Continue prompts with the model of a run."""
    if not math.isfinite(temperature):
        raise UserError(f"--temperature {temperature} is not a number: give one such as 0.8.")
    from maxlm.inference.generate import Sampler
    from maxlm.inference.text import generate_from_run, read_arguments
    from maxlm.run.jax_setup import select_platform
    from maxlm.telemetry.log import RunLog
    from maxlm.training.fits import explain_out_of_memory

    sampler = Sampler(tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, tuple(stop or ()))
    texts, mesh = read_arguments(prompts or [], prompts_file)
    select_platform()
    with RunLog(), explain_out_of_memory("generating", "ask for fewer --tokens, shorten the prompts, or give fewer at a time"):
        found = generate_from_run(
            run_dir, texts, sampler, step, of=weights_kind(weights, run_dir), overrides=mesh, dtype=dtype, chat=chat, special=special
        )
    for number, (text, continuation) in enumerate(zip(texts, found, strict=True), 1):
        if len(texts) > 1:
            typer.echo(f"--- {number} of {len(texts)}: {shorten(text if isinstance(text, str) else json.dumps(text))!r}")
        typer.echo(continuation if chat else f"{text}{continuation}")


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder (config.json, safetensors, tokenizer), or one safetensors file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder for the model config, the checkpoint and the tokenizer.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the mesh that the parameters are spread over, such as mesh.fsdp=8."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of the config.json in the folder of the weights.")] = None,
) -> None:
    """Import a published model. On a cluster every host runs it, and all see the source and the new folder."""
    import jax

    from maxlm.cluster import cluster
    from maxlm.cluster.environment import split_arguments
    from maxlm.interop.importing import import_model
    from maxlm.run.jax_setup import select_platform
    from maxlm.telemetry.log import RunLog
    from maxlm.telemetry.phases import progress_bar

    named, rest = split_arguments(overrides or [])
    select_platform()
    with cluster.joined(named, lambda line: typer.echo(line, err=True)), RunLog(), progress_bar("importing") as step:
        imported = import_model(source, out, rest, step, config)
        if jax.process_index() > 0:
            return
    for note in imported.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{imported.folder}: {imported.family}, {imported.parameters:,} parameters (model.yml, checkpoints/, tokenizer/)")


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run, or of an imported model.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="The largest file, such as 5GB.")] = "5GB",
    step: Annotated[int | None, typer.Option(help="A checkpoint's step; the newest if not given.")] = None,
    weights: Weights = "raw",
    quantize: Annotated[str | None, typer.Option(metavar="FORMAT", help="int8, int4 or fp8: of the matrices of layers.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapters of model.lora, for the PEFT library.")] = False,
) -> None:
    """Export a model for the Hugging Face library."""
    of = weights_kind(weights, run_dir)
    if adapter and (dtype, shard_size, quantize) != ("float32", "5GB", None):
        raise UserError("--adapter writes one file of float32: leave --dtype, --shard-size and --quantize out.")
    from maxlm.interop.exporting import export_model
    from maxlm.interop.peft import export_adapter
    from maxlm.run.jax_setup import select_platform
    from maxlm.telemetry.log import RunLog
    from maxlm.telemetry.phases import progress_bar

    select_platform()
    with RunLog(), progress_bar("exporting") as progress:
        if adapter:
            adapters = export_adapter(run_dir, out, step, of)
            typer.echo(f"{out}: adapters of {adapters.architecture}, {adapters.parameters:,} parameters")
            return
        exported = export_model(run_dir, out, dtype, shard_size, step, progress, of, quantize)
    for note in exported.notes:
        typer.echo(f"note: {note}")
    files = "1 file" if exported.files == 1 else f"{exported.files} files"
    stored = dtype if quantize is None else f"{quantize} and {dtype}"
    typer.echo(f"{out}: {exported.architecture}, {exported.parameters:,} parameters in {files} of {stored}")


@app.command(name="eval")
def eval_(
    model: Annotated[
        Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="The folder of a run or of an imported model, or a Hugging Face folder.")
    ],
    tasks: Annotated[str, typer.Option(metavar="A,B", help="Task files, or names under configs/tasks/, split by commas.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of mesh and precision, such as mesh.tensor=2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write results; default: evaluations/ of the run.")] = None,
    step: Annotated[int | None, typer.Option(help="A checkpoint's step; the newest if not given.")] = None,
    context: Annotated[int | None, typer.Option(metavar="TOKENS", help="Tokens that are read together; as trained if not given.")] = None,
    weights: Weights = "raw",
    json_: Json = False,
) -> None:
    """Evaluate a model on tasks."""
    of = weights_kind(weights, model)
    from maxlm.evaluation.eval_command import evaluate
    from maxlm.run.jax_setup import enable_compilation_cache, select_platform
    from maxlm.telemetry.log import RunLog
    from maxlm.training.fits import explain_out_of_memory

    select_platform()
    enable_compilation_cache()
    with RunLog(), explain_out_of_memory("evaluating", "split the weights over more devices with mesh.fsdp, or lower --context"):
        evaluate(model, tasks, overrides or [], out=out, step=step, context=context, kind=of, as_json=json_)


@app.command()
def average(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")],
    last: Annotated[int, typer.Option(metavar="N", min=2, help="Average so many checkpoints, the newest.")] = 5,
    steps: Annotated[str | None, typer.Option(metavar="A,B,...", help="Average the checkpoints of these steps instead.")] = None,
    weights: Weights = "raw",
) -> None:
    """Average the last checkpoints of a run into a model that can be used like any."""
    of = weights_kind(weights, run_dir)
    named = [part.strip() for part in steps.split(",")] if steps is not None else []
    if wrong := [part for part in named if not (part.isascii() and part.isdigit() and len(part) < 10)]:
        raise UserError(f"--steps: {wrong[0]!r} is not a step: give numbers with commas between them, such as 1000,2000.")
    from maxlm.interop.averaging import average as average_checkpoints
    from maxlm.run.jax_setup import select_platform
    from maxlm.telemetry.log import RunLog
    from maxlm.telemetry.phases import progress_bar

    select_platform()
    with RunLog(), progress_bar("averaging") as progress:
        made = average_checkpoints(run_dir, out, last, [int(part) for part in named], of, progress)
    typer.echo(f"{out}: the mean of steps {', '.join(f'{step:,}' for step in made.steps)}, {made.parameters:,} parameters")


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs; several are overlaid.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write; default: report.html in the run's folder, of several report-A-B.html here.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Write no file: show the report in a browser, as the runs go on, until ctrl-C.")
    ] = False,
    port: Annotated[int | None, typer.Option(metavar="N", min=0, max=65535, help="Port of 127.0.0.1 for --live; any that is free.")] = None,
) -> None:
    """Write a self-contained HTML report of one or several runs, or show it live."""
    if live and out is not None:
        raise UserError(f"--out {out} does not go with --live, which writes no file: leave one of them out.")
    if port is not None and not live:
        raise UserError(f"--port {port} is only for --live: add --live, or leave it out.")
    if live:
        from maxlm.telemetry.report.live import serve

        serve(run_dirs, port or 0, say=typer.echo, warn=lambda line: typer.echo(line, err=True))
        return
    from maxlm.telemetry.report import check_place, default_place, write_report

    typer.echo(printable(str(write_report(run_dirs, check_place(out) if out is not None else default_place(run_dirs)))))


app.command(name="runs")(runs_command.runs)
app.command(name="query")(runs_command.query)


@app.command()
def profile(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="On a cluster: coordinator= and the like.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps to trace, after two that are not.")] = 3,
) -> None:
    """Run a few steps of a run under the profiler; write a page that says where their time goes."""
    from maxlm.cluster.environment import split_arguments

    named, rest = split_arguments(overrides or [])
    if rest:
        raise UserError(f"{shorten(rest[0])}: a run is profiled as it is configured; only coordinator= and the like can be set.")
    from maxlm.cluster import cluster
    from maxlm.cost.prediction import predict
    from maxlm.diagnostics.profile_command import profile_run
    from maxlm.run.jax_setup import select_platform
    from maxlm.telemetry.formatting import percent
    from maxlm.telemetry.log import RunLog
    from maxlm.training.fits import explain_out_of_memory

    select_platform()
    joined = cluster.joined(named, lambda line: typer.echo(line, err=True))
    with joined, RunLog(), explain_out_of_memory("profiling", "it needs the devices that training needs: end the run first"):
        profiled = profile_run(run_dir, steps, predict)
    typer.echo(
        f"{profiled.page}: {steps} steps from step {profiled.step:,}, {percent(profiled.profile.attributed)} of device time attributed"
    )


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Command to run, such as: -- train runs/quickstart.")],
    restarts: Annotated[int, typer.Option(min=0, help="Restarts at most, without progress between them.")] = 10,
    backoff: Annotated[float, typer.Option(min=0, help="Seconds before a restart; doubled each time without progress.")] = 1.0,
) -> None:
    """Run a command of maxlm, and restart it after a crash or a lost host."""
    if not math.isfinite(backoff):
        raise UserError(f"--backoff {backoff} is not a number of seconds: give one such as 5.")
    from maxlm.supervision.launch import Supervisor

    program = python_command("-m", "maxlm", *extensions.arguments(), *command)
    raise typer.Exit(Supervisor(program, restarts=restarts, backoff=backoff, say=lambda line: typer.echo(line, err=True)).run())


@app.command(name="bench-comm")
def bench_comm_(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="Config with the mesh; or mesh.data=2 alone.")
    ] = None,
    operation: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Such as all-reduce; all if not given. Repeatable.")] = None,
    smallest: Annotated[str, typer.Option(metavar="SIZE", help="Size of a device's full buffer; 1KB is 1024 bytes.")] = "1KB",
    largest: Annotated[str | None, typer.Option(metavar="SIZE", help="Each is four times the one before; 1GB, of CPUs 4MB.")] = None,
    during_training: Annotated[bool, typer.Option("--during-training", help="Use of each link while a training step runs.")] = False,
    topology: Topology = None,
    slices: Slices = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Training steps to read counters in, where no machine is named.")] = 20,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write a plot, as a PNG.")] = None,
    devices: Devices = None,
    json_: Json = False,
) -> None:
    """Measure collectives over each axis of a mesh of all hosts, against the bandwidth of its links; or links during training."""
    from maxlm.cluster.environment import split_arguments
    from maxlm.diagnostics.comm.arguments import LARGEST, check_options, choose_operations, size_range

    cluster, rest = split_arguments(arguments or [])
    check_options({name for name in context.params if _is_given(context, name)}, during_training=during_training)
    _split_cpu(devices)
    if during_training:
        raise typer.Exit(_links_during_training(rest, cluster, topology, slices, steps, out, as_json=json_))
    operations, byte_sizes = choose_operations(operation or []), size_range(smallest, largest or LARGEST)
    from maxlm.cost.mesh_links import bus_limit
    from maxlm.diagnostics.comm.bench_command import Request, bench_comm

    request = Request(*Request.mesh_of(rest), tuple(operations), tuple(byte_sizes), out, largest is None)
    raise typer.Exit(bench_comm(request, cluster, bus_limit, as_json=json_))


def _is_given(context: typer.Context, name: str) -> bool:
    """True if the command line has the option `name`."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _links_during_training(
    arguments: list[str], cluster: dict[str, str], topology: str | None, slices: int | None, steps: int, out: Path | None, *, as_json: bool
) -> int:
    """By the schedule for the machine that is named; else, and in a cluster that is, by counters of the links here."""
    from maxlm.diagnostics.comm.arguments import one_config

    name, overrides = one_config(arguments)
    if cluster and (topology is not None or slices is not None):
        raise UserError(f"{next(iter(cluster))}: with --topology or --slices the step is compiled, on one host; leave one of them out.")
    from maxlm.config import load

    if not cluster and (
        topology is not None or slices is not None or load(name, overrides, any_mesh=True, assume=True).config.cluster is not None
    ):
        from maxlm.cost import link_schedule

        return link_schedule.run(name, overrides, topology, slices, out, as_json=as_json)
    from maxlm.diagnostics.comm import during_training

    return during_training.run(load(name, overrides).config, cluster, steps, out, as_json=as_json)


@app.command()
def path(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Such as gcp/maxlm-gcp, slurm/train.sbatch or configs/models.")] = "",
) -> None:
    """Print where a file or folder of maxlm lies: the scripts for clouds and Slurm, and the configs."""
    from maxlm.config.loader import PACKAGE

    place = (PACKAGE / name).resolve()
    if not place.exists() or ".." in Path(name).parts or Path(name).is_absolute():
        raise UserError(f"maxlm has no {shorten(name)}: there are configs, gcp/maxlm-gcp and slurm/train.sbatch.")
    typer.echo(place)


@app.command()
def doctor(
    place: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="With --cluster: coordinator= and the like.")] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Run on every host at once: compare them, and name the slow one.")] = False,
    json_: Json = False,
) -> None:
    """Check devices, versions and disk, with a fix for each problem; or compare the hosts of a cluster."""
    from maxlm.cluster.environment import split_arguments

    named, rest = split_arguments(place or [])
    if rest or (named and not cluster):
        raise UserError(
            f"{(rest or list(named))[0]}: only --cluster takes settings, which are coordinator=, process_count= and process_id=."
        )
    if cluster:
        from maxlm.diagnostics.comm.cluster_doctor import run_cluster_doctor

        raise typer.Exit(run_cluster_doctor(named, as_json=json_))
    from maxlm.diagnostics.doctor import as_text, diagnose

    report = diagnose()
    typer.echo(json.dumps(report.to_json()) if json_ else as_text(report))
    raise typer.Exit(0 if report.healthy else 2)


add_examples(app)


def main() -> None:
    """Run the command line. An error of the input or of storage, or a signal, prints one line and sets the exit code; no traceback."""
    run_app(app)
