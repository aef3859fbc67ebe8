"""Render chat templates in a process with limits of time and memory: a template may loop for ever, or build a text without end."""

import contextlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from maxlm.config.errors import UserError
from maxlm.data.chat_template import ChatTemplate, Message, Rendered, Renderer, TemplateError, one_line
from maxlm.data.workers import end_with_parent, workers_without_signals

SECONDS = 10.0  # for one conversation
START_SECONDS = 120.0  # until the process answers for the first time
MEMORY = 2**30  # bytes beyond those of the interpreter


class RenderingProcess:
    """Renders conversations, one at a time, in a process that is started by the first of them."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._running: tuple[Any, Connection] | None = None

    def __call__(self, messages: Sequence[Message], first: int = 0, tools: Any = None) -> Rendered:
        """As `Renderer.render`. Raises UserError if the template fails or exceeds a limit; the process has ended then."""
        connection = self._started()
        try:
            connection.send((list(messages), first, tools))
            if not connection.poll(SECONDS):
                raise UserError(f"the chat template takes more than {SECONDS:g} s for one conversation.")
            answer = connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise UserError(f"the chat template needs more than {MEMORY >> 20} MiB of memory, or ended its process.") from error
        except RecursionError:
            raise UserError("the conversation nests lists and objects too deeply to be sent to the chat template.") from None
        except UserError:
            self.close()
            raise
        if isinstance(answer, str):
            self.close()
            raise UserError(f"the chat template {answer}.")
        return Rendered(*answer)

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
    """Answer every request with (text, spans), or with an error as text."""
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
            messages, first, tools = connection.recv()
            try:
                renderer = renderer or Renderer(template)
                answer: Any = tuple(renderer.render(messages, first, tools))
            except TemplateError as error:
                answer = str(error)
            except MemoryError:
                answer = f"needs more than {MEMORY >> 20} MiB of memory"
            except Exception as error:  # a process that ends is reported as one short of memory
                answer = f"fails: {one_line(error)}"
            connection.send(answer)
