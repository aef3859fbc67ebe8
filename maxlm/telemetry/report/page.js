// Draws the charts of a report as SVG, and sorts its tables. Text of runs gets into the page through textContent alone.
'use strict';

const LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 34;  // margins of a plot, in pixels
const HEIGHT = 260, TALL = 380, LEAST_WIDTH = 260;   // of a chart
const WINDOWS = [0, 0.5, 1, 2, 5, 10, 20];           // of the running median, in percent of the points shown
const PLACES = 300, SAMPLES = 201;                   // of the running median: where it is taken, and of how many points at most
const LISTED = 12;                                   // lines under the pointer
const CLICK = 5;                                     // pixels that a pointer moves before it selects a range
const COLORS = 8, DASHES = ['', '9 4', '2 4'];       // as in style.py
const HEAT_WIDTH = 1000;                             // as in experts.py
const AXES = {step: 'step', tokens: 'tokens', seconds: 'time since the first start'};
const TIMES = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
const UNITS = {ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400, '%': 0.01, k: 1e3, M: 1e6, B: 1e9, T: 1e12, Q: 1e15};

const view = {x: 'step', zoom: null, smoothing: 3, marks: true, outliers: false, logs: new Map(), hidden: new Set()};
let runs = [], charts = [], full = {};
const tip = document.getElementById('tip');

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const sums = differences => { let sum = 0; return Float64Array.from(differences, one => sum += one); };
const at = (sorted, share) => sorted[Math.floor(share * (sorted.length - 1) + 0.5)];

