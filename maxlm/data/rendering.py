"""Render chat templates in a process with limits of time and memory: a template may loop for ever, or build a text without end."""

import contextlib
import multiprocessing
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from maxlm.base.errors import UserError
from maxlm.config.workers import end_with_parent, workers_without_signals
from maxlm.data.chat_template import ChatTemplate, Conversation, Rendered, Renderer, TemplateError, one_line
from maxlm.data.messages import RowError

SECONDS = 10.0  # for one conversation
START_SECONDS = 120.0  # until the process answers for the first time
MEMORY = 2**30  # bytes beyond the interpreter's own


class RenderingProcess:
    """Renders conversations, one at a time, in a process that is started by the first of them."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._running: tuple[Any, Connection] | None = None

    def __call__(self, conversation: Conversation, last: bool = False) -> Rendered:
        """As `Renderer.render`. Raises RowError if the template fails on this conversation, UserError if it exceeds a limit or does not
        compile.
        """
        return Rendered(*self._ask("render", conversation, last))

    def prompt(self, conversation: Conversation) -> str:
        """As `Renderer.prompt`. Raises as `__call__`."""
        return str(self._ask("prompt", conversation))

    def _ask(self, *request: Any) -> Any:
        connection = self._started()
        try:
            connection.send(request)
            if not connection.poll(SECONDS):
                raise UserError(f"the chat template takes more than {SECONDS:g} s for one conversation.")
            answer, problem, of_row = connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise UserError(f"the chat template needs more than {MEMORY >> 20} MiB of memory, or ended its process.") from error
        except RecursionError:
            raise RowError("the conversation nests lists and objects too deeply to be sent to the chat template.") from None
        except UserError:
            self.close()
            raise
        if problem is not None and not of_row:
            self.close()
        if problem is not None:
            raise (RowError if of_row else UserError)(f"the chat template {problem}.")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._running is not None:
            (process, connection), self._running = self._running, None
            process.kill()
            process.join()
            connection.close()

    def _started(self) -> Connection:
        if self._running is None:
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(self._template, there), name="maxlm-template", daemon=True)
            with workers_without_signals():
                process.start()
            there.close()
            self._running = process, here
            if not here.poll(START_SECONDS) or here.recv() is not None:
                self.close()
                raise UserError("the process for the chat template does not start; is the machine short of memory?")
        return self._running[1]


def _serve(template: ChatTemplate, connection: Connection) -> None:
    """Answer every request with (its result, the error or None, True if the row is at fault and not the template)."""
    end_with_parent()
    # A parent that exits ends its processes by SIGTERM and waits for them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    connection.send(None)
    renderer: Renderer | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, *arguments = connection.recv()
            answer, problem = None, None
            try:
                renderer = renderer or Renderer(template)
                answer = getattr(renderer, method)(*arguments)
            except TemplateError as error:
                problem = str(error)
            except MemoryError:
                problem, renderer = f"needs more than {MEMORY >> 20} MiB of memory", None
            except Exception as error:  # a process that ends is reported as one short of memory
                problem, renderer = f"fails: {one_line(error)}", None
            connection.send((answer, problem, renderer is not None))
