"""Public runs on GPUs beside the analytic model: the page holds today's figures."""

from truth_gpu import PAGE, rows, table


def test_the_page_is_what_the_model_predicts():
    """A changed model must be followed by `python tools/truth_gpu.py`."""
    found = list(rows())
    assert len(found) >= 8 and all(row.published_s > 0 and row.source for row in found)
    page = PAGE.read_text(encoding="utf-8")
    missing = [line for line in list(table(found))[1:] if line not in page]
    assert not missing
