"""Only what we print goes to stdout."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_ours() -> Iterator[None]:
    """Meanwhile what libraries write to stdout goes to stderr (gloo says there whom it has reached); nothing of ours may be written."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
