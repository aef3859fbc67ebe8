"""Steps that several processes take together: if one fails, all raise the same error."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from maxlm.config.errors import UserError, as_user_error

T = TypeVar("T")
# Compare facts, name -> value, and raise a problem of one process in all: `maxlm.runtime.consistency.require_equal`.
Agree = Callable[[Mapping[str, str], UserError | None], None]


def alone(facts: Mapping[str, str], problem: UserError | None = None) -> None:
    """The agreement of one process with itself."""
    if problem is not None:
        raise problem


def on_all(agree: Agree, do: Callable[[], T], facts: Callable[[T], Mapping[str, str]] = lambda result: {}) -> T:
    """The result of `do` here, if it succeeds in all processes and `facts` of it are the same. Raises UserError in all alike, also where
    storage failed in one.
    """
    try:
        result = do()
    except UserError as error:
        agree({}, error)
        raise
    except OSError as error:
        agree({}, as_user_error(error))
        raise
    agree(facts(result), None)
    return result
