"""`maxlm.compile_step` and `maxlm.plan`: memory and time of a step on a machine that is not here, with the figures of the commands."""

import contextlib
import html
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from maxlm.api.configs import Source, checked, config_source
from maxlm.api.errors import plain_errors
from maxlm.api.table import Table
from maxlm.base.atomic import write_text
from maxlm.base.console import Console
from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import user_path
from maxlm.cluster.accelerators import any_device_file, find_accelerators
from maxlm.compiler.aot import leave_chips_alone
from maxlm.config.loader import dump
from maxlm.config.schema import Config
from maxlm.cost.compile_command import LOG_WIDTH, load_to_compile, progress
from maxlm.cost.compile_report import Report, examine, show
from maxlm.planning.plan import Plan as Found
from maxlm.planning.plan_command import Request, find_plan, opened
from maxlm.planning.plan_output import show as show_plan, to_json
from maxlm.planning.price_file import read_prices
from maxlm.planning.run_cost import Wanted


class Expected(NamedTuple):
    """A figure for the lowest, the middle and the highest time of a step, in a range in which nine of ten published runs lie: with the low
    time goes the high rate.
    """

    low: float
    middle: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class StepReport:
    """The compiled step of a config on a machine. `print(report)` shows what `maxlm compile` prints; `to_dict()` is its `--json`."""

    _report: Report

    @property
    def config(self) -> Config:
        """The config, with the machine."""
        return self._report.config

    @property
    def topology(self) -> str:
        """Name of the machine."""
        return self._report.topology.name

    @property
    def fits(self) -> bool:
        """True if the step fits into the memory of a device."""
        return self._report.step.fits

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory that a device needs."""
        return self._report.step.needed

    @property
    def available_bytes(self) -> int:
        """Bytes of memory that a program may use on a device."""
        return self._report.step.available

    @property
    def memory(self) -> Table:
        """Bytes of a device by group and name, which sum to `needed_bytes`."""
        return Table(self.to_dict()["hbm"]["parts"])

    @property
    def step_s(self) -> Expected | None:
        """Seconds of a step; None if it does not fit."""
        return self._expected("expected_step_s")

    @property
    def mfu(self) -> Expected | None:
        """Model FLOPs over the peak of the devices, 0 to 1; None if it does not fit."""
        return self._expected("expected_mfu")

    @property
    def tokens_per_s(self) -> Expected | None:
        """Tokens a second of all devices; None if it does not fit."""
        return self._expected("expected_tokens_per_s")

    @property
    def communication(self) -> Table:
        """Collectives, a row each, with mesh axes, bytes, seconds and what of them is not hidden behind compute."""
        return Table(self.to_dict()["communication"])

    @property
    def warnings(self) -> list[str]:
        """Sentences on unusual figures, or on the reason why the step does not fit."""
        return list(self._report.remarks)

    @property
    def would_fit(self) -> list[dict[str, Any]]:
        """Settings with which a step that does not fit would, each checked by compiling."""
        return [dict(way.settings) for way in self._report.suggestions]

    @property
    def hlo(self) -> str:
        """The scheduled program of XLA; "" if it does not fit."""
        return self._report.step.text

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values: the JSON of `maxlm compile --json`."""
        return self._dict

    @cached_property
    def _dict(self) -> dict[str, Any]:
        return self._report.to_json()

    def _expected(self, name: str) -> Expected | None:
        return _expected(self.to_dict()["time"], name)

    def __str__(self) -> str:
        return _printed(lambda console: show(self._report, console))

    def __repr__(self) -> str:
        return f"StepReport({self.config.run.name!r} on {self.topology}, {'fits' if self.fits else 'does not fit'})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Layouts of a config on a machine. `print(plan)` shows what `maxlm plan` prints; `to_dict()` is its `--json`."""

    _plan: Found
    _wanted: Wanted

    @property
    def fits(self) -> bool:
        """True if a layout fits."""
        return self._plan.picked is not None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the chosen layout, by dotted key; {} if none fits."""
        chosen = self.to_dict()["chosen"]
        return {} if chosen is None else dict(chosen["settings"])

    @property
    def config(self) -> Config:
        """The config in the chosen layout, for `compile_step` and `fit`. Raises UserError if none fits."""
        if self._plan.picked is None:
            raise UserError("no layout fits: print the plan, which says why.")
        return self._plan.picked.layout.apply(self._plan.loaded.config)

    @property
    def step_s(self) -> Expected | None:
        """Seconds of a step in the chosen layout; None if none fits."""
        return _expected(self.to_dict()["chosen"], "expected_step_s")

    @property
    def mfu(self) -> Expected | None:
        """Model FLOPs over the peak of the devices, 0 to 1; None if none fits."""
        return _expected(self.to_dict()["chosen"], "expected_mfu")

    @property
    def tokens_per_s(self) -> Expected | None:
        """Tokens a second of all devices; None if none fits."""
        return _expected(self.to_dict()["chosen"], "expected_tokens_per_s")

    @property
    def layouts(self) -> Table:
        """Layouts that were looked at closely, a row each: expected times, `needed_bytes`, `compiled`, `fits`, `frontier`, `settings`."""
        return Table(self.to_dict()["frontier"])

    @property
    def cost(self) -> dict[str, Any] | None:
        """Time, price and energy of the whole run; None if none fits."""
        cost: dict[str, Any] | None = self.to_dict()["cost"]
        return cost

    @plain_errors
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config in the chosen layout, which `maxlm train` and `load_config` read."""
        try:
            write_text(user_path(os.fspath(path)), dump(self.config))
        except OSError as error:
            raise error_kind(error)(f"{path} cannot be written: {error.strerror}.") from None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values: the JSON of `maxlm plan --json`."""
        return self._dict

    @cached_property
    def _dict(self) -> dict[str, Any]:
        return to_json(self._plan, None, self._wanted)

    def __str__(self) -> str:
        return _printed(lambda console: show_plan(self._plan, None, self._wanted, console))

    def __repr__(self) -> str:
        chosen = ", ".join(f"{key}={value}" for key, value in self.settings.items() if key.startswith("mesh."))
        return f"Plan({self._plan.loaded.config.run.name!r} on {self._plan.topology.name}, {chosen or 'no layout fits'})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@plain_errors
def compile_step(
    config: Source,
    *overrides: str,
    topology: str | None = None,
    slices: int | None = None,
    machine_code: bool = False,
    quiet: bool = True,
) -> StepReport:
    """Compile the training step of a config for a machine that is not here, as `maxlm compile` does.

    Args:
        config: a config, or its name; of a model alone, data and batch are assumed.
        overrides: settings over it.
        topology: the machine, such as "v5p:4x4x4", "v5p-128" or "h100x16"; None: the config's own.
        slices: number of slices.
        machine_code: for TPUs, make it too: minutes instead of seconds.
        quiet: show no progress.

    Raises UserError: the config names no machine, its mesh does not match, or the compiler is missing.
    """
    loaded, machine = load_to_compile(config_source(config), checked(overrides), topology, slices)
    with _without_chips(), progress(quiet=quiet) as show_progress:
        return StepReport(examine(loaded.config, machine, show_progress, machine_code=machine_code))


@plain_errors
def plan(
    config: Source,
    *overrides: str,
    topology: str | None = None,
    slices: int | None = None,
    tokens: float | None = None,
    quick: bool = False,
    any_format: bool = False,
    prices: str | None = None,
    quiet: bool = True,
) -> Plan:
    """Find the fastest mesh, microbatches and remat policy for a machine that is not here, as `maxlm plan` does. Nothing is written.

    Args:
        config: a config, or its name.
        overrides: settings over it.
        topology: the machine, such as "v5p:4x4x4", "v5p-128" or "h100x16"; None: the config's own.
        slices: number of slices.
        tokens: length of the run; None: the config's.
        quick: compile a few layouts only, in seconds to a minute for a small model.
        any_format: choose the format of the matmuls as well.
        prices: a file of prices; None: list prices.
        quiet: show no progress.

    Raises UserError: the config names no machine, or no layout can fit it.
    """
    source, wanted = config_source(config), Wanted(read_prices(prices))
    name = source if isinstance(source, str) else "the config"
    given = None if isinstance(source, str) else source
    request = Request(
        name, checked(overrides), topology, slices, tokens, None, wanted, any_format, prices=prices, quick=quick, source=given, quiet=quiet
    )
    loaded, machine = opened(request)
    with _without_chips():
        return Plan(find_plan(request, loaded, machine), wanted)


@contextlib.contextmanager
def _without_chips() -> Iterator[None]:
    """Compile without claiming accelerators, and leave the process as it was: its own devices are found first, if it has any."""
    import jax

    variables, platforms = dict(os.environ), jax.config.jax_platforms  # type: ignore[attr-defined]
    if any_device_file() or find_accelerators():
        jax.devices()
    leave_chips_alone()
    try:
        yield
    finally:
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update(variables)
        jax.config.update("jax_platforms", platforms)


def _expected(figures: dict[str, Any] | None, name: str) -> Expected | None:
    found = None if figures is None else figures[name]
    return None if found is None else Expected(found["low"], found["middle"], found["high"])


def _printed(write: Callable[[Console], None]) -> str:
    text = io.StringIO()
    write(Console(file=text, highlight=False, soft_wrap=True, width=LOG_WIDTH, force_jupyter=False))
    return text.getvalue().rstrip()
