"""The process around a command: arguments that are text, one line for an error, and the exit code."""

import os
import sys
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import typer
from pydantic import BaseModel

from maxlm.base.errors import WRONG_PATH, ExitCode, UserError, as_user_error, shorten
from maxlm.base.transient import is_transient
from maxlm.cluster import progress_file
from maxlm.config import extensions

CTRL_C = 130  # exit code of typer after it


def run_app(app: typer.Typer) -> NoReturn:
    """Run a command of `app` and exit. An error of the input or of storage, or a signal, prints one line; no traceback."""
    try:
        code = _run(app)
    except (UserError, typer.TyperException) as error:  # typer's are mistakes in the command itself
        message = str(error if isinstance(error, UserError) else UserError(_as_setting(error) or error.format_message()))
        _end(message, getattr(error, "exit_code", ExitCode.WRONG_INPUT))
    except KeyboardInterrupt:
        code = CTRL_C  # `__main__` prints which signal it was, and ends with STOPPED
    except BrokenPipeError:
        _close_output()
        _end("the program that read this output has ended.", ExitCode.STOPPED)
    except OSError as error:
        if error.errno not in WRONG_PATH and not is_transient(error):
            raise
        _close_output()
        _end(str(as_user_error(error)), as_user_error(error).exit_code)
    sys.exit(code)


def _run(app: typer.Typer) -> int | None:
    """Run the command and flush its output; return its exit code."""
    for argument in sys.argv[1:]:
        if any("\udc80" <= char <= "\udcff" for char in argument):  # surrogates: bytes that are no UTF-8
            raise UserError(f"{shorten(argument)} on the command line is not UTF-8 text: rename it, or type it again.")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows no such letter
    try:
        code: int | None = app(args=extensions.options_first(sys.argv[1:]), standalone_mode=False)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # raised by typer
            raise ended.__context__ from None
        raise
    sys.stdout.flush()
    return code


def _as_setting(error: Exception) -> str:
    """Message for an unknown option of a command that takes settings, as `--steps 5`; "" for any other error."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not isinstance(option, str) or context is None or "overrides" not in {param.name for param in context.command.params}:
        return ""
    keys = settings_named(option.lstrip("-").replace("-", "_"))
    if not keys:
        options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        if near := get_close_matches(option, options, n=1, cutoff=0.75):
            return f"there is no option {option}; the nearest is {near[0]}."
        return f"there is no option {option}; settings of the config are key=value, without dashes, such as train.steps=100."
    settings = " or ".join(f"{key}={_value_of(option)}" for key in keys[:3])
    return f"there is no option {option}: use {settings}, a setting of the config."


def settings_named(name: str) -> list[str]:
    """Dotted keys of settings by their last part: `name` itself or, as optimizer.peak_lr for lr, its words. Sections that every run has
    come before optional ones, and outer ones before inner ones.
    """
    from maxlm.config.explain import section_of
    from maxlm.config.schema import Config

    def keys(section: type[BaseModel], prefix: str, optional: int) -> list[tuple[int, int, str]]:
        found = []
        for field, info in section.model_fields.items():
            inner = section_of(info, {}) if len(prefix) < 40 else None
            rank = max(optional, int(inner is not None and info.default is None))
            found += [(rank, prefix.count("."), f"{prefix}{field}")] if inner is None else keys(inner, f"{prefix}{field}.", rank)
        return found

    words = set(name.split("_"))
    ranked: dict[tuple[int, int, int], list[str]] = {}
    for optional, depth, key in keys(Config, "", 0):
        last = key.rpartition(".")[2]
        if name in (key, last) or words <= set(last.split("_")):
            ranked.setdefault((optional, int(name not in (key, last)), depth), []).append(key)
    return ranked[min(ranked)] if ranked else []


def weights_kind(kind: str, run: Path) -> str:
    """Return `kind` if the run in the folder `run` may have such weights, of which its extensions register some. Raises UserError."""
    from maxlm.config.loader import RUN_CONFIG, load_saved
    from maxlm.config.table import weights_kinds
    from maxlm.hardware.topologies import either

    if kind not in weights_kinds() and (run / RUN_CONFIG).is_file():
        load_saved(run)  # and its extensions
    if kind not in weights_kinds():
        raise UserError(f"--weights {kind} is no kind of weights: use {either(weights_kinds())}.")
    return kind


def _value_of(option: str) -> str:
    """The value that the command line gives `option`; VALUE if it gives none."""
    for argument, following in zip(sys.argv, [*sys.argv[1:], "-"], strict=True):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option and not following.startswith("-"):
            return following
    return "VALUE"


def _end(message: str, code: int) -> NoReturn:
    if message:  # a command without arguments has printed its help instead
        progress_file.record_error(message)
        typer.echo(f"maxlm: {message}", err=True)
    sys.exit(code)


def _close_output() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
