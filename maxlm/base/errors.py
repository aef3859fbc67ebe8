"""Errors that the command line prints as one line, and the exit codes of a process."""

import contextlib
import errno
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

Problem = tuple[str, Any, str, str]  # a broken rule: field, value, rule, fix

SHOWN = 80  # characters of a value that fit in a line
NAME = 240  # characters of a name or path: a path is copied from the line, so it is cut only where it would fill the message
LONGEST = 1000  # characters of a message
BITS = 256  # of a whole number that is written out
WRONG_PATH = (  # errors of the operating system that the same path would meet again; all others may pass
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.EILSEQ, errno.ENXIO, errno.ENODEV, errno.ENOSYS),
    *(errno.ENOTSUP, errno.EXDEV, errno.EBADF),
)


class ExitCode(IntEnum):
    """Exit codes of a process. A supervisor starts a run again after 1, 5, 6 and 7, with a limit, and not after 0, 2 and 4."""

    DONE = 0
    """The command did all that was asked."""
    CRASHED = 1
    """A bug of maxlm or of a library; a traceback was printed."""
    WRONG_INPUT = 2
    """The input is wrong: a setting, a file or an option. The same input would fail again; one line says what to change."""
    STOPPED = 3
    """A signal ended the command after a save: preemption, a scheduler or Ctrl-C. The same command goes on from there."""
    UNHEALTHY = 4
    """Training is beyond repair and was stopped; training again from the same place would fail again."""
    HUNG = 5
    """Something did not end within its limit; the stacks of all threads were printed."""
    HOST_LOST = 6
    """Another host is lost, did not come or computes wrongly; it is named."""
    UNAVAILABLE = 7
    """Storage, a credential or another service failed in a way that may pass."""


def printable(text: str) -> str:
    """`text` with all characters that are not printable, such as escape, written out."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shell_command(*words: str) -> str:
    """Join words to one line for a POSIX shell; a word with control characters is quoted as `$'...'`, with its bytes as escapes."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_escaped, word))}'" for word in words)


def _escaped(char: str) -> str:
    """A character within `$'...'`."""
    return char if char.isprintable() and char not in "'\\" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


class UserError(Exception):
    """The user's input cannot be honoured. `str(error)` is one printable line somebody can act on."""

    exit_code = ExitCode.WRONG_INPUT

    def __init__(self, message: str) -> None:
        text = printable(" ".join(message[: 8 * LONGEST].split()))
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - 304]} ... {text[-299:]}")


class MissingError(UserError):
    """Something that the input names is not there."""


class UnavailableError(UserError):
    """Something outside this program failed in a way that may pass: starting again may help, another input would not."""

    exit_code = ExitCode.UNAVAILABLE


def error_kind(error: BaseException) -> type[UserError]:
    """Kind of the message about `error`, raised while something was read or written: UnavailableError for a fault of the environment that
    may pass (a full disk, no memory, no descriptors, a network file system), UserError for a wrong path and for damaged content.
    """
    if isinstance(error, TimeoutError | ConnectionError):
        return UnavailableError
    passes = isinstance(error, OSError) and error.errno is not None and error.errno not in WRONG_PATH
    return UnavailableError if passes else UserError


def as_user_error(error: UserError | OSError) -> UserError:
    """`error` itself, or one line for what the operating system refused: a path that is wrong, or a fault of storage that may pass."""
    if isinstance(error, UserError):
        return error
    kind = UnavailableError if error.errno is None else error_kind(error)
    return kind(f"{shorten(str(error.filename or 'the output'))}: cannot be read or written: {error.strerror or error}.")


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise as `as_user_error` what the operating system refuses in the block."""
    try:
        yield
    except OSError as error:
        raise as_user_error(error) from error


class ConfigError(UserError):
    """A value of a field breaks a rule: says field, value, rule and fix."""

    def __init__(self, field: str, value: Any, rule: str, fix: str, source: str = "") -> None:
        self.field = field
        origin = f" (from {shorten(source)})" if source else ""
        super().__init__(f"{shorten(field)} = {show(value)}{origin}: {rule}; {fix}.")


class UnknownSettingError(ConfigError):
    """A field that no section has."""


class UnavailableSettingError(ConfigError, UnavailableError):
    """A field that names something which failed in a way that may pass: a run that ended so is started again."""


def setting_error(error: BaseException) -> type[ConfigError]:
    """`error_kind` for a message that names a field."""
    return UnavailableSettingError if issubclass(error_kind(error), UnavailableError) else ConfigError


def show(value: Any) -> str:
    """`value` as it would be typed in YAML, shortened to fit in a line."""
    text = _flow(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def shorten(name: str) -> str:
    """A key, a name or a path, or its beginning and end where it is longer than fits in a line."""
    return name if len(name) <= NAME else f"{name[: NAME - 123]}...{name[-120:]}"


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first of these names, and the number of others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f", and {more} more" if more > 0 else "")


def quoted(name: str) -> str:
    """A name from outside in quotes, on one printable line: for a comment, from which a line break would lead into settings."""
    return repr(shorten(name))


def _flow(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):  # quoted where YAML would read something else
        plain = value.strip() == value != "" and value.lower() not in ("null", "~", "true", "false") and not is_number(value)
        return value if plain else repr(value)
    if isinstance(value, int) and value.bit_length() > BITS:
        return f"{'-' if value < 0 else ''}0x{abs(value) >> (value.bit_length() - BITS):x}..."  # Python writes no number of 5,000 digits
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    return str(value)


def is_number(text: str) -> bool:
    """True if Python reads `text` as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
