// Draws the charts of a report with uPlot. Text of runs gets into the page through textContent alone.
'use strict';

const HEIGHT = 260, TALL = 380, LEAST_WIDTH = 260;   // of a chart, in pixels
const PRINTED = 340, PRINTED_WIDE = 700;             // width of a chart on paper
const WINDOWS = [0, 0.5, 1, 2, 5, 10, 20];           // of the running median, in percent of the points shown
const PLACES = 300, SAMPLES = 201;                   // of the running median: where it is taken, and of how many points at most
const LISTED = 12;                                   // lines under the pointer
const CLICK = 5;                                     // pixels that a pointer moves before it selects a range
const COLORS = 8, DASHES = [[], [9, 4], [2, 4]];     // as in load.py
const HEAT_WIDTH = 1000;                             // as in maps.py
const AXES = {step: 'step', tokens: 'tokens', seconds: 'time since the first start'};
const TIMES = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
const TICKS = Array.from({length: 20}, (_, i) => 10 ** (i - 4)).flatMap(power => [power, 2 * power, 5 * power]);  // distances of two ticks
const FONT = '12px system-ui';

// What the controls and the legend choose. `zoom`: the range of all charts; `logs`: by title of a chart; `hidden`: numbers of runs.
const view = {x: 'step', zoom: null, smoothing: 3, marks: true, outliers: false, logs: new Map(), hidden: new Set()};
let runs = [], charts = [], full = {};  // full: the whole range, by axis
const tip = document.getElementById('tip');

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const sums = differences => { let sum = 0; return Float64Array.from(differences, one => sum += one); };
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const unitOf = span => TIMES.find(([seconds]) => span >= 2 * seconds) ?? TIMES.at(-1);

