"""Errors at the boundary of the API: one sentence for the reader of a traceback, as the commands print it."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from maxlm.base.errors import UserError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def plain_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Raise a UserError of `function` without the frames and causes inside maxlm: the input is wrong, and its message says where."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            raise error.with_traceback(None) from None

    return call
