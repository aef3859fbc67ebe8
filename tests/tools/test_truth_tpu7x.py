"""Public runs on tpu7x beside the analytic model: the page holds today's figures, and the gain of fp8 is predicted."""

import pytest
from truth_gpu import rows
from truth_tpu7x import PAGE, ROWS, ratios, table


@pytest.fixture(scope="module")
def found():
    return list(rows(ROWS))


def test_the_page_is_what_the_model_predicts(found):
    """A changed model must be followed by `python tools/truth_tpu7x.py` and `python tools/published_runs.py`."""
    page = PAGE.read_text(encoding="utf-8")
    assert not [line for line in list(table(found))[1:] if line not in page]


def test_fp8_gains_what_it_gained_in_published_runs(found):
    """Within a tenth, in all seven pairs."""
    pairs = list(ratios(found))
    assert len(pairs) == 7
    for _, published, estimated in pairs:
        assert estimated == pytest.approx(published, rel=0.1)
