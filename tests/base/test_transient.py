"""Errors of a storage that may work again are told from those of its content, for every kind that its clients raise."""

import errno
import gzip

import pytest

from maxlm.base.transient import is_storage_error, is_transient


def raised_in(module: str, text: str, *kinds: type[Exception]) -> Exception:
    """The error that `raise {text}` gives in a module of this name, which need not be installed."""
    try:
        exec(compile(f"raise {text}", module, "exec"), {"__name__": module, **{kind.__name__: kind for kind in kinds}})
    except Exception as error:
        return error
    raise AssertionError(text)


class HttpError(Exception):
    """As gcsfs raises it."""

    __module__ = "gcsfs.retry"


class ProxyError(OSError):
    """As requests raises it: an OSError without an errno."""

    __module__ = "requests.exceptions"


TRANSIENT = [
    HttpError("401"),
    ProxyError(),
    PermissionError("no access"),
    ConnectionError("no route"),
    ConnectionResetError("reset by peer"),
    raised_in("gcsfs.retry", "OSError('Forbidden: https://storage\\nThe billing account is disabled')"),
    raised_in("gcsfs.retry", "ValueError('Bad Request: https://storage\\ninvalid argument')"),
    raised_in("gcsfs.core", "RuntimeError('Loop is not running')"),
    raised_in("gcsfs.credentials", "KeyError('access_token')"),
    RuntimeError("Event loop is closed"),
    OSError(errno.EIO, "Input/output error"),
    # TensorStore 0.1.86 gave these for a server that answered with these codes, and for replies that ended early or were garbage.
    ValueError("UNKNOWN: Too Early [HTTP code 425] [http_response_body='abc']"),
    ValueError("UNKNOWN: Unknown [HTTP code 520] [http_response_body='abc']"),
    NotImplementedError("Not Implemented [HTTP code 501] [http_response_body='abc']"),
    ValueError("PERMISSION_DENIED: Forbidden [HTTP code 403] [http_response_body='abc']"),
    ValueError("ABORTED: All 1 retry attempts failed: CURL error Could not connect to server [curl_code='7']"),
    ValueError("UNKNOWN: CURL error Unrecognized or bad HTTP Content or Transfer-Encoding: incorrect header check [curl_code='61']"),
    ValueError("INTERNAL: CURLM error Out of memory [curlm_code='3']"),
    # Versions before wrote them so.
    ValueError("UNKNOWN: CURL error[16] Error in the HTTP2 framing layer"),
    ValueError("UNKNOWN: HTTP response code: 507 with body: full"),
]
LASTING = [
    FileNotFoundError("gs://bucket/a"),
    raised_in("gcsfs.retry", "FileNotFoundError('gs://bucket/a')"),
    raised_in("gcsfs.retry", "FileExistsError('gs://bucket/a')"),
    NotADirectoryError(errno.ENOTDIR, "Not a directory"),
    ValueError("NOT_FOUND: Gone [HTTP code 410]"),
    ValueError("OUT_OF_RANGE: Range Not Satisfiable [HTTP code 416]"),
    ValueError("Bad Request [HTTP code 400]"),
    ValueError("DATA_LOSS: CRC32C checksum mismatch"),
    RuntimeError("our own bug"),
    gzip.BadGzipFile("Not a gzipped file"),  # readers of compressed files raise an OSError without an errno for what is in them
    OSError("Corrupt snappy compressed data."),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=str)
def test_what_may_pass_is_transient(error):
    assert is_transient(error) and is_storage_error(error)
    wrapped = ValueError("cannot read")
    wrapped.__cause__ = error
    assert is_transient(wrapped)


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_what_lasts_is_not(error):
    assert not is_transient(error)
    assert is_storage_error(error) == isinstance(error, OSError)
