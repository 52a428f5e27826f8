// A line chart of the last two minutes: a canvas, axes with units, and a legend with values.

import { colour, el, followPointer, onTheme, prepare, setText, swatch } from "./dom.js";

export const SPAN_S = 120;
const GAP_S = 15, LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 20;

/** Returns [step, top] of an axis of round numbers from 0 to at least `max`; whole numbers for counts. */
function scale(max, isCounted) {
  if (!(max > 0)) return isCounted ? [1, 1] : [0.5, 1];
  const power = 10 ** Math.floor(Math.log10(max / 3));
  const round = [1, 2, 5, 10].map((n) => n * power).find((n) => n * 4 >= max) ?? 10 * power;
  const step = isCounted ? Math.max(1, round) : round;
  return [step, step * Math.ceil(max / step - 1e-9)];
}

export class LineChart {
  /** `lines` are { label, variable, dashed }; `format` writes values; `max` fixes the top; `isCounted`: whole numbers only. */
  constructor(parent, { title, what, lines, format, max = null, isCounted = false }) {
    this.lines = lines;
    this.format = format;
    this.max = max;
    this.isCounted = isCounted;
    this.points = []; // [time, value…], null where there is none
    this.at = null; // index that the pointer or the keys have chosen
    this.title = title;
    this.values = lines.map(() => el("b", {}, "–"));
    const id = `chart-${title.replaceAll(/\W+/g, "-").toLowerCase()}`;
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.when = el("span", { class: "hint" });
    parent.append(el("section", { class: "panel", "aria-labelledby": id },
      el("h2", { id }, title), el("p", { class: "what" }, what),
      el("ul", { class: "legend" },
        ...lines.map((line, i) => el("li", {}, swatch(line.variable, line.dashed ? "dash" : "line"), line.label, this.values[i])),
        el("li", {}, this.when)),
      this.canvas));
    followPointer(this.canvas, (event) => this.choose(this.nearest(event.offsetX)), () => this.choose(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.points.length) return;
      event.preventDefault();
      this.choose(Math.min(this.points.length - 1, Math.max(0, (this.at ?? this.points.length) + step)));
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    onTheme(() => this.draw());
  }

  push(time, values) {
    this.points.push([time, ...values]);
    while (this.points.length && this.points[0][0] < time - SPAN_S - 5) {
      this.points.shift();
      if (this.at !== null) this.at = Math.max(0, this.at - 1);
    }
    this.draw();
  }

  choose(index) {
    this.at = index;
    this.draw();
  }

  nearest(x) {
    if (!this.points.length) return null;
    const width = this.canvas.clientWidth - LEFT - RIGHT;
    const time = this.points.at(-1)[0] - SPAN_S * (1 - (x - LEFT) / width);
    let best = 0;
    this.points.forEach((point, i) => {
      if (Math.abs(point[0] - time) < Math.abs(this.points[best][0] - time)) best = i;
    });
    return best;
  }

  draw() {
    const { context: c, width, height } = prepare(this.canvas);
    const end = this.points.at(-1)?.[0] ?? 0;
    const most = this.max ?? Math.max(0, ...this.points.flatMap((p) => p.slice(1)).filter(Number.isFinite));
    const [step, top] = scale(most, this.isCounted);
    const x = (time) => LEFT + (width - LEFT - RIGHT) * (1 - (end - time) / SPAN_S);
    const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);
    c.font = "11px system-ui, sans-serif";
    c.lineWidth = 1;
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (let value = 0; value <= top * 1.001; value += step) {
      c.strokeStyle = colour("--line");
      c.beginPath();
      c.moveTo(LEFT, Math.round(y(value)) + 0.5);
      c.lineTo(width - RIGHT, Math.round(y(value)) + 0.5);
      c.stroke();
      c.fillStyle = colour("--soft");
      c.fillText(this.format(value), LEFT - 7, y(value));
    }
    c.textAlign = "center";
    c.textBaseline = "alphabetic";
    for (const back of [120, 90, 60, 30]) c.fillText(back % 60 ? `-${back} s` : `-${back / 60} min`, Math.max(x(end - back), LEFT + 8), height - 5);
    c.textAlign = "right";
    c.fillText("now", width - RIGHT, height - 5);
    c.save();
    c.beginPath();
    c.rect(LEFT, 0, width - LEFT - RIGHT + 2, height);
    c.clip();
    this.lines.forEach((line, i) => this.#line(c, line, i + 1, x, y));
    if (this.at !== null && this.points[this.at]) {
      c.strokeStyle = colour("--soft");
      c.setLineDash([2, 2]);
      c.beginPath();
      c.moveTo(x(this.points[this.at][0]), TOP);
      c.lineTo(x(this.points[this.at][0]), height - BOTTOM);
      c.stroke();
    }
    c.restore();
    this.#say(end);
  }

  #line(c, line, column, x, y) {
    c.strokeStyle = colour(line.variable);
    c.lineWidth = 2;
    c.lineJoin = "round";
    c.setLineDash(line.dashed ? [6, 4] : []);
    c.beginPath();
    let isDown = false, before = 0;
    for (const point of this.points) {
      const value = point[column];
      if (point[0] - before > GAP_S) isDown = false; // no reading was made in between
      before = point[0];
      if (!Number.isFinite(value)) isDown = false;
      else {
        if (isDown) c.lineTo(x(point[0]), y(value));
        else c.moveTo(x(point[0]), y(value));
        isDown = true;
      }
    }
    c.stroke();
    c.setLineDash([]);
  }

  /** Writes the legend, and the chart's name for screen readers. */
  #say(end) {
    const point = this.points[this.at ?? this.points.length - 1];
    const words = this.lines.map((line, i) => {
      const value = point && Number.isFinite(point[i + 1]) ? this.format(point[i + 1]) : "–";
      setText(this.values[i], value);
      return `${line.label} ${value}`;
    });
    setText(this.when, this.at === null || !point ? "" : `${Math.round(end - point[0])} s ago`);
    this.canvas.setAttribute("aria-label", `${this.title}: ${words.join(", ")}. Left and right arrow keys go through time.`);
  }
}
