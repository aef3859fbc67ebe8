"""Transient failures: the medium, the network or a credential failed, not the bytes, so that trying again may help."""

import errno
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from maxlm.base.errors import ExitCode, UserError

Result = TypeVar("Result")

RETRY_DELAYS_S: tuple[float, ...] = (1.0, 3.0, 8.0, 18.0)  # between five tries: half a minute in all

_log = logging.getLogger(__name__)

# Errors of the operating system about stored content (absent, of another kind), not about the medium or permissions.
_OF_CONTENT = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.EILSEQ,
    errno.EOVERFLOW,
    errno.EFBIG,
    errno.EBADF,
}
# Canonical status names of TensorStore, gRPC and XLA. DATA_LOSS, NOT_FOUND, INVALID_ARGUMENT and others are about the content.
_STATUS = re.compile(r"\b(PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|CANCELLED|ABORTED)\b")
_OUT_OF_MEMORY = re.compile(r"out of memory|RESOURCE_EXHAUSTED.*allocat", re.IGNORECASE | re.DOTALL)
_OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")  # how TensorStore passes an errno on
# Of a connection, of libcurl's event handling, and of a client after another thread has closed its event loop. TensorStore calls most of
# them UNKNOWN or INTERNAL.
_CONNECTION = re.compile(r"\bCURLM? error\b|Event loop is closed")
_HTTP = re.compile(r"\[HTTP code (\d+)\]|HTTP response code: (\d+)")  # TensorStore from 0.1.7x on, and before
_PASSING_HTTP = {401, 403, 407, 408, 409, 425, 429, 499}  # and all from 500 on
_NETWORK = ("google.auth.", "google.api_core.", "requests.", "urllib3.", "aiohttp.", "grpc.", "gcsfs.", "botocore.", "httpx")
_NOT_FOUND = ("NotFound", "FileNotFoundError")
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)  # clients of buckets raise them without an errno


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error`, or its cause, is that a device or the host has no room. XLA gives it the status that servers give to those who ask
    too often.
    """
    return any(_is_out_of_memory(cause) for cause in _chain(error))


def is_transient(error: BaseException) -> bool:
    """True if `error`, or its cause, is a failure of the medium, the network, a credential or a permission."""
    return not is_out_of_memory(error) and any(_is_transient(cause) for cause in _chain(error))


def is_storage_error(error: BaseException) -> bool:
    """True if `error` says that something could not be read or written, whether that may pass or not; False for damage and for our bugs."""
    return isinstance(error, OSError) or is_transient(error)


def retried(read: Callable[[], Result], what: str) -> Result:
    """`read()`, retried after RETRY_DELAYS_S while its errors are transient; logged once. Raises its last error."""
    for number, delay_s in enumerate(RETRY_DELAYS_S):
        try:
            return read()
        except Exception as error:
            if not is_transient(error):
                raise
            if number == 0:
                total_s = sum(RETRY_DELAYS_S)
                _log.warning("%s failed and is tried again for %.0f s: %s", what, total_s, first_line(error))
        time.sleep(delay_s)
    return read()


def first_line(error: BaseException) -> str:
    """The kind of an error and the start of its message, short enough for one line."""
    text = message_line(error) if str(error).strip() else ""
    return f"{type(error).__name__}: {text.strip()[:240]}".rstrip(": .")


def message_line(error: BaseException) -> str:
    """The first line of an error's message; its kind if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, its parts if it is a group, and what it was raised from."""
    seen: set[int] = set()
    left = [error]
    while left:
        current = left.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        left += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
        left += current.exceptions if isinstance(current, BaseExceptionGroup) else ()


def _is_out_of_memory(error: BaseException) -> bool:
    of_jax = any(kind.__name__ == "JaxRuntimeError" for kind in type(error).__mro__)  # TensorStore's are of other kinds
    return isinstance(error, MemoryError) or (of_jax and _OUT_OF_MEMORY.search(str(error)) is not None)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, UserError):
        return error.exit_code == ExitCode.UNAVAILABLE
    code = _OS_ERROR_CODE.search(str(error))
    if code is not None:
        return int(code[1]) not in _OF_CONTENT
    if isinstance(error, TimeoutError | ConnectionError | PermissionError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _OF_CONTENT
    if isinstance(error, ABSENT) or type(error).__name__ in _NOT_FOUND:
        return False
    text = str(error)
    if _of_client(error) or _CONNECTION.search(text) or _STATUS.search(text[:400]):
        return True
    http = _HTTP.search(text)
    return http is not None and ((code_of := int(http[1] or http[2])) >= 500 or code_of in _PASSING_HTTP)


def _of_client(error: BaseException) -> bool:
    """True if it is of a client's own kind, or was raised in its code: gcsfs raises OSError, ValueError and RuntimeError for what a server
    refuses.
    """
    modules = [kind.__module__ for kind in type(error).__mro__]
    modules += [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(f"{module}.".startswith(_NETWORK) for module in modules)
