// The controls of the charts, the legend, and tables that can be sorted.

const UNITS = {ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400, '%': 0.01, k: 1e3, M: 1e6, B: 1e9, T: 1e12, Q: 1e15, Wh: 1, kWh: 1e3, MWh: 1e6, GWh: 1e9};

// The view: what the controls and the legend choose. The address keeps it, so that it can be reloaded and sent.

function zoom(range) {  // to a step at least
  view.zoom = range && view.x === 'step' && range[1] - range[0] < 1 ? [Math.floor(range[0]), Math.ceil(range[1])] : range;
  refresh();
}

function refresh() {
  for (const chart of charts) chart.draw();
  const form = document.querySelector('.controls');
  if (!form) return;
  form.elements.reset.hidden = !view.zoom;
  const silent = runs.filter(run => view.x !== 'step' && !run[view.x]).map(run => run.label), hint = form.querySelector('.hint');
  hint.classList.toggle('missing', silent.length > 0);
  hint.textContent = silent.length ? `not recorded, so not shown here: ${silent.join(', ')}` : 'drag to zoom, double-click to reset';
  form.querySelector('output').textContent = WINDOWS[view.smoothing] ? `${WINDOWS[view.smoothing]}%` : 'off';
  keep();
}

function setAxis() {
  const lines = charts.flatMap(chart => chart.lines);
  for (const line of lines) place(line);
  const placed = lines.filter(line => line.x);
  const low = Math.min(...placed.map(line => line.x[0])), high = Math.max(...placed.map(line => line.x.at(-1)));
  const beside = view.x === 'step' ? 1 : Math.max(1, 0.05 * low);  // a single point lies in the middle
  full[view.x] = high > low ? [low, high] : [low - beside, low + beside];
}

function keep() {
  const kept = new URLSearchParams();
  if (view.x !== 'step') kept.set('x', view.x);
  if (view.zoom) kept.set('zoom', view.zoom.join(','));
  if (view.smoothing !== 3) kept.set('smoothing', view.smoothing);
  if (!view.marks) kept.set('marks', 0);
  if (view.outliers) kept.set('outliers', 1);
  for (const [title, on] of view.logs) kept.append(on ? 'log' : 'linear', title);
  if (view.hidden.size) kept.set('hidden', [...view.hidden].join(','));
  const text = String(kept);
  if (text !== location.hash.slice(1)) history.replaceState(null, '', `#${text}`);
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1)), numbers = text => (text ?? '').split(',').filter(Boolean).map(Number);
  if (Object.hasOwn(AXES, kept.get('x')) && runs.some(run => run[kept.get('x')])) view.x = kept.get('x');
  const range = numbers(kept.get('zoom'));
  if (range.length === 2 && range[0] < range[1] && range.every(Number.isFinite)) view.zoom = range;
  if (WINDOWS[kept.get('smoothing') ?? ''] !== undefined) view.smoothing = Number(kept.get('smoothing'));
  view.marks = kept.get('marks') !== '0';
  view.outliers = kept.get('outliers') === '1';
  for (const name of ['log', 'linear']) for (const title of kept.getAll(name)) view.logs.set(title, name === 'log');
  view.hidden = new Set(numbers(kept.get('hidden')));
}

function connectControls() {
  const form = document.querySelector('.controls');
  if (!form) return;
  form.addEventListener('submit', event => event.preventDefault());
  form.elements.smoothing.value = view.smoothing;
  form.elements.outliers.checked = view.outliers;
  if (form.elements.marks) form.elements.marks.checked = view.marks;
  for (const radio of form.querySelectorAll('[name=x]')) radio.checked = radio.value === view.x;
  form.addEventListener('input', ({target}) => {
    if (target.name === 'x') { view.x = target.value; view.zoom = null; setAxis(); }
    else if (target.name === 'smoothing') view.smoothing = Number(target.value);
    else view[target.name] = target.checked;
    refresh();
  });
  form.elements.reset.addEventListener('click', () => zoom(null));
  for (const button of document.querySelectorAll('button[data-run]')) connectRun(button, Number(button.dataset.run));
}

function connectRun(button, run) {
  const show = faint => charts.forEach(({plot}) => {
    for (const one of plot.series) if (one.line && one.line.run !== run) one.alpha = faint ? 0.1 * one.shown : one.shown;
    plot.redraw(false);
  });
  button.setAttribute('aria-pressed', !view.hidden.has(run));
  button.addEventListener('click', () => {
    if (!view.hidden.delete(run)) view.hidden.add(run);
    button.setAttribute('aria-pressed', !view.hidden.has(run));
    refresh();
  });
  button.addEventListener('pointerenter', () => show(!view.hidden.has(run)));
  button.addEventListener('pointerleave', () => show(false));
}

// Tables

function amount(text) {  // 12,345 or 5.77 M or 42.0% or 1 h 5 min as a number; null: it begins with none
  let total = null, rest = text.trim().replace(/^[<~≈$€]/, '');
  for (let found; (found = rest.match(/^(-?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)\s*(ms|min|[kMG]?Wh|[kMBTQshd%])?(?!\w)\s*/));) {
    total = (total ?? 0) + Number(found[1].replaceAll(',', '')) * (UNITS[found[2]] ?? 1);
    rest = rest.slice(found[0].length);
    if (!found[2]) break;
  }
  return total;
}

function connectTable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const text = (row, column) => row.cells[column].firstChild?.tagName === 'SMALL' ? '' : row.cells[column].textContent;
  const number = (row, column) => {
    const {value} = row.cells[column].dataset;
    return value === undefined ? amount(text(row, column)) : Number(value);
  };
  const compare = (first, second, column) => {
    const [a, b] = [text(first, column), text(second, column)], [left, right] = [number(first, column), number(second, column)];
    if (a === '–' || b === '–') return null;
    return (left !== null && right !== null && left - right) || a.localeCompare(b, 'en', {numeric: true});
  };
  heads.forEach((head, column) => {
    const sort = () => {
      const up = head.getAttribute('aria-sort') !== 'ascending', rows = [...body.rows];
      for (const other of heads) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const missing = row => text(row, column) === '–';
      rows.sort((a, b) => missing(a) - missing(b) || (up ? 1 : -1) * (compare(a, b, column) ?? 0));
      body.append(...rows);
    };
    head.tabIndex = 0;
    head.addEventListener('click', sort);
    head.addEventListener('keydown', event => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); sort(); } });
  });
}

// Begin

function start() {  // also for each newer page of a live report: the view stays
  runs = JSON.parse(document.getElementById('runs').textContent);
  for (const run of runs) for (const kind of ['tokens', 'seconds']) if (run[kind]) run[kind].steps = sums(run[kind].steps);
  if (!charts.length) recall();
  for (const chart of charts) chart.plot.destroy();
  charts = [...document.querySelectorAll('figure.chart')].map(figure => new Chart(figure));
  if (view.x !== 'step' && !runs.some(run => run[view.x])) view.x = 'step';
  setAxis();
  connectControls();
  document.querySelectorAll('table').forEach(connectTable);
  refresh();
}

if (matchMedia('(max-width: 760px)').matches) for (const prose of document.querySelectorAll('header details')) prose.open = false;
let width = innerWidth;
addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; refresh(); } });
addEventListener('beforeprint', () => { for (const chart of charts) chart.draw(chart.wide ? PRINTED_WIDE : PRINTED); });
addEventListener('afterprint', refresh);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', refresh);

start();
