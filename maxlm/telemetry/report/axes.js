// Numbers as text, and the axes of charts.
'use strict';

const FINEST = 1e-11;    // distance of two ticks, as a share of the larger end of the axis: labels have 12 digits
const NARROWEST = 1e-4;  // half an axis of values, as a share of the larger one: the page holds 5 digits of each
const TINY = 1e-300;     // values below it are drawn as 0: their differences are no floats
const TIMES = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];

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

// 1500000 -> 1.5M, 0.0003 -> 3e-4; with the digits that tell it from a value so far apart, in the notation of `like`.
function short(value, apart = 0, like = value) {
  const size = Math.abs(like), own = Math.abs(value);
  const needed = apart > 0 && own > 0 ? Math.ceil(Math.log10(own / apart) - 1e-9) + 1 : 0;
  const rounded = (number, digits) => Number(number.toPrecision(clamp(needed, digits, 15)));
  const exponential = digits => rounded(value, digits).toExponential().replace('e+', 'e');
  if (value === 0) return '0';
  if (size >= 1e15) return exponential(4);
  for (const [scale, letter] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']])
    if (size >= (letter === 'k' ? 1e4 : scale)) return rounded(value / scale, 4) + letter;
  return size < 1e-2 ? exponential(3) : String(rounded(value, 4));
}

function labelled(values, log = false) {  // of ticks: no two have the same label, and those of a linear axis have one notation
  const largest = Math.max(...values.map(Math.abs));
  return values.map(value => [value, short(value, values[1] - values[0], log ? value : largest)]);
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

function ticks(low, high, wanted) {  // multiples of 1, 2 or 5 times a power of ten, about as many as wanted, and two if floats allow
  const power = 10 ** Math.floor(Math.log10(Math.max((high - low) / wanted, FINEST * Math.max(Math.abs(low), Math.abs(high)))));
  const choices = [1, 2, 5, 10].map(factor => {
    const step = power * factor, first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({length: Math.max(0, last - first + 1)}, (_, n) => Number(((first + n) * step).toPrecision(12)));
  });
  const miss = values => values.length < 2 ? Infinity : Math.abs(Math.log(values.length / wanted));
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

function around(low, high, zero) {  // a linear axis that holds these values, which may all be equal, with a margin
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size < TINY) return zero ? [0, 1] : [-1, 1];
  if (zero && low === 0) return [0, 1.05 * high];
  const middle = low / 2 + high / 2, half = high > low ? Math.max(0.55 * (high - low), NARROWEST * size) : 0.05 * size;
  return [middle - half, middle + half];
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
  const axis = log ? scale(low / 1.05, high * 1.05, true) : scale(...around(zero ? Math.min(0, low) : low, high, zero));
  return {...axis, outside: shapes.reduce((sum, shape) => sum + shape.beyond(axis), 0)};
}

// Percentiles 5 to 95 of the least and greatest of each stretch, half of that more on either side, and the first and last values. Where both
// are equal, as much more as they are large; where they are 0, as those values that are not.
function usual(values, ends, log) {
  const scaled = Float64Array.from(values, value => log ? Math.log10(value) : value).sort();
  if (scaled.length < 40) return [scaled[0], scaled.at(-1)].map(value => log ? 10 ** value : value);
  let low = at(scaled, 0.05), high = at(scaled, 0.95);
  const reach = 0.5 * (high - low) || (log ? 0.1 : Math.abs(high) || 1.5 * (at(scaled.map(Math.abs).filter(Boolean).sort(), 0.95) ?? 0));
  const edges = ends.map(value => log ? Math.log10(value) : value);
  low = Math.min(low - reach, ...edges);
  high = Math.max(high + reach, ...edges);
  return log ? [10 ** low, 10 ** high] : [low, high];
}
