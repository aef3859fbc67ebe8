"""docs/settings.md is written from the sections, and says something of every setting."""

from pathlib import Path

from maxlm.config.reference import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def test_the_page_is_as_the_sections_are():
    """Else: `python -m maxlm.config.reference > docs/settings.md`."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_setting_is_described():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 250
    assert [row for row in rows if row.endswith("|  |")] == []
