"""The report in a browser: what charts show, and what pointer, controls and tables do."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import tempfile
import zlib
from html import unescape

import pytest

from maxlm.telemetry.observer import Event
from maxlm.telemetry.report.load import load_run
from maxlm.telemetry.report.render import render
from maxlm.telemetry.run_dir import RunDirectory

pytestmark = pytest.mark.soak

EVIL = "<img src=x onerror=evil=1>"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --window-size=1200,2400"

# Runs before the script of a test. uPlot draws in microtasks, for which a script awaits. `times`: milliseconds from asking for the page to
# its start, and for what a script times.
TOOLS = """
const times = [performance.now()];
const timed = action => { const began = performance.now(); action(); times.push(performance.now() - began); };
onerror = (_, __, line, ___, error) => { document.title = `error: ${error?.stack ?? line}`; };
function tell(found) { make('pre', {id: 'found'}, document.body, JSON.stringify(found)); }
const byTitle = title => charts.find(chart => chart.spec.title === title);
function pointer(type, chart, share) {
  const {over} = chart.plot, box = over.getBoundingClientRect(), clientX = box.left + share * box.width, clientY = box.top + box.height / 2;
  over.dispatchEvent(new MouseEvent(type, {clientX, clientY, movementX: 1, button: 0, bubbles: true}));
}
function drag(chart, from, to) { pointer('mousedown', chart, from); pointer('mousemove', chart, to); pointer('mouseup', chart, to); }
function choose(name, value) {
  const found = [...document.querySelectorAll(`.controls [name=${name}]`)].find(one => one.type !== 'radio' || one.value === value);
  if (found.type === 'checkbox' || found.type === 'radio') found.checked = value !== false; else found.value = value;
  found.dispatchEvent(new Event('input', {bubbles: true}));
}
const labels = (chart, axis = 0) => (chart.plot.axes[axis]._values ?? []).filter(label => label !== null && label !== '');
function drawn({plot: {ctx}}) { return ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height).data.some(Boolean); }
const order = (table, column) => [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
"""


def browse(page, folder, *flags):
    """Opens a page in a browser of its own, and returns the process that has ended."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={tempfile.mkdtemp(dir=folder)}", *flags, page]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def look(tmp_path):
    """Opens a report of runs, and returns what a script finds in it."""

    def look_at(runs, script, address="", version=""):
        page = tmp_path / "report.html"
        # No timers: a busy browser may end before they are due.
        probe = f"<script>{TOOLS}(async () => {{ {script} }})().then(tell, error => tell(String(error.stack)));</script></body>"
        page.write_text(render(list(map(load_run, runs)), version).replace("</body>", probe))
        ended = browse(f"file://{page}{address}", tmp_path, "--dump-dom")
        answer = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.S)
        assert answer, f"{ended.returncode} {ended.stdout[-300:]} {ended.stderr[-300:]}"
        return json.loads(unescape(answer[1]))

    return look_at