function firstNotBelow(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

function make(name, attributes, parent, text) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

// Numbers as text

function short(value) {  // 1500000 -> 1.5M, 0.0003 -> 3e-4
  const size = Math.abs(value), rounded = Number(value.toPrecision(7));
  if (size >= 1e4 && size < 1e15) return rounded.toLocaleString('en-US', {notation: 'compact', maximumSignificantDigits: 7}).replace('K', 'k');
  return size >= 1e15 || (size < 1e-2 && size > 0) ? rounded.toExponential().replace('e+', 'e') : String(rounded);
}

function say(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(3);
  return Number(value.toPrecision(4)).toLocaleString('en-US', {maximumFractionDigits: 6});
}

function sayPlace(kind, value) {
  if (kind === 'seconds') {
    const [seconds, name] = unitOf(value);
    return `${Number((value / seconds).toPrecision(4))} ${name}`;
  }
  return kind === 'tokens' ? `${short(Number(value.toPrecision(4)))} tokens` : `step ${Math.round(value).toLocaleString('en-US')}`;
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

// The part of a line within the range: tables of uPlot, of the greatest and least of each stretch and of the running median, and the values
// that the axis should show, logarithms if it is logarithmic.
function shapeOf(line, [low, high], log) {
  const from = Math.max(0, firstNotBelow(line.x, low) - 1), to = Math.min(line.x.length, firstNotBelow(line.x, high) + 2);
  const part = values => values.subarray(from, to), scaled = value => log ? Math.log10(value) : value;
  const drawn = values => log ? Array.from(values, value => value > 0 ? value : null) : values, x = part(line.x);
  const smooth = line.dots ? null : smoothed(line, from, to), [over, medians] = smooth ?? [x, part(line.mid)];
  const shown = all => [...part(all)].filter((value, i) => x[i] >= low && x[i] <= high && (!log || value > 0));
  const values = [...new Set([line.low, line.high])].flatMap(shown);
  const known = [...part(line.mid)].filter(value => !log || value > 0), ends = known.length ? [known.slice(0, 5), known.slice(-5)].map(median) : [];
  const tables = [[x, drawn(part(line.high)), drawn(part(line.low))], [over, drawn(medians)]];
  return {line, x, smooth, values: values.map(scaled), ends: ends.map(scaled), tables};
}

function median(values) {
  values.sort((a, b) => a - b);
  return (values[(values.length - 1) >> 1] + values[values.length >> 1]) / 2;
}

function smoothed(line, from, to) {
  const half = Math.round((to - from) * WINDOWS[view.smoothing] / 100) >> 1, places = Math.min(to - from, PLACES);
  if (half < 1) return null;
  const indices = Array.from({length: places}, (_, n) => from + Math.round(n * (to - from - 1) / Math.max(1, places - 1)));
  return [indices.map(i => line.x[i]), indices.map(middle => {
    const ahead = Math.min(half, middle);  // at the start the window shrinks on both sides: a falling loss does not seem to begin low
    const begin = Math.max(0, middle - half), window = line.mid.subarray(begin, middle + ahead + 1), stride = Math.ceil(window.length / SAMPLES);
    return median([...window].filter((_, i) => i % stride === 0));
  })];
}

// Percentiles 5 to 95, half of that more on either side, and the first and last values. Where both are equal, as much more as they are
// large; where they are 0, as those values that are not. All of a few values.
function usual({values, ends, line}, log) {
  const sorted = Float64Array.from(values).sort(), at = (some, share) => some[Math.floor(share * (some.length - 1) + 0.5)];
  if (sorted.length < 40 || line.dots) return [sorted[0], sorted.at(-1)];
  const low = at(sorted, 0.05), high = at(sorted, 0.95);
  const reach = 0.5 * (high - low) || (log ? 0.1 : Math.abs(high) || 1.5 * (at(sorted.map(Math.abs).filter(Boolean).sort(), 0.95) ?? 0));
  return [Math.min(low - reach, ...ends), Math.max(high + reach, ...ends)];
}

// The range of the points shown, cut where a few far outliers (compilation, a pause, a spike) would flatten the rest; null without points.
function valueRange(shapes, log, zero) {
  const shown = shapes.filter(shape => shape.values.length);
  if (!shown.length) return null;
  const limits = shown.map(({values}) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]));
  const kept = view.outliers ? limits : shown.map(shape => usual(shape, log));
  const low = Math.max(...[limits, kept].map(some => Math.min(...some.map(one => one[0]))));
  const high = Math.min(...[limits, kept].map(some => Math.max(...some.map(one => one[1]))));
  if (log) return [10 ** low / 1.05, 10 ** high * 1.05];
  const bottom = zero ? Math.min(0, low) : low, size = Math.max(Math.abs(bottom), Math.abs(high));
  if (size < 1e-300) return zero ? [0, 1] : [-1, 1];
  if (zero && bottom === 0) return [0, 1.05 * high];
  const middle = bottom / 2 + high / 2, half = high > bottom ? Math.max(0.55 * (high - bottom), 1e-4 * size) : 0.05 * size;
  return [middle - half, middle + half];
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
    this.shaded = new Set(this.lines.map(line => line.run)).size === 1 && this.lines.length > COLORS;  // a shade a line, by its place
    this.place = make('div', {class: 'plot', role: 'img', 'aria-label': this.spec.about}, figure);
    if (this.lines.some(line => line.high.some(value => value > 0))) this.addSwitch();
  }

  get log() { return view.logs.get(this.spec.title) ?? false; }

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

  color(line) {
    const share = Math.round(100 * this.lines.indexOf(line) / Math.max(1, this.lines.length - 1));
    return this.shaded ? `color-mix(in oklab, ${css('--p1')} ${share}%, ${css('--p0')})` : css(`--p${(line.color ?? line.run) % COLORS}`);
  }

  draw(width = this.figure.clientWidth) {
    const lines = this.lines.filter(line => line.x && !view.hidden.has(line.run)), {rows, first} = this.spec, ink = css('--soft');
    this.shapes = lines.map(line => shapeOf(line, this.range, this.log)).filter(shape => shape.x.length);
    this.values = this.heat ? [first - 0.5, first + rows - 0.5] : valueRange(this.shapes, this.log, this.spec.zero);
    const axis = {stroke: ink, font: FONT, labelFont: FONT, labelSize: 18, ticks: {stroke: ink, width: 1, size: 4}};
    const rowNumbers = () => Array.from({length: rows}, (_, i) => first + i).filter(row => (row - first) % Math.ceil(rows / 6) === 0);
    const tables = this.shapes.flatMap(shape => shape.tables), series = this.shapes.flatMap(shape => this.seriesOf(shape));
    this.plot?.destroy();
    this.plot = new uPlot({
      width: Math.max(LEAST_WIDTH, width), height: this.wide ? TALL : HEIGHT,
      legend: {show: false},
      scales: {x: {time: false, range: () => this.range}, y: {distr: this.log ? 3 : 1, dir: this.heat ? -1 : 1, range: () => this.values ?? [0, 1]}},
      axes: [
        {...axis, ...ticksOf(this.heat ? 'step' : view.x, this.range[1]), grid: {show: false}, space: 60, size: 28},
        {...axis, grid: {stroke: css('--rule'), width: 1, show: !this.heat}, size: 58, show: this.values !== null, filter: (_, values) => values,
          splits: this.heat ? rowNumbers : this.log ? logTicks : undefined,
          values: (_, values) => values.map(value => value === null ? null : short(value))},
      ],
      series: [{}, ...(series.length ? series : [{}])],
      bands: this.shapes.map((shape, i) => ({series: [3 * i + 1, 3 * i + 2], fill: this.color(shape.line)})),
      cursor: {y: false, points: {show: false}, hover: {skip: [undefined, null]}, drag: {setScale: false, dist: CLICK},
        bind: {dblclick: () => () => zoom(null), mouseleave: (plot, target, handler) => event => { unpoint(); return handler(event); }}},
      hooks: {draw: [() => this.drawMarks()], setSelect: [() => this.select()], setCursor: [() => this.point()]},
    }, tables.length ? uPlot.join(tables) : [this.range, [null, null]], this.place);
    if (this.heat) this.placeHeat();
    const outside = this.values ? this.shapes.flatMap(shape => shape.values).filter(value => this.isBeyond(value)).length : 0;
    const beyond = outside ? ` · ${outside.toLocaleString('en-US')} extreme value${outside > 1 ? 's' : ''} beyond the axis` : '';
    this.figure.querySelector('.unit').textContent = this.unit + beyond + (this.heat || this.values ? '' : ' · nothing to show here');
  }

  isBeyond(value) {
    const [low, high] = this.log ? this.values.map(Math.log10) : this.values;
    return value < low || value > high;
  }

  seriesOf({line, x}) {  // the greatest and least of each stretch, faint, and the line over them
    const stroke = this.color(line), many = this.shapes.length > 6, dash = line.dots ? [5, 4] : DASHES[Math.floor(line.run / COLORS) % DASHES.length];
    const alpha = clamp(0.5 / this.shapes.length, 0.03, 0.16);  // many stretches would hide the lines
    const edge = () => ({line, stroke, width: 1, alpha, shown: alpha, points: {show: false}});
    const points = {show: x.length === 1 || (line.dots && x.length <= PLACES), size: many ? 4 : 6, fill: stroke};
    return [edge(), edge(), {line, stroke, dash, points, width: many ? 1.4 : 1.7, shown: 1}];
  }

  marks() {  // within the range, of runs that are shown: [mark, x, run]
    const present = [...new Set(this.lines.map(line => line.run))].filter(run => !view.hidden.has(run) && (view.x === 'step' || runs[run][view.x]));
    const xOf = (mark, run) => view.x === 'tokens' ? along(runs[run].tokens, mark.step) : mark[view.x];
    const placed = present.flatMap(run => runs[run].marks.map(mark => [mark, xOf(mark, run), run]));
    return placed.filter(([, x]) => x >= this.range[0] && x <= this.range[1]);
  }

  drawMarks() {
    const {ctx, bbox: {top, height}} = this.plot, size = 4 * uPlot.pxRatio, bottom = top + height;
    ctx.save();
    for (const [{kind}, x, run] of view.marks ? this.marks() : []) {
      const px = Math.round(this.plot.valToPos(x, 'x', true));
      ctx.strokeStyle = ctx.fillStyle = runs.length > 1 ? css(`--p${run % COLORS}`) : css(kind === 'skip' ? '--bad' : '--ink');
      ctx.setLineDash((kind === 'rollback' ? [6, 3] : [2, 3]).map(part => part * uPlot.pxRatio));
      const line = `M${px} ${top}V${bottom}`, arrow = `M${px} ${top}l${-size} ${size}M${px} ${top}l${size} ${size}`;
      if (kind === 'skip') ctx.fill(new Path2D(`M${px - size} ${bottom}h${2 * size}l${-size} ${-2 * size}z`));
      else ctx.stroke(new Path2D(kind === 'rollback' ? line + arrow : line));
    }
    ctx.restore();
  }

  placeHeat() {
    const {rows, steps: [low, high]} = this.spec, unit = HEAT_WIDTH / (high - low || 1), [from, to] = this.range;
    this.heat.setAttribute('viewBox', `${(from - low) * unit} -0.5 ${(to - from || 1) * unit} ${rows}`);
    this.heat.setAttribute('stroke-width', 1 + 0.35 * rows / HEIGHT);  // no gap between rows thinner than a pixel
    this.plot.under.append(this.heat);
  }

  // The pointer

  select() {
    const {left, width} = this.plot.select, ends = [left, left + width].map(px => this.plot.posToVal(px, 'x'));
    if (width <= 0) return;
    this.plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    if (!this.heat || view.x === 'step') zoom(ends);
  }

  point() {
    const {left, top, idxs} = this.plot.cursor, {data} = this.plot;
    tip.hidden = true;
    if (this.heat || !this.values || !(left >= 0)) return;
    const at = (column, shape, i = idxs[column]) => ({shape, x: data[0][i], y: data[column][i]});
    const found = this.shapes.map((shape, i) => at(3 * i + 3, shape)).filter(one => one.y !== undefined);
    const near = found.filter(({shape, x}) => Math.abs(this.plot.valToPos(x, 'x') - left) < 8 || (x > shape.x[0] && x < shape.x.at(-1)));
    if (!near.length) return;
    const distance = one => Math.abs(this.plot.valToPos(one.y, 'y') - top), here = this.plot.posToVal(left, 'x');
    const listed = near.sort((a, b) => distance(a) - distance(b)).slice(0, LISTED), [nearest] = listed;
    const {shape: {line}, x} = listed.reduce((best, one) => Math.abs(one.x - here) < Math.abs(best.x - here) ? one : best), knots = runs[line.run];
    const stepAt = (line, x) => line.steps[Math.min(line.steps.length - 1, firstNotBelow(line.x, x))], step = stepAt(line, x);
    const places = ['step', 'tokens', 'seconds'].filter(kind => kind === 'step' || knots[kind]);
    tip.replaceChildren(make('b', {}, null, places.map(kind => sayPlace(kind, kind === 'step' ? step : along(knots[kind], step))).join(' · ')));
    for (const one of listed.sort((a, b) => b.y - a.y)) {
      const row = make('div', one === nearest && near.length > 1 ? {class: 'nearest'} : {}, tip), other = stepAt(one.shape.line, one.x);
      make('span', {class: 'swatch'}, row).style.setProperty('--c', this.color(one.shape.line));
      make('span', {class: 'name'}, row, one.shape.line.label + (one.shape.smooth && this.shapes.length < 3 ? ', median' : ''));
      make('span', {}, row, say(one.y) + (other === step ? '' : ` (step ${other.toLocaleString('en-US')})`));
    }
    if (near.length > LISTED) make('div', {}, tip, `and ${near.length - LISTED} more`);
    const marked = view.marks ? this.marks().filter(([, where]) => Math.abs(this.plot.valToPos(where, 'x') - left) <= 4) : [];
    for (const [mark] of marked.slice(0, 3)) make('div', {}, tip, mark.text);
    showTip(this.plot.cursor.event);
    for (const chart of charts) if (chart !== this && !chart.heat) chart.plot.setCursor({left: chart.plot.valToPos(x, 'x'), top: 0}, false);
  }
}

