// Draws the charts of a report as SVG. Text of runs gets into the page through textContent alone.

const LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 34;  // margins of a plot, in pixels
const HEIGHT = 260, TALL = 380, LEAST_WIDTH = 260;   // of a chart
const PRINTED = 340, PRINTED_WIDE = 700;             // width of a chart on paper, where page.css scales it to its column
const WINDOWS = [0, 0.5, 1, 2, 5, 10, 20];           // of the running median, in percent of the points shown
const PLACES = 300, SAMPLES = 201;                   // of the running median: where it is taken, and of how many points at most
const LISTED = 12;                                   // lines under the pointer
const CLICK = 5;                                     // pixels that a pointer moves before it selects a range
const NEAR = 600;                                    // pixels around the window in which charts are drawn first
const COLORS = 8, DASHES = ['', '9 4', '2 4'];       // as in style.py
const HEAT_WIDTH = 1000;                             // as in experts.py
const AXES = {step: 'step', tokens: 'tokens', seconds: 'time since the first start'};

// What the controls and the legend choose. `zoom`: the range of all charts; `logs`: by title of a chart; `hidden`: numbers of runs.
const view = {x: 'step', zoom: null, smoothing: 3, marks: true, outliers: false, logs: new Map(), hidden: new Set()};
let runs = [], charts = [], full = {};  // full: the whole range, by axis
const tip = document.getElementById('tip');

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

  within(i) { return this.range[0] <= this.x[i] && this.x[i] <= this.range[1]; }

  values(log) {  // that the axis should show
    if (!this.cache.has(log)) {
      const all = [...this.low.filter((_, i) => this.within(i)), ...this.high.filter((_, i) => this.within(i))];
      this.cache.set(log, log ? all.filter(value => value > 0) : all);
    }
    return this.cache.get(log);
  }

  beyond(axis) {  // points of which a value lies beyond the axis
    return this.x.filter((_, i) => this.within(i) && (this.high[i] > axis.high || (this.low[i] < axis.low && (!axis.log || this.low[i] > 0)))).length;
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
    this.drawn = false;
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

  get near() {  // the window, or soon in it
    const {top, bottom} = this.figure.getBoundingClientRect();
    return bottom > -NEAR && top < innerHeight + NEAR;
  }

  draw(width = this.figure.clientWidth) {
    this.drawn = true;
    this.width = Math.max(LEAST_WIDTH, width);
    this.w = this.width - LEFT - RIGHT;
    this.h = (this.wide ? TALL : HEIGHT) - TOP - BOTTOM;
    this.xAxis = scale(...this.range);
    const lines = this.lines.filter(line => line.x && !view.hidden.has(line.run));
    this.shapes = lines.map(line => new Shape(line, this.range, this.w)).filter(shape => shape.x.length);
    this.yAxis = this.heat ? null : valueAxis(this.shapes, this.log, this.spec.zero);
    const size = {width: this.width, height: TOP + this.h + BOTTOM}, viewBox = `0 0 ${size.width} ${size.height}`;
    const svg = make('svg:svg', {class: 'plot', ...size, viewBox, role: 'img', 'aria-label': this.spec.about});
    this.svg?.remove();
    this.svg = svg;
    this.figure.append(svg);
    this.drawStepAxis();
    if (this.heat) this.drawHeat();
    else if (this.yAxis) this.drawLines();
    else make('svg:text', {x: LEFT + this.w / 2, y: TOP + this.h / 2, 'text-anchor': 'middle'}, svg, this.lines.length ? 'nothing to show here' : '');
    const outside = this.yAxis?.outside ?? 0;
    const beyond = outside ? ` · ${outside.toLocaleString('en-US')} extreme value${outside > 1 ? 's' : ''} beyond the axis` : '';
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
    const values = ticks(low / unit, high / unit, Math.max(2, this.width / 110)).filter(value => kind !== 'step' || Number.isInteger(value));
    for (const [value, label] of labelled(values)) {
      const px = this.px(value * unit).toFixed(1);
      make('svg:line', {class: 'axis', x1: px, x2: px, y1: bottom, y2: bottom + 4}, this.svg);
      make('svg:text', {x: px, y: bottom + 17, 'text-anchor': 'middle'}, this.svg, label);
    }
    make('svg:text', {x: LEFT + this.w, y: bottom + 31, 'text-anchor': 'end'}, this.svg, AXES[kind] + (name && `, ${name}`));
  }

  drawValueAxis() {
    const {low, high, log} = this.yAxis;
    const values = (log ? logTicks : ticks)(low, high, this.h / 40);
    for (const [value, label] of labelled(values, log)) {
      const py = this.py(value);
      make('svg:line', {class: 'grid', x1: LEFT, x2: LEFT + this.w, y1: py, y2: py}, this.svg);
      make('svg:text', {x: LEFT - 7, y: py + 4, 'text-anchor': 'end'}, this.svg, label);
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
    const faint = clamp(0.9 / this.shapes.length, 0.05, 0.32);  // many lines would hide their medians
    if (shape.smoothed) make('svg:path', {class: 'raw', opacity: faint, d: this.path(...zigzag(shape))}, group);
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
