"""Recording: a trace that cannot be written is one line, and the next one is recorded nevertheless."""

import jax.numpy as jnp
import pytest

from maxlm.base.errors import UserError
from maxlm.telemetry.profile import PAGE, TRACE, VIEWER_FILE
from maxlm.telemetry.profile.record import abandon_trace, start_trace, stop_trace


def test_after_a_trace_that_could_not_be_written_comes_the_next(tmp_path):
    start_trace(tmp_path / "1")
    (tmp_path / "1" / "raw").write_text("a file where a folder belongs, which fails as a full disk does")
    with pytest.raises(UserError, match="the trace cannot be written") as raised:
        stop_trace(tmp_path / "1")
    assert "\n" not in str(raised.value)
    (tmp_path / "1" / "raw").unlink()
    start_trace(tmp_path / "2")
    jnp.ones(3).block_until_ready()
    assert stop_trace(tmp_path / "2") == tmp_path / "2" / TRACE


def test_of_an_abandoned_trace_nothing_stays(tmp_path):
    start_trace(tmp_path / "1")
    abandon_trace(tmp_path / "1")
    assert list(tmp_path.iterdir()) == []
    abandon_trace(tmp_path / "1")  # without one nothing fails


def test_beside_a_newer_trace_there_is_no_older_page(tmp_path):
    """Its page may fail; until the trace is written the older files stay together."""
    for name in (PAGE, VIEWER_FILE, TRACE):
        (tmp_path / name).write_text("older")
    start_trace(tmp_path)
    jnp.ones(3).block_until_ready()
    assert (tmp_path / PAGE).exists()
    stop_trace(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [TRACE]
    assert (tmp_path / TRACE).read_bytes() != b"older"
