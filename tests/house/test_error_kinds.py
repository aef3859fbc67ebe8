"""A failure of the environment that may pass is never "wrong input": no handler of OSError picks its exit code by itself."""

import ast
import errno
from collections.abc import Iterable, Iterator

import pytest
from source_files import ROOT, SOURCES, nodes_of

from maxlm.base import errors

WRONG_INPUT = {"UserError", "ConfigError", "CheckpointError", "RowError", "DamagedStoreError"}  # exit code 2
MEANT = {  # handler -> why each OSError there is of the input, or of a process that this program has started
    "maxlm/cost/verify.py": "the compiler's process has ended",
    "maxlm/data/rendering.py": "the process of the chat template has ended, at its own limits",
    "maxlm/telemetry/prometheus.py": "a port, at the first start of a run; later ones go on without it",
    "maxlm/telemetry/report/live.py": "a port, on the command line",
}


def names(node: ast.AST | None) -> set[str]:
    return {getattr(inner, "id", getattr(inner, "attr", "")) for inner in ast.walk(node)} if node is not None else {"Exception"}


def careless(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of handlers that may catch any OSError and make it an error of the input, whatever it is."""
    for node in nodes:
        if isinstance(node, ast.ExceptHandler):
            body = ast.Module(node.body, [])
            takes = "OSError" in names(node.type) or (names(node.type) & {"Exception", "BaseException"} and "OSError" in names(body))
            made = {getattr(call.func, "id", getattr(call.func, "attr", "")) for call in ast.walk(body) if isinstance(call, ast.Call)}
            if takes and made & WRONG_INPUT:
                yield node.lineno


def test_no_handler_makes_every_failure_of_the_system_a_wrong_input():
    found = {str(path.relative_to(ROOT)) for path in SOURCES if [*careless(nodes_of(path))]}
    product = {name for name in found if not name.startswith("tools/")}  # which nothing restarts
    assert product == MEANT.keys(), "use errors.as_user_error, error_kind or setting_error"


@pytest.mark.parametrize(
    "planted",
    [
        "try:\n    f()\nexcept OSError as e:\n    raise UserError(str(e))",
        "try:\n    f()\nexcept (ValueError, OSError) as e:\n    raise ConfigError('a', 1, str(e), 'b') from e",
        "try:\n    f()\nexcept Exception as e:\n    if isinstance(e, OSError):\n        raise errors.UserError(str(e))",
    ],
)
def test_a_planted_one_is_found(planted):
    assert [*careless(ast.walk(ast.parse(planted)))] == [3]


def test_one_rule_for_every_error_of_the_system():
    """What may pass ends with 7 in each form of the message, and a wrong path with 2."""
    passing = [
        "ENOSPC",
        "EDQUOT",
        "EIO",
        "ESTALE",
        "EAGAIN",
        "ENOMEM",
        "ETIMEDOUT",
        "EMFILE",
        "ENFILE",
        "ENOLCK",
        "ECONNRESET",
        "EINTR",
        "EBUSY",
    ]
    wrong = ["ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ELOOP", "EEXIST", "ENOTEMPTY", "EINVAL", "ENOSYS"]
    for number, name in errno.errorcode.items():
        error = OSError(number, "reason", "place")
        made = [errors.as_user_error(error), errors.error_kind(error)("message"), errors.setting_error(error)("field", 1, "rule", "fix")]
        codes = {one.exit_code for one in made}
        assert len(codes) == 1, name
        assert name not in passing or codes == {errors.ExitCode.UNAVAILABLE}, name
        assert name not in wrong or codes == {errors.ExitCode.WRONG_INPUT}, name
        assert isinstance(made[2], errors.ConfigError)