@pytest.fixture
def make(tmp_path):
    """Writes a run that has been restarted, has skipped an update and was rolled back, and gives its folder."""

    def run_of(name, steps=400, level=3.0, spike=True):
        run = RunDirectory(tmp_path / name, primary=True)
        run.path.mkdir()
        run.config.write_text(f"optimizer: {{peak_lr: {level}}}\n")
        with run.metrics.open("w") as file:
            for step in range(1, steps + 1):
                loss = 100.0 if spike and step == steps // 2 else level + 5 * math.exp(-8 * step / steps) + 0.01 * (step % 7)
                now = 1000.0 + 2 * step + 3600 * (step > steps // 4)
                file.write(
                    json.dumps({"step": step, "loss": loss, "tokens": 1000 * step, "grad_norm": 1.0 + 0.01 * (step % 5), "time": now})
                    + "\n"
                )
        events = [
            Event("start", 0, 1000.0),
            Event("eval", steps // 2, 1000.0 + steps, {"eval_loss": level + 0.5}),
            Event("start", 0, 1000.0 + steps // 2 + 3600),
            Event("restore", steps // 4, 1000.0 + steps // 2 + 3601),
            Event("skip", steps // 2, 1000.0 + steps + 3600, {"reason": EVIL}),
            Event("rollback", 3 * steps // 4, 1000.0 + 3 * steps // 2 + 3600, {"from_step": 3 * steps // 4 + 2}),
        ]
        run.events.write_text("".join(event.to_json() + "\n" for event in events))
        return run.path

    return run_of


def test_a_range_is_zoomed_into_on_all_charts_and_a_double_click_resets_it(look, make):
    found = look(
        [make("r")],
        """
        const [loss, norm] = [byTitle('Loss'), byTitle('Gradient norm')], before = loss.range;
        const reset = document.querySelector('[name=reset]'), said = [reset.hidden];
        drag(loss, 0.5, 0.25);
        const zoomed = [loss.range, norm.range], address = location.hash;
        await 0;
        const ticks = labels(loss);
        said.push(reset.hidden);
        drag(norm, 0.5, 0.501);  // less than a few pixels: a click
        const still = loss.range;
        await 0;
        pointer('dblclick', norm, 0.5);
        return {before, zoomed, address, said, still, after: loss.range, ticks, reset: location.hash};
        """,
    )
    assert found["before"] == found["after"] == [1, 400]
    assert found["zoomed"][0] == found["zoomed"][1] == found["still"] == pytest.approx([100.75, 200.5], abs=0.5)
    assert found["address"].startswith("#zoom=100.") and found["reset"] in ("", "#")
    assert found["said"] == [True, False]
    assert "150" in found["ticks"] and "400" not in found["ticks"]


def test_the_pointer_shows_values_marks_and_no_markup(look, make):
    found = look(
        [make("a"), make(EVIL, level=4.0)],
        """
        const loss = byTitle('Loss'), norm = byTitle('Gradient norm');
        choose('smoothing', 0);
        await 0;
        pointer('mousemove', loss, 299 / 399);
        const shown = [...tip.children].map(one => one.textContent), line = norm.plot.posToVal(norm.plot.cursor.left, 'x');
        pointer('mousemove', loss, 199 / 399);
        const evil = tip.textContent, images = document.querySelectorAll('img').length;
        pointer('mouseleave', loss, 0.5);
        return {shown, line, evil, images, hidden: tip.hidden, ran: typeof globalThis.evil};
        """,
    )
    assert found["shown"][0] == "step 300 · 300k tokens · 70 min"
    assert sorted(found["shown"][1:3]) == [f"training {EVIL}4.072", "training a3.072"]
    assert "Rolled back from step 302 to step 300" in found["shown"][3:]
    assert EVIL in found["evil"]
    assert (found["images"], found["hidden"], found["ran"]) == (0, True, "undefined")
    assert found["line"] == pytest.approx(300, abs=2)


def test_axes_are_steps_tokens_or_time(look, make):
    found = look(
        [make("r")],
        """
        const loss = byTitle('Loss'), seen = {};
        for (const kind of ['tokens', 'seconds', 'step']) {
          choose('x', kind);
          seen[kind] = [loss.range, loss.plot.axes[0].label, location.hash];
        }
        choose('x', 'seconds');
        seen.jump = [along(runs[0].seconds, 100), along(runs[0].seconds, 101)];
        const [low, high] = loss.range;
        seen.marks = Object.fromEntries(loss.marks().map(([mark, x]) => [mark.kind, (x - low) / (high - low)]));
        return seen;
        """,
    )
    assert found["tokens"][0] == [1000, 400_000] and "tokens" in found["tokens"][1] and found["tokens"][2] == "#x=tokens"
    assert found["seconds"][0] == [2, 4400] and "time since the first start, min" in found["seconds"][1]
    assert found["step"][0] == [1, 400]
    assert found["jump"] == [200, 3802]  # the pause lies between two steps
    assert found["marks"] == pytest.approx({"restart": 3798 / 4398, "skip": 3998 / 4398, "rollback": 4198 / 4398}, abs=0.002)


def test_a_run_that_recorded_no_time_is_named_where_it_is_missing(look, make, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step":7,"loss":3.0}\n{"step":8,"loss":3.0}\n')
    script = """
        const hint = document.querySelector('.hint'), lines = () => byTitle('Loss').shapes.filter(({line}) => line.run === 1).length;
        const seen = [lines(), hint.textContent];
        choose('x', 'seconds');
        return [...seen, lines(), hint.textContent];
    """
    found = look([make("r"), tmp_path / "old"], script)
    assert found == [1, "drag to zoom, double-click to reset", 0, "not recorded, so not shown here: old"]


def test_smoothing_logarithm_outliers_and_marks_are_chosen(look, make):
    found = look(
        [make("r")],
        """
        const loss = byTitle('Loss'), seen = {};
        const unit = () => loss.figure.querySelector('.unit').textContent;
        const state = () => ({smooth: loss.shapes[0].smooth !== null, beyond: unit().includes('beyond'),
          high: loss.values[1], log: loss.log, bend: bend(loss.shapes[0].tables[1][1].slice(220))});
        const bend = ys => ys.slice(1).reduce((sum, y, i) => sum + Math.abs(y - ys[i]), 0);
        seen.first = state();
        choose('smoothing', 6); seen.smooth = state();
        choose('smoothing', 0); seen.off = state();
        choose('marks', false); choose('outliers', true); seen.all = state();
        loss.figure.querySelector('figcaption button').click(); seen.log = state();
        return {...seen, address: location.hash};
        """,
    )
    assert (found["first"]["smooth"], found["first"]["beyond"], found["first"]["log"]) == (True, True, False)
    assert found["first"]["high"] < 12  # one spike of 100 does not flatten the rest
    assert (found["smooth"]["smooth"], found["off"]["smooth"]) == (True, False)
    assert found["smooth"]["bend"] < found["first"]["bend"] < found["off"]["bend"]
    assert not found["all"]["beyond"] and found["all"]["high"] > 100
    assert found["log"]["log"] and found["log"]["high"] == pytest.approx(105)
    assert dict(part.split("=") for part in found["address"][1:].split("&")) == {
        "smoothing": "0",
        "marks": "0",
        "outliers": "1",
        "log": "Loss",
    }


def test_an_address_brings_back_the_view_and_a_bad_one_nothing(look, make):
    script = (
        "return {x: view.x, range: byTitle('Loss').range, hidden: [...view.hidden], smoothing: view.smoothing, log: byTitle('Loss').log}"
    )
    run = make("r")
    found = look([run], script, "#x=tokens&zoom=1000,2000&smoothing=0&log=Loss&marks=0")
    assert found == {"x": "tokens", "range": [1000, 2000], "hidden": [], "smoothing": 0, "log": True}
    found = look([run], script, "#x=constructor&zoom=9,NaN&smoothing=99&log=%3Cimg%3E&hidden=77&zoom=")
    assert found == {"x": "step", "range": [1, 400], "hidden": [77], "smoothing": 3, "log": False}


def test_a_run_is_hidden_from_all_charts_and_tables_are_sorted(look, make):
    runs = [make(name, level=level) for name, level in (("a", 3.0), ("b", 2.5), ("c", 10.0), ("d", 4.0))]
    found = look(
        runs,
        """
        const norm = byTitle('Gradient norm'), before = norm.shapes.length;
        document.querySelectorAll('button[data-run]')[2].click();
        const after = norm.shapes.length, losses = byTitle('Loss').values[1];
        const table = document.querySelector('table'), orders = [order(table, 0)];
        const head = [...table.tHead.rows[0].cells].find(one => one.textContent === 'Training loss');
        for (let i = 0; i < 2; i++) { head.click(); orders.push(order(table, 0)); }
        const amounts = ['5.77 M', '1 h 5 min', '42.0%', '12,345', '<0.1%', 'adamw', '1e-3', '100 of 200', '12 ms', '~1.5 MWh'].map(amount);
        return {before, after, losses, orders, amounts};
        """,
    )
    assert (found["before"], found["after"]) == (4, 3)
    assert found["losses"] < 12
    assert found["orders"] == [["a", "b", "c", "d"], ["b", "a", "d", "c"], ["c", "d", "a", "b"]]
    assert found["amounts"] == pytest.approx([5.77e6, 3900, 0.42, 12345, 0.001, None, 1e-3, 100, 0.012, 1.5e6])


def test_tables_are_sorted_by_numbers_whatever_their_units(look, make):
    runs = []
    for name, size, cost in (("a", 71.2e9, 2.5e6), ("b", 980e6, 900e3), ("c", 1.1e12, 4.0), ("d", 512, 0.5)):
        runs.append(make(name, steps=4))
        record = {"step": 5, "loss": 3.0, "memory_peak_bytes": size}
        (runs[-1] / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        bill = {"bill": {"currency": "EUR", "cost": cost, "energy_kwh": 1000 * cost}}
        (runs[-1] / "events.jsonl").write_text(Event("start", 0, 1000.0).to_json() + "\n" + Event("stop", 5, 1.0, bill).to_json() + "\n")
    found = look(
        runs,
        """
        const table = document.querySelector('table'), heads = [...table.tHead.rows[0].cells];
        return ['Peak memory', 'Cost', 'Energy'].map(name => {
          heads.find(one => one.textContent === name).click();
          return order(table, 0).join('');
        });
        """,
    )
    assert found == ["dbac", "dcba", "dcba"]


def test_a_newer_page_of_a_live_report_keeps_the_view(look, make):
    runs = [make(name, level=level) for name, level in (("a", 3.0), ("b", 2.5), ("c", 10.0), ("d", 4.0))]
    newer = json.dumps(render([load_run(make(f"{run.name}2", steps=500)) for run in runs], "8")).replace("<", "\\u003c")
    found = look(
        runs,
        f"""
        const one = what => document.querySelector(what);
        const state = () => ({{points: byTitle('Loss').lines[0].steps.length, range: byTitle('Loss').range,
          version: one('main').dataset.version, x: one('[name=x]:checked').value, lines: byTitle('Loss').shapes.length,
          order: order(one('table'), 0),
          open: document.querySelectorAll('details[open]').length}});
        choose('x', 'tokens');
        await 0;
        drag(byTitle('Loss'), 0.5, 0.75);
        document.querySelectorAll('button[data-run]')[2].click();
        document.querySelectorAll('details')[1].open = true;
        for (let i = 0; i < 2; i++) document.querySelector('th').click();
        const before = state();
        replacePage({newer});
        return [before, state()];
        """,
        version="7",
    )
    before, after = found
    assert (before.pop("points"), before.pop("version"), before.pop("order")) == (400, "7", ["d", "c", "b", "a"])
    assert (after.pop("points"), after.pop("version"), after.pop("order")) == (500, "8", ["d2", "c2", "b2", "a2"])
    assert before == after
    assert (after["x"], after["lines"], after["open"]) == ("tokens", 3, 1)
    assert after["range"] == pytest.approx([200_500, 300_250], abs=500)


def test_no_two_ticks_of_an_axis_have_the_same_label(look, make):
    """However far one has zoomed into a long run, linear or logarithmic."""
    found = look(
        [make("r", steps=2000)],
        """
        const loss = byTitle('Loss'), texts = [];
        for (const range of [[200.02, 200.05], [150, 153], [100, 1900], [1, 2000]]) for (const log of [false, true]) {
          view.logs.set('Loss', log); zoom(range); await 0; texts.push(labels(loss), labels(loss, 1));
        }
        return texts;
        """,
    )
    for shown in found:
        assert len(set(shown)) == len(shown) >= 2, shown
        assert not any("NaN" in label or "Infinity" in label for label in shown)


def test_charts_beside_each_other_share_their_lower_edge_and_one_value_is_no_values(look, make):
    """Also where the caption of one takes two lines."""
    found = look(
        [make("r")],
        """
        const edges = new Map();
        byTitle('Gradient norm').figure.querySelector('figcaption').append(make('p', {}, null, 'another line'));
        for (const chart of charts.filter(one => !one.wide)) {
          const box = chart.place.getBoundingClientRect(), row = Math.round(box.bottom / 100);
          edges.set(row, [...(edges.get(row) ?? []), box.bottom]);
        }
        return {edges: [...edges.values()], unit: byTitle('Loss').figure.querySelector('.unit').textContent};
        """,
    )
    assert all(max(row) - min(row) < 1 for row in found["edges"])
    assert "1 extreme value beyond" in found["unit"]


def test_a_table_that_is_cut_off_shows_it(look, make):
    """Shades are painted where it goes on, as browsers without scroll bars would not say so."""
    found = look(
        [make(f"run-{number}", steps=4) for number in range(20)],
        """
        const table = document.querySelector('.scroll');
        return {background: getComputedStyle(table).backgroundAttachment, cut: table.scrollHeight - table.clientHeight};
        """,
    )
    assert found["cut"] <= 0, "twenty runs fit"
    assert found["background"] == "local, local, scroll, scroll"


def test_any_series_is_drawn_with_finite_numbers(look, tmp_path):
    """A single step, constants, zeros, negative and enormous values, logarithmic or not."""
    runs = []
    for name, values in {
        "one": [3.0],
        "same": [3.0] * 60,
        "zero": [0.0] * 60,
        "huge": [1.0] * 60 + [1e300],
        "signs": [-1.0, 2.0, -3.0],
    }.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": value, "grad_norm": value}) for step, value in enumerate(values, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        runs.append(tmp_path / name)
    script = """
        const texts = [], loss = byTitle('Loss');
        for (const log of [false, true]) for (const outliers of [false, true]) {
          view.outliers = outliers; view.logs.set('Loss', log); refresh(); await 0;
          texts.push(String([loss.values, labels(loss), labels(loss, 1)]));
        }
        return {bad: texts.filter(text => /NaN|Infinity|undefined/.test(text)).length, lines: loss.shapes.length};
    """
    for run in runs:
        assert look([run], script)["bad"] == 0, run.name
    assert look(runs, script) == {"bad": 0, "lines": 5}


def test_a_million_steps_answer_at_once(look, make):
    found = look(
        [make("long", steps=1_000_000)],
        """
        const loss = byTitle('Loss'), most = () => Math.max(...loss.shapes[0].tables[0][1]), spike = most();
        timed(() => drag(loss, 0.495, 0.505));
        await 0;
        return {times, spike, range: loss.range, zoomed: most(), size: document.documentElement.outerHTML.length};
        """,
    )
    assert found["range"] == pytest.approx([495_000, 505_000], abs=1500)
    assert found["spike"] == found["zoomed"] == 100  # one step of a million
    assert found["size"] < 5_000_000
    assert max(found["times"]) < 2000, found["times"]  # milliseconds


def many_charts(run):
    """Add figures to a run, so that its page has charts far below the window."""
    records = [
        json.dumps({"step": step, **{f"m_{i}": step % 7 + i for i in range(1, 4)}, "memory_peak_bytes": 1e9, "mfu": 0.4})
        for step in (401, 402)
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(records) + "\n")
    return run


def test_all_charts_are_there_for_a_picture_of_the_whole_page(look, make):
    """Without scrolling."""
    found = look([many_charts(make("r"))], "return [document.querySelectorAll('figure.chart').length, charts.filter(drawn).length];")
    assert found[0] == found[1] >= 4


def test_all_charts_are_printed(make, tmp_path):
    """Their lines are strokes in the colour of the run, on pages of a width that the window never had."""
    page, printed = tmp_path / "tall.html", tmp_path / "printed.pdf"
    page.write_text(render([load_run(many_charts(make("r")))]))
    browse(f"file://{page}", tmp_path, "--window-size=800,200", f"--print-to-pdf={printed}")
    drawn = b""
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", printed.read_bytes(), re.S):
        with contextlib.suppress(zlib.error):  # some are not compressed
            drawn += zlib.decompress(stream)
    lines = re.findall(rb"\.0431 \.4 \.6588 RG\b(?:(?! RG\b).)*? l\n(?:(?! RG\b).)*?\bS\b", drawn, re.S)
    assert len(lines) >= page.read_text().count('<figure class="chart')


def test_on_a_phone_the_first_chart_is_on_the_second_screen_at_the_latest(look, make):
    """With all cards that a run can have, of one run or three."""
    runs = [make(name) for name in "abc"]
    for run in runs:
        bill = {"bill": {"currency": "EUR", "cost": 1.0, "energy_kwh": 10.0}, "reason": "done"}
        start = {"parameters": 1e9, "trained_parameters": 1e6, "predicted": {"memory_bytes": 1e9, "step_s": 1.0}, "total_steps": 400}
        with (run / "events.jsonl").open("a") as file:
            file.write(Event("start", 400, 8000.0, start).to_json() + "\n" + Event("stop", 400, 8001.0, bill).to_json() + "\n")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 401, "loss": 3.0, "mfu": 0.4, "tokens_per_s": 1e4, "step_time_s": 1, "data_wait_s": 0.1}) + "\n")
    script = """
        for (const plot of document.querySelectorAll('.uplot')) plot.remove();  // as wide as this window
        const frame = make('iframe', {width: 360, height: 760}, document.body);
        frame.contentDocument.write('<!doctype html>' + document.head.outerHTML + document.querySelector('main').outerHTML);
        frame.contentDocument.close();
        for (const prose of frame.contentDocument.querySelectorAll('header details')) prose.open = false;  // as page.js does on a phone
        const top = what => frame.contentDocument.querySelector(what).getBoundingClientRect();
        const {scrollWidth} = frame.contentDocument.documentElement;
        return {chart: top('figure.chart').top, card: top('.cards div, table').width, page: scrollWidth};
    """
    for shown in (runs[:1], runs):
        found = look(shown, script)
        assert found["chart"] < 2 * 760, found
        assert found["page"] <= 360, "nothing is wider than the screen"
    assert look(runs[:1], script)["card"] < 120, "three cards a row"


def test_the_line_of_a_live_page_covers_nothing_at_its_end(look, make):
    found = look(
        [make("r")],
        """
        scrollTo(0, document.documentElement.scrollHeight);
        const [main, line] = ['main', '#live'].map(what => document.querySelector(what).getBoundingClientRect());
        return {overlap: main.bottom - line.top, across: line.width === document.body.clientWidth};
        """,
        version="1",
    )
    assert found["overlap"] <= 0.5 and found["across"]
