"""Web pages: depth of elements, pages without main content."""

import time

import pytest
from read_cases import outcome

from maxlm.documents.html import DEEPEST, _depth, of_html
from maxlm.documents.records import Defect, ReadSettings

MANY = DEEPEST + 500
DRAWINGS = {
    "self-closed shapes of a drawing": "<svg>" + '<path d="M1"/>' * MANY + "</svg>",
    "tags in the values of attributes": "<p title='<i><b>'><a href=\"<b>\">x</a>" * MANY,
    "paragraphs and cells that nothing closes": "<p>a<td>b<li>c" * MANY,
    "self-closed shapes of many drawings": '<div><svg viewBox="0 0 1 1"><circle r=1 /><g><use href="#a" /></g></svg></div>' * MANY,
}


@pytest.mark.parametrize("page", DRAWINGS.values(), ids=DRAWINGS)
def test_flat_pages_are_not_deep(page):
    """Elements that are closed are not counted as open, however a page writes it."""
    assert _depth(f"<html><body>{page}") < 10


@pytest.mark.parametrize("opened", ["<b>", "<div/>", "<i class='a>b'>", '<a href="x">', "<svg><div/>", "<x-y>"])
def test_nested_elements_count(opened):
    """HTML ignores the slash of <div/>: it stays open."""
    assert _depth("<html>" + opened * MANY) >= MANY


@pytest.mark.parametrize("piece", ['<a b="', "<a b='c", "<a b=", "<a ", "<", "<svg ", '<a b="c" ', "='\"", "<a/"])
def test_depth_takes_linear_time(piece):
    """A million characters of one unclosed piece: quadratic time would take minutes."""
    began = time.process_time()
    _depth("<b>" * MANY + piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 5


def test_pages_without_main_content(tmp_path):
    """A page of menus says so and shows them; one without any text is empty."""
    path = tmp_path / "a.html"
    path.write_text("<html><head><title>T</title></head><body><nav><a href='/'>Home page</a> <a href='/b'>Next</a></nav></body></html>")
    assert outcome(path, ReadSettings()) == (0, {"no_main_content": 1})
    menus = of_html(1, "", path.read_bytes(), {})
    assert isinstance(menus, Defect) and "Home page" in menus.example
    path.write_text("<html><head><title>T</title><style>a {}</style></head><body><script>x < 1</script><br></body></html>")
    assert outcome(path, ReadSettings()) == (0, {"empty": 1})


@pytest.mark.parametrize(
    "head",
    [
        b'<?xml version="1.0" encoding="windows-1251"?>\n<html>',
        b'<html><meta http-equiv="Content-Type" content="text/html; charset=windows-1251">',
        b'<html><meta charset="utf-8"><meta charset=windows-1251>',
        b'<html><meta charset="utf-8">',
        b'<html><meta charset="iso-8859-1">',
        b"<html>",
    ],
)
def test_a_page_states_its_encoding_in_any_way_or_wrongly(head):
    """XML declaration, old and new <meta>, two of them, a wrong one and none: the text is the same."""
    text = "Съешь ещё этих мягких французских булок, да выпей чаю. Москва — столица России."
    page = head + f"<body><main><p>{text}</p></main></body></html>".encode("cp1251")
    assert of_html(1, "", page, {}).text.strip() == text
