// Parses Prometheus' text format, and computes rates and percentiles from two readings of it.

/** Parses text into a Map: name -> list of { labels, value }. */
export function parse(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const found = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    if (!metrics.has(found[1])) metrics.set(found[1], []);
    metrics.get(found[1]).push({ labels, value: number(found[3]) });
  }
  return metrics;
}

const number = (text) => (text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text));

/** Returns the sum over all label sets; null without such a metric. */
export function total(metrics, name) {
  const samples = metrics.get(name);
  return samples ? samples.reduce((sum, sample) => sum + sample.value, 0) : null;
}

/** Returns the value of the sample with this label; null without one. */
export function labelled(metrics, name, label, value) {
  return metrics.get(name)?.find((sample) => sample.labels[label] === value)?.value ?? null;
}

/** Returns cumulative counts by upper bound, over all label sets: sorted [bound, count]. */
export function buckets(metrics, name) {
  const counts = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort((a, b) => a[0] - b[0]);
}

/** Returns the observations between two readings; all of the later one if the server was restarted. */
export function between(before, after) {
  const earlier = new Map(before);
  const found = after.map(([bound, value]) => [bound, value - (earlier.get(bound) ?? 0)]);
  return found.some(([, value]) => value < 0) ? after : found;
}

/** Returns the quantile `q`, interpolated in its bucket; null without observations. */
export function quantile(cumulative, q) {
  const all = cumulative.length ? cumulative[cumulative.length - 1][1] : 0;
  if (!(all > 0)) return null;
  const rank = q * all;
  let low = 0, below = 0;
  for (const [bound, value] of cumulative) {
    if (value >= rank && value > below) {
      if (bound === Infinity) return low;
      return low + (bound - low) * ((rank - below) / (value - below));
    }
    if (bound !== Infinity) [low, below] = [bound, value];
  }
  return low;
}

/** Readings of the last `keepS` seconds. */
export class Readings {
  constructor(keepS = 130) {
    this.keepS = keepS;
    this.all = [];
  }

  add(time, metrics) {
    const last = this.all.at(-1);
    const counted = (reading) => total(reading, "vllm:generation_tokens_total") ?? 0;
    if (last && counted(metrics) < counted(last.metrics)) this.all = []; // the server was restarted
    this.all.push({ time, metrics });
    while (this.all.length > 2 && this.all[0].time < time - this.keepS) this.all.shift();
  }

  get last() {
    return this.all.at(-1)?.metrics ?? new Map();
  }

  /** Returns the reading nearest to `windowS` before the last one. */
  before(windowS) {
    const end = this.all.at(-1)?.time;
    return this.all.findLast((reading) => reading.time <= end - windowS + 0.05) ?? this.all[0];
  }

  /** Returns the growth of a counter in the window; null without two readings of it. */
  growth(name, windowS) {
    if (this.all.length < 2 || total(this.last, name) === null) return null;
    return Math.max(0, total(this.last, name) - (total(this.before(windowS).metrics, name) ?? 0));
  }

  /** Returns the growth by the values of one label; only those that grew. */
  growthBy(name, label, windowS) {
    if (this.all.length < 2) return new Map();
    const before = this.before(windowS).metrics;
    const grown = (this.last.get(name) ?? []).map(({ labels, value }) =>
      [labels[label], value - (labelled(before, name, label, labels[label]) ?? 0)]);
    return new Map(grown.filter(([, value]) => value > 0));
  }

  rate(name, windowS) {
    const grown = this.growth(name, windowS);
    const elapsed = this.all.length < 2 ? 0 : this.all.at(-1).time - this.before(windowS).time;
    return grown === null || elapsed <= 0 ? null : grown / elapsed;
  }

  quantile(name, q, windowS) {
    if (this.all.length < 2) return null;
    return quantile(between(buckets(this.before(windowS).metrics, name), buckets(this.last, name)), q);
  }
}