function ticksOf(kind, high) {  // of the horizontal axis: steps are whole numbers, times of one unit
  const [unit, name] = kind === 'seconds' ? unitOf(high) : [1, ''];
  return {label: AXES[kind] + (name && `, ${name}`), values: (_, values) => values.map(value => short(value / unit)),
    incrs: TICKS.map(tick => tick * unit).filter(tick => kind !== 'step' || tick >= 1)};
}

function logTicks(plot, axis, low, high) {  // powers of ten, or as many of their multiples as it takes to have three, or evenly spaced ones
  const powers = Array.from({length: Math.ceil(Math.log10(high / low)) + 2}, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
  for (const factors of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const within = powers.flatMap(power => factors.map(factor => factor * power)).filter(value => low <= value && value <= high);
    if (within.length >= 3) return within.filter((_, i) => i % Math.ceil(within.length / 12) === 0);
  }
  const step = TICKS.concat(TICKS.map(tick => tick * 1e-12)).sort((a, b) => a - b).find(tick => tick >= (high - low) / 6), first = Math.ceil(low / step);
  return Array.from({length: Math.floor(high / step) - first + 1}, (_, i) => (first + i) * step);
}

function showTip({clientX, clientY}) {
  tip.hidden = false;
  const left = clientX + 16 + tip.offsetWidth > innerWidth - 8 ? clientX - 16 - tip.offsetWidth : clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(clientY + 16, innerHeight - tip.offsetHeight - 8))}px`;
}

function unpoint() {
  tip.hidden = true;
  for (const chart of charts) chart.plot?.setCursor({left: -10, top: -10}, false);
}