function firstNotBelow(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

function make(name, attributes, parent, text) {
  const svg = name.startsWith('svg:');
  const made = svg ? document.createElementNS('http://www.w3.org/2000/svg', name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

// Numbers as text

function short(value) {  // 1500000 -> 1.5M, 0.0003 -> 3e-4
  const size = Math.abs(value);
  if (size < 1e-12) return '0';
  if (size >= 1e13) return String(Number(value.toPrecision(4)));
  for (const [scale, letter] of [[1e9, 'B'], [1e6, 'M'], [1e3, 'k']])
    if (size >= (letter === 'k' ? 1e4 : scale)) return Number((value / scale).toPrecision(4)) + letter;
  return size < 1e-2 ? String(Number(value.toPrecision(3)).toExponential()).replace('e+', 'e') : String(Number(value.toPrecision(4)));
}

function say(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(3);
  return Number(value.toPrecision(4)).toLocaleString('en-US', {maximumFractionDigits: 6});
}

const unitOf = span => TIMES.find(([seconds]) => span >= 2 * seconds) ?? TIMES.at(-1);

function sayPlace(kind, value) {
  if (kind === 'seconds') {
    const [seconds, name] = unitOf(value);
    return `${Number((value / seconds).toPrecision(4))} ${name}`;
  }
  return kind === 'tokens' ? `${short(value)} tokens` : `step ${Math.round(value).toLocaleString('en-US')}`;
}

// Axes

function ticks(low, high, wanted) {  // multiples of 1, 2 or 5 times a power of ten, about as many as wanted
  const power = 10 ** Math.floor(Math.log10((high - low) / wanted));
  const choices = [1, 2, 5, 10].map(factor => {
    const step = power * factor, values = [];
    for (let n = Math.ceil(low / step); n <= high / step + 1e-9; n++) values.push(Number((n * step).toPrecision(12)));
    return values;
  });
  const miss = values => Math.abs(Math.log(Math.max(values.length, 0.5) / wanted));
  return choices.reduce((best, values) => miss(values) < miss(best) ? values : best);
}

function logTicks(low, high, wanted) {  // powers of ten, or as many of their multiples as it takes to have three
  for (const factors of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const values = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      values.push(...factors.map(factor => Number((factor * 10 ** power).toPrecision(12))));
    const within = values.filter(value => low <= value && value <= high);
    if (within.length >= 3) return within.filter((_, i) => i % Math.ceil(within.length / (2 * wanted)) === 0);
  }
  return ticks(low, high, wanted).filter(value => value > 0);
}

function scale(low, high, log = false) {  // share(value): 0 at low, 1 at high
  const of = log ? value => Math.log10(Math.max(value, 1e-300)) : value => value;
  const from = of(low), width = of(high) - from;
  return {low, high, log, share: value => (of(value) - from) / width};
}

// The range of the points shown, cut where a few far outliers (compilation, a pause, a spike) would flatten the rest.
function valueAxis(shapes, log, zero) {
  const values = shapes.flatMap(shape => shape.values(log));
  if (!values.length) return null;
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!view.outliers) {
    const limits = shapes.map(shape => shape.limits(log)).filter(Boolean);
    low = Math.max(low, Math.min(...limits.map(limit => limit[0])));
    high = Math.min(high, Math.max(...limits.map(limit => limit[1])));
  }
  if (zero && !log) low = Math.min(0, low);
  const outside = values.filter(value => value < low || value > high).length;
  if (log) return {...scale(low / 1.05, high * 1.05, true), outside};
  const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return {...scale(zero && low === 0 ? 0 : low - margin, high + margin), outside};
}

// Percentiles 5 to 95 of the least and greatest of each stretch, half of that more on either side, and the first and last values.
function usual(values, ends, log) {
  const scaled = Float64Array.from(values, value => log ? Math.log10(value) : value).sort();
  if (scaled.length < 40) return [scaled[0], scaled.at(-1)].map(value => log ? 10 ** value : value);
  let low = at(scaled, 0.05), high = at(scaled, 0.95);
  const reach = 0.5 * (high - low) || (log ? 0.1 : Math.max(Math.abs(high), 1e-12));
  const edges = ends.map(value => log ? Math.log10(value) : value);
  low = Math.min(low - reach, ...edges);
  high = Math.max(high + reach, ...edges);
  return log ? [10 ** low, 10 ** high] : [low, high];
}

// Lines

function decode(line) {
  const mid = Float64Array.from(line.mid);
  return {...line, steps: sums(line.steps), mid, low: line.low ? Float64Array.from(line.low) : mid,
    high: line.high ? Float64Array.from(line.high) : mid, x: null};
}

function along(knots, step) {
  const i = firstNotBelow(knots.steps, step);
  if (i === 0 || i === knots.steps.length) return knots.values[Math.max(0, i - 1)];
  const share = (step - knots.steps[i - 1]) / (knots.steps[i] - knots.steps[i - 1]);
  return knots.values[i - 1] + share * (knots.values[i] - knots.values[i - 1]);
}

function place(line) {  // sets x; null where the run has not recorded what the axis shows
  const knots = runs[line.run][view.x];
  line.x = view.x === 'step' ? line.steps : knots && line.steps.map(step => along(knots, step));
}

// The part of a line within the range: stretches of points, at most one a pixel, and their running median.
class Shape {
  constructor(line, [low, high], pixels) {
    const from = Math.max(0, firstNotBelow(line.x, low) - 1), to = Math.min(line.x.length, firstNotBelow(line.x, high) + 2);
    const size = Math.max(1, Math.ceil((to - from) / pixels));
    Object.assign(this, {line, range: [low, high], x: [], steps: [], low: [], mid: [], high: []});
    for (let i = from; i < to; i += size) {
      const end = Math.min(to, i + size), middle = (i + end - 1) >> 1;
      let least = Infinity, most = -Infinity;
      for (let k = i; k < end; k++) { least = Math.min(least, line.low[k]); most = Math.max(most, line.high[k]); }
      this.x.push(line.x[middle]); this.steps.push(line.steps[middle]); this.mid.push(line.mid[middle]);
      this.low.push(least); this.high.push(most);
    }
    this.main = line.dots ? null : this.median(from, to);
    this.smoothed = this.main !== null;
    this.main ??= {x: this.x, steps: this.steps, y: this.mid};
    this.cache = new Map();
  }

  median(from, to) {  // null: the window is a single point
    const {line} = this, half = Math.round((to - from) * WINDOWS[view.smoothing] / 100) >> 1;
    if (half < 1) return null;
    const found = {x: [], steps: [], y: []}, places = Math.min(to - from, PLACES);
    for (let n = 0; n < places; n++) {
      const middle = from + Math.round(n * (to - from - 1) / Math.max(1, places - 1));
      const ahead = Math.min(half, middle);  // at the start the window shrinks on both sides: a falling loss does not seem to begin low
      const begin = Math.max(0, middle - half), end = Math.min(line.mid.length, middle + ahead + 1);
      const stride = Math.ceil((end - begin) / SAMPLES), window = [];
      for (let k = begin; k < end; k += stride) window.push(line.mid[k]);
      window.sort((a, b) => a - b);
      found.x.push(line.x[middle]); found.steps.push(line.steps[middle]);
      found.y.push((window[(window.length - 1) >> 1] + window[window.length >> 1]) / 2);
    }
    return found;
  }

  limits(log) {  // that the axis should keep, null if none; all of a few measurements, of others what is usual
    const values = this.values(log);
    if (!values.length) return null;
    return this.line.dots ? [Math.min(...values), Math.max(...values)] : usual(values, this.ends(log), log);
  }

  values(log) {  // that the axis should show
    if (!this.cache.has(log)) {
      const within = i => this.range[0] <= this.x[i] && this.x[i] <= this.range[1];
      const all = [...this.low.filter((_, i) => within(i)), ...this.high.filter((_, i) => within(i))];
      this.cache.set(log, log ? all.filter(value => value > 0) : all);
    }
    return this.cache.get(log);
  }

  ends(log) {  // medians of the first and the last values
    const known = this.mid.filter(value => !log || value > 0);
    return [known.slice(0, 5), known.slice(-5)].filter(part => part.length).map(part => at(part.sort((a, b) => a - b), 0.5));
  }

  nearest(x) {
    const found = firstNotBelow(this.main.x, x);
    const before = found > 0 && (found === this.main.x.length || x - this.main.x[found - 1] < this.main.x[found] - x);
    const i = found - (before ? 1 : 0);
    return {shape: this, x: this.main.x[i], y: this.main.y[i], step: this.main.steps[i]};
  }
}

// Charts

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.spec = JSON.parse(figure.querySelector('script').textContent);
    this.lines = (this.spec.lines ?? []).map(decode);
    this.heat = figure.querySelector('svg.heat');
    this.wide = figure.classList.contains('wide');
    this.unit = figure.querySelector('.unit').textContent;
    this.plain = new Set(this.lines.map(line => line.run)).size === 1 && this.lines.length > COLORS;  // a shade a line, by its place
    this.near = this.drawn = false;
    if (this.lines.some(line => line.high.some(value => value > 0))) this.addSwitch();
  }

  get log() { return view.logs.get(this.spec.title) ?? Boolean(this.spec.log); }

  addSwitch() {
    const button = make('button', {type: 'button', 'aria-pressed': this.log}, null, 'log');
    this.figure.querySelector('figcaption').prepend(button);
    button.addEventListener('click', () => {
      view.logs.set(this.spec.title, !this.log);
      button.setAttribute('aria-pressed', this.log);
      this.draw();
      keep();
    });
  }

  get range() {
    if (this.heat) return view.x === 'step' && view.zoom ? view.zoom : this.spec.steps;
    return view.zoom ?? full[view.x];
  }

  draw() {
    this.drawn = true;
    this.width = Math.max(LEAST_WIDTH, this.figure.clientWidth);
    this.w = this.width - LEFT - RIGHT;
    this.h = (this.wide ? TALL : HEIGHT) - TOP - BOTTOM;
    this.xAxis = scale(...this.range);
    const lines = this.lines.filter(line => line.x && !view.hidden.has(line.run));
    this.shapes = lines.map(line => new Shape(line, this.range, this.w)).filter(shape => shape.x.length);
    this.yAxis = this.heat ? null : valueAxis(this.shapes, this.log, this.spec.zero);
    const svg = make('svg:svg', {class: 'plot', width: this.width, height: TOP + this.h + BOTTOM, role: 'img', 'aria-label': this.spec.about});
    this.svg?.remove();
    this.svg = svg;
    this.figure.append(svg);
    this.drawStepAxis();
    if (this.heat) this.drawHeat();
    else if (this.yAxis) this.drawLines();
    else make('svg:text', {x: LEFT + this.w / 2, y: TOP + this.h / 2, 'text-anchor': 'middle'}, svg, this.lines.length ? 'nothing to show here' : '');
    const beyond = this.yAxis?.outside ? ` · ${this.yAxis.outside.toLocaleString('en-US')} extreme values beyond the axis` : '';
    this.figure.querySelector('.unit').textContent = this.unit + beyond;
    this.cursor = make('svg:line', {class: 'cursor', y1: TOP, y2: TOP + this.h, visibility: 'hidden'}, svg);
    this.listen();
  }

  px(x) { return LEFT + this.w * this.xAxis.share(x); }
  py(y) { return TOP + this.h * clamp(1 - this.yAxis.share(y), -9, 9); }

  drawStepAxis() {
    const bottom = TOP + this.h, [low, high] = this.range, kind = this.heat ? 'step' : view.x;
    const [unit, name] = kind === 'seconds' ? unitOf(high) : [1, ''];
    make('svg:line', {class: 'axis', x1: LEFT, x2: LEFT + this.w, y1: bottom, y2: bottom}, this.svg);
    for (const value of ticks(low / unit, high / unit, Math.max(2, this.width / 110))) {
      if (kind === 'step' && !Number.isInteger(value)) continue;
      const px = this.px(value * unit).toFixed(1);
      make('svg:line', {class: 'axis', x1: px, x2: px, y1: bottom, y2: bottom + 4}, this.svg);
      make('svg:text', {x: px, y: bottom + 17, 'text-anchor': 'middle'}, this.svg, short(value));
    }
    make('svg:text', {x: LEFT + this.w, y: bottom + 31, 'text-anchor': 'end'}, this.svg, AXES[kind] + (name && `, ${name}`));
  }

  drawValueAxis() {
    const {low, high, log} = this.yAxis;
    for (const value of (log ? logTicks : ticks)(low, high, this.h / 40)) {
      const py = this.py(value);
      make('svg:line', {class: 'grid', x1: LEFT, x2: LEFT + this.w, y1: py, y2: py}, this.svg);
      make('svg:text', {x: LEFT - 7, y: py + 4, 'text-anchor': 'end'}, this.svg, short(value));
    }
  }

  drawLines() {
    this.drawValueAxis();
    if (view.marks) this.drawMarks();
    // A nested <svg> cuts what leaves the plot; 4 pixels more, for points on its edge.
    const box = {x: LEFT - 4, y: TOP - 4, width: this.w + 8, height: this.h + 8};
    const inside = make('svg:svg', {...box, viewBox: Object.values(box).join(' '), class: this.shapes.length > 6 ? 'many' : ''}, this.svg);
    for (const shape of this.shapes) this.drawLine(shape, inside);
    for (const shape of this.shapes) this.drawBeyond(shape);
  }

  drawLine(shape, parent) {
    const {line, main} = shape, group = make('svg:g', {'data-run': line.run}, parent);
    this.paint(group, line);
    if (shape.smoothed) make('svg:path', {class: 'raw', d: this.path(...zigzag(shape))}, group);
    const y = shape.smoothed || line.dots ? [main.x, main.y] : zigzag(shape);
    const dash = line.dots ? '5 4' : DASHES[Math.floor(line.run / COLORS) % DASHES.length];
    make('svg:path', {class: 'line', d: this.path(...y), 'stroke-dasharray': dash}, group);
    if (main.x.length === 1 || (line.dots && main.x.length <= PLACES))
      main.x.forEach((x, i) => { if (this.shows(main.y[i])) make('svg:circle', {cx: this.px(x), cy: this.py(main.y[i]), r: 3}, group); });
  }

  paint(element, line) {
    const place = this.lines.indexOf(line), share = Math.round(100 * place / Math.max(1, this.lines.length - 1));
    const color = this.plain ? `color-mix(in oklab, var(--p1) ${share}%, var(--p0))` : `var(--p${(line.color ?? line.run) % COLORS})`;
    element.style.setProperty('--c', color);
  }

  shows(value) { return !this.yAxis.log || value > 0; }

  path(xs, ys) {
    let text = '', pen = 'M';
    for (let i = 0; i < xs.length; i++) {
      if (!this.shows(ys[i])) { pen = 'M'; continue; }
      text += `${pen}${this.px(xs[i]).toFixed(1)} ${this.py(ys[i]).toFixed(1)}`;
      pen = 'L';
    }
    return text;
  }

  drawBeyond(shape) {  // triangles at the edge, at most one a pixel
    const edges = [[shape.high, y => y > this.yAxis.high, TOP, 6], [shape.low, y => this.shows(y) && y < this.yAxis.low, TOP + this.h, -6]];
    for (const [values, beyond, py, slope] of edges) {
      const pixels = new Set(shape.x.filter((_, i) => beyond(values[i])).map(x => Math.round(this.px(x))));
      const d = [...pixels].filter(px => px >= LEFT && px <= LEFT + this.w).map(px => `M${px - 4} ${py + slope}l4 ${-slope}l4 ${slope}z`).join('');
      if (d) this.paint(make('svg:path', {class: 'beyond', d}, this.svg), shape.line);
    }
  }

  marks() {  // within the range, of runs that are shown: [mark, pixel, run]
    const found = [], present = new Set(this.lines.map(line => line.run));
    for (const number of present) {
      const run = runs[number];
      if (view.hidden.has(number) || (view.x !== 'step' && !run[view.x])) continue;
      for (const mark of run.marks) {
        const x = view.x === 'tokens' ? along(run.tokens, mark.step) : mark[view.x];
        if (x >= this.range[0] && x <= this.range[1]) found.push([mark, Math.round(this.px(x)), number]);
      }
    }
    return found;
  }

  drawMarks() {
    const bottom = TOP + this.h, paths = new Map();
    for (const [{kind}, px, run] of this.marks()) {
      const shapes = {restart: `M${px} ${TOP}V${bottom}`, rollback: `M${px} ${TOP}V${bottom}M${px} ${TOP}l-6 4l6 4`, skip: `M${px - 3} ${bottom}l3 -7l3 7z`};
      const key = `${kind} ${run}`;
      if (!paths.has(key)) paths.set(key, new Set());
      paths.get(key).add(shapes[kind]);
    }
    for (const [key, shapes] of paths) {
      const [kind, run] = key.split(' '), path = make('svg:path', {class: kind, d: [...shapes].join('')}, this.svg);
      if (runs.length > 1) path.style.setProperty('--c', `var(--p${run % COLORS})`);
    }
  }

  drawHeat() {
    const {rows, first, steps: [low, high]} = this.spec, unit = HEAT_WIDTH / (high - low || 1), [from, to] = this.range;
    for (const value of ticks(first - 0.5, first + rows - 0.5, Math.min(rows, 6)).filter(Number.isInteger))
      make('svg:text', {x: LEFT - 7, y: TOP + (value - first + 0.5) * this.h / rows + 4, 'text-anchor': 'end'}, this.svg, String(value));
    const box = {x: LEFT, y: TOP, width: this.w, height: this.h, viewBox: `${(from - low) * unit} -0.5 ${(to - from || 1) * unit} ${rows}`};
    for (const [name, value] of Object.entries(box)) this.heat.setAttribute(name, value);
    this.heat.setAttribute('stroke-width', 1 + 0.35 * rows / this.h);  // no gap between rows thinner than a pixel
    this.svg.append(this.heat);
  }

  // The pointer

  listen() {
    const pixel = event => event.clientX - this.svg.getBoundingClientRect().left;
    const to = event => { const [low, high] = this.range; return low + clamp((pixel(event) - LEFT) / this.w, 0, 1) * (high - low); };
    let from = null, chosen = null;
    const release = () => { chosen?.remove(); from = chosen = null; };
    this.svg.addEventListener('pointerdown', event => {
      if (event.button !== 0) return;
      from = pixel(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener('pointermove', event => {
      if (from === null) return this.point(event, pixel(event), to(event));
      const ends = [from, pixel(event)].map(px => clamp(px, LEFT, LEFT + this.w)).sort((a, b) => a - b);
      chosen ??= make('svg:rect', {class: 'chosen', y: TOP, height: this.h}, this.svg);
      chosen.setAttribute('x', ends[0]);
      chosen.setAttribute('width', ends[1] - ends[0]);
      unpoint();
    });
    this.svg.addEventListener('pointerup', event => {
      if (from === null) return;
      const ends = [to({clientX: from + this.svg.getBoundingClientRect().left}), to(event)].sort((a, b) => a - b);
      const moved = Math.abs(pixel(event) - from) > CLICK && ends[1] > ends[0];
      release();
      if (moved && !(this.heat && view.x !== 'step')) zoom(ends);
    });
    this.svg.addEventListener('pointercancel', release);
    this.svg.addEventListener('pointerleave', unpoint);
    this.svg.addEventListener('dblclick', () => zoom(null));
  }

  point(event, px, x) {
    unpoint();
    if (this.heat || !this.yAxis || px < LEFT - 4 || px > LEFT + this.w + 4) return;
    const py = event.clientY - this.svg.getBoundingClientRect().top;
    const ends = shape => [this.px(shape.main.x[0]) - 8, this.px(shape.main.x.at(-1)) + 8];
    const near = this.shapes.filter(shape => ends(shape)[0] <= px && px <= ends(shape)[1]).map(shape => shape.nearest(x));
    if (!near.length) return;
    const distance = one => Math.abs(this.py(one.y) - py);
    near.sort((a, b) => distance(a) - distance(b));
    const snapped = near.slice(0, LISTED).reduce((best, one) => Math.abs(one.x - x) < Math.abs(best.x - x) ? one : best);
    const knots = runs[snapped.shape.line.run];
    const places = ['step', 'tokens', 'seconds'].filter(kind => kind === 'step' || knots[kind])
      .map(kind => sayPlace(kind, kind === 'step' ? snapped.step : along(knots[kind], snapped.step)));
    tip.replaceChildren(make('b', {}, null, places.join(' · ')));
    const listed = near.slice(0, LISTED).sort((a, b) => b.y - a.y);
    for (const one of listed) this.list(one, one === near[0] && near.length > 1, Math.abs(this.px(one.x) - this.px(snapped.x)) > 6);
    if (near.length > LISTED) make('div', {}, tip, `and ${near.length - LISTED} more`);
    for (const [mark] of view.marks ? this.marks().filter(([, where]) => Math.abs(where - px) <= 4).slice(0, 3) : []) make('div', {}, tip, mark.text);
    showTip(event);
    for (const chart of charts) chart.follow(snapped.x);
  }

  list({shape, y, step}, nearest, apart) {
    const row = make('div', nearest ? {class: 'nearest'} : {}, tip);
    this.paint(make('span', {class: 'swatch'}, row), shape.line);
    make('span', {class: 'name'}, row, shape.line.label + (shape.smoothed && this.shapes.length < 3 ? ', median' : ''));
    make('span', {}, row, say(y) + (apart ? ` (step ${step.toLocaleString('en-US')})` : ''));
  }

  follow(x) {
    if (!this.drawn || this.heat || x < this.range[0] || x > this.range[1]) return;
    for (const name of ['x1', 'x2']) this.cursor.setAttribute(name, this.px(x));
    this.cursor.setAttribute('visibility', 'visible');
  }
}

function zigzag(shape) {  // from the least to the greatest of each stretch
  const xs = [], ys = [];
  shape.x.forEach((x, i) => {
    xs.push(x); ys.push(shape.low[i]);
    if (shape.high[i] !== shape.low[i]) { xs.push(x); ys.push(shape.high[i]); }
  });
  return [xs, ys];
}

function showTip(event) {
  tip.hidden = false;
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth - 8 ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8))}px`;
}

function unpoint() {
  tip.hidden = true;
  for (const chart of charts) chart.cursor?.setAttribute('visibility', 'hidden');
}

// The view: what the controls and the legend choose. The address keeps it, so that it can be reloaded and sent.

function zoom(range) {
  view.zoom = range;
  refresh();
}

function refresh() {
  for (const chart of charts) if (chart.near) chart.draw(); else chart.drawn = false;
  const form = document.querySelector('.controls');
  if (!form) return;
  form.elements.reset.hidden = !view.zoom;
  form.querySelector('output').textContent = WINDOWS[view.smoothing] ? `${WINDOWS[view.smoothing]}%` : 'off';
  keep();
}

function setAxis() {
  const lines = charts.flatMap(chart => chart.lines);
  for (const line of lines) place(line);
  const placed = lines.filter(line => line.x);
  const low = Math.min(...placed.map(line => line.x[0])), high = Math.max(...placed.map(line => line.x.at(-1)));
  full[view.x] = high > low ? [low, high] : [low - 1, low + 1];
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
  if (kept.get('x') in AXES && runs.some(run => run[kept.get('x')])) view.x = kept.get('x');
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
  const show = faint => document.querySelectorAll('.plot g[data-run]').forEach(
    group => group.classList.toggle('faint', faint && group.dataset.run !== String(run)));
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
  for (let found; (found = rest.match(/^(-?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)\s*(ms|min|[kMBTQshd%])?(?!\w)\s*/));) {
    total = (total ?? 0) + Number(found[1].replaceAll(',', '')) * (UNITS[found[2]] ?? 1);
    rest = rest.slice(found[0].length);
    if (!found[2]) break;
  }
  return total;
}

function connectTable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const text = (row, column) => row.cells[column].firstChild?.tagName === 'SMALL' ? '' : row.cells[column].textContent;
  const compare = (a, b) => {
    const [left, right] = [amount(a), amount(b)];
    if (a === '–' || b === '–') return null;
    return (left !== null && right !== null && left - right) || a.localeCompare(b, 'en', {numeric: true});
  };
  heads.forEach((head, column) => {
    const sort = () => {
      const up = head.getAttribute('aria-sort') !== 'ascending', rows = [...body.rows];
      for (const other of heads) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const missing = row => text(row, column) === '–';
      rows.sort((a, b) => missing(a) - missing(b) || (up ? 1 : -1) * (compare(text(a, column), text(b, column)) ?? 0));
      body.append(...rows);
    };
    head.tabIndex = 0;
    head.addEventListener('click', sort);
    head.addEventListener('keydown', event => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); sort(); } });
  });
}

// Begin

const watcher = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    const chart = charts.find(one => one.figure === target);
    if (!chart) continue;
    chart.near = isIntersecting;
    if (isIntersecting && !chart.drawn) chart.draw();
  }
}, {rootMargin: '600px'});

function start() {  // also for each newer page of a live report: the view stays
  watcher.disconnect();
  runs = JSON.parse(document.getElementById('runs').textContent);
  for (const run of runs) for (const kind of ['tokens', 'seconds']) if (run[kind]) run[kind].steps = sums(run[kind].steps);
  if (!charts.length) recall();
  charts = [...document.querySelectorAll('figure.chart')].map(figure => new Chart(figure));
  if (view.x !== 'step' && !runs.some(run => run[view.x])) view.x = 'step';
  setAxis();
  connectControls();
  document.querySelectorAll('table').forEach(connectTable);
  refresh();
  for (const chart of charts) watcher.observe(chart.figure);
}

let width = innerWidth;
addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; refresh(); } });
addEventListener('beforeprint', () => charts.forEach(chart => chart.draw()));

start();
