"""Compile a config to find its real cost, in a process of its own: the compiler ignores Ctrl-C, but a process can be killed."""

import multiprocessing
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from maxlm.base.errors import UserError, error_kind
from maxlm.compiler.hidden_stderr import Log, write_stderr_to
from maxlm.config.schema import Config
from maxlm.config.workers import end_with_parent, workers_without_signals
from maxlm.hardware.topologies import Topology

if TYPE_CHECKING:
    from maxlm.compiler.aot import CompiledStep
    from maxlm.training.program import Program

POLL_S = 0.2  # longest delay of Ctrl-C


@dataclass(frozen=True)
class Verdict:
    """Cost of a compiled step: bytes of HBM of one device, and seconds as `Estimate.parts`, None if it does not fit."""

    needed: int
    available: int
    parts: tuple[float, ...] | None
    seconds: float  # that the compiler took, when it ran
    cached: bool
    unknown_loops: tuple[str, ...] = ()  # that count once in `parts`, which are too small then

    @property
    def fits(self) -> bool:
        """True if the step fits in the memory of a device."""
        return self.parts is not None

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite when it does not fit."""
        return sum(self.parts) if self.parts else float("inf")

    def whole(self) -> Self:
        """Itself, if its seconds count every loop. Raises UserError if they do not, so that it is not taken for a fast one."""
        if self.unknown_loops:
            from maxlm.cost.step_cost import unknown_loops_line

            raise UserError(unknown_loops_line(self.unknown_loops))
        return self


def verify(config: Config, topology: Topology) -> Verdict:
    """Compile the step of `config`, or read it from the cache. Raises UserError without a compiler."""
    return _compiled(_Request(config, topology))[0]


def _compiled(request: "_Request") -> "tuple[Verdict, CompiledStep]":
    from maxlm.compiler.aot import build, compile_program

    program = build(request.config, request.topology)
    step = compile_program(program, request.topology)
    return _verdict(program, request.topology, step), step


def _verdict(program: "Program", topology: Topology, step: "CompiledStep") -> Verdict:
    from maxlm.cost.step_cost import program_cost
    from maxlm.hlo.parser import read

    parts: tuple[float, ...] | None = None
    loops: tuple[str, ...] = ()
    if step.fits:
        cost = program_cost(program, read(step.text), topology)
        host_s = sum(traffic.exposed_s for traffic in cost.traffic if traffic.link == "host")
        matmul_s = cost.matmul_s + cost.kernel_s  # kernels other than attention are matmuls
        parts = (matmul_s, cost.attention_s, cost.memory_s, cost.exposed_s - host_s, host_s)
        loops = cost.unknown_loops
    return Verdict(step.needed, step.available, parts, step.seconds, step.cached, loops)


class Compiler:
    """`verify` in another process, one at a time, started when it is first needed and ended with the `with` block. What it writes to its
    stderr, which XLA does in plenty, goes to a file, and to the screen only where it fails.

    `machine_code=False`: a step for TPUs is only scheduled, in seconds instead of minutes (`compiler.schedule`). Its memory is what XLA
    allocates, and its matmuls take what others like them do.

    Ctrl-C is remembered within the block: Python drops a KeyboardInterrupt that falls into a finalizer or a callback of its collector.
    """

    def __init__(self, *, machine_code: bool = True) -> None:
        self._machine_code = machine_code

    def __enter__(self) -> Self:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._folder: str | None = None  # that XLA writes a schedule to; it outlives the process, in which XLA writes until the end
        self._stopped = False
        self._handler = signal.signal(signal.SIGINT, self._stop)
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._stopped:  # a second Ctrl-C would lose what the first one kept
            self._stopped = True
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if self._process is not None:
            self._process.kill()
            self._end()

    def __call__(self, config: Config, topology: Topology) -> Verdict:
        """Call `verify`. Raises KeyboardInterrupt at once on Ctrl-C, and UserError as the compiler does or when its process ends: the next
        call starts another.
        """
        verdict = self._ask(_Request(config, topology)).verdict
        assert verdict is not None, "there is no error"
        return verdict

    def step(self, program: "Program", topology: Topology) -> "CompiledStep":
        """The step of `program` itself, which the other process builds again."""
        step = self._ask(_Request(program.config, topology, steps=True)).step
        assert step is not None, "it was asked for"
        return step

    def _ask(self, request: "_Request") -> "_Answer":
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")  # a fork would share the threads that jax has started
            self._line, far = spawn.Pipe()
            self._log = Log()
            process = spawn.Process(target=_serve, args=(far, str(self._log.path)), daemon=True)
            with workers_without_signals():
                process.start()
            far.close()
            self._process = process
        scheduled = not self._machine_code and request.topology.is_tpu
        if self._folder is None and scheduled:
            try:
                self._folder = tempfile.mkdtemp(prefix="maxlm-schedule-")
            except OSError as error:
                raise error_kind(error)(
                    f"XLA writes schedules to TMPDIR, which cannot be written ({error.strerror}): set it to another."
                ) from None
        try:
            self._line.send(replace(request, folder=self._folder if scheduled else None))
            while not self._line.poll(POLL_S):
                if self._stopped:
                    raise KeyboardInterrupt
            answer = self._line.recv()
            if answer.last:
                self._end()
        except (EOFError, OSError):
            log = self._log
            said = log.last_lines()
            sys.stderr.write(said)
            code = self._end(keep_log=bool(said))
            why = f"its last lines are above, all of them in {log.path}" if said else "it wrote no log, and may have run out of memory"
            raise UserError(f"The compiler's process ended with code {code}: {why}.") from None
        if answer.error:
            raise UserError(answer.error)
        assert isinstance(answer, _Answer)
        return answer

    def _end(self, *, keep_log: bool = False) -> int | None:
        """Wait until the process has ended, and return its exit code."""
        assert self._process is not None
        self._process.join()
        code, self._process = self._process.exitcode, None
        if not keep_log:
            self._log.remove()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return code


def step_of(program: "Program", topology: Topology, *, machine_code: bool = False) -> "CompiledStep":
    """The step of `program` as it was kept or as another process compiles it; for TPUs it is only scheduled, unless `machine_code`."""
    from maxlm.compiler.aot import cached_step, prepare
    from maxlm.compiler.schedule import scheduled_step

    whole = machine_code or not topology.is_tpu
    step = cached_step(prepare(program, topology).key) if whole else scheduled_step(program, topology)
    if step is not None:
        return step
    with Compiler(machine_code=machine_code) as compiler:
        return replace(compiler.step(program, topology), cached=False)


@dataclass(frozen=True)
class _Request:
    """`folder`: in which XLA writes a schedule; None where machine code is wanted. `steps`: the step is, too."""

    config: Config
    topology: Topology
    folder: str | None = None
    steps: bool = False


@dataclass(frozen=True)
class _Answer:
    """A verdict and, if asked for, its step, or why there is none. `last`: the process ends itself after it."""

    verdict: Verdict | None = None
    step: "CompiledStep | None" = None
    error: str = ""
    last: bool = False


def _schedule(request: _Request, folder: Path, line: Connection) -> None:
    """Answer with a schedule, and end the process if the compiler runs on."""
    from maxlm.compiler.aot import build
    from maxlm.compiler.schedule import end_process, schedule_program

    program = build(request.config, request.topology)

    def then(step: "CompiledStep | Exception", last: bool) -> None:
        try:
            if isinstance(step, Exception):
                raise step
            answer = _Answer(_verdict(program, request.topology, step), step if request.steps else None, last=last)
        except Exception as error:
            said = str(error) if isinstance(error, UserError) else f"The schedule cannot be read: {error!r}"
            answer = _Answer(error=said, last=last)
        line.send(answer)
        if last:
            end_process()

    empty = tempfile.mkdtemp(dir=folder)  # a step that did not fit has left its files, which are no others'
    schedule_program(program, request.topology, Path(empty), then)


def _serve(line: Connection, log: str) -> None:
    """Answer requests until the other end of the pipe closes; write stderr to the file `log`."""
    write_stderr_to(log)
    folders: set[str] = set()

    def remove() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    end_with_parent(remove)
    from maxlm.compiler.aot import leave_chips_alone

    leave_chips_alone()
    from jax.errors import JaxRuntimeError

    while True:
        try:
            request = line.recv()
        except EOFError:
            return
        try:
            if request.folder is None:
                verdict, step = _compiled(request)
                line.send(_Answer(verdict, step if request.steps else None))
            else:
                folders.add(request.folder)
                _schedule(request, Path(request.folder), line)
        except UserError as error:
            line.send(_Answer(error=str(error)))
        except JaxRuntimeError as error:
            line.send(_Answer(error=f"XLA refuses this program: {str(error).splitlines()[0]}"))
