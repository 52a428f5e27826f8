// Requests over time: a bar each, from arrival to end, in lanes. A bar stays until it leaves the window.

import { colour, count, duration, el, followPointer, onTheme, plural, prepare, setText, swatch } from "./dom.js";
import { light, litKey, onLit, ownerColour } from "./palette.js";

export const WINDOW_S = 60;
const MAX_LANES = 64, MIN_LANES = 6, MANY_LANES = 28, AXIS = 20, GAP_S = 0.15;

export class Timeline {
  constructor(canvas, { detail, legend }) {
    Object.assign(this, { canvas, detail });
    this.bars = new Map(); // by key, and by number once ended
    this.now = 0;
    this.chosen = null;
    this.lanes = MIN_LANES;
    for (const [label, variable] of [["Waits", "--waiting"], ["Prompt is read", "--prompt"], ["Answer is written", "--writing"],
      ["Ended early", "--danger"]]) legend.append(el("li", {}, swatch(variable), label));
    followPointer(canvas, (event) => this.choose(this.#barAt(event.offsetX, event.offsetY)), () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    onTheme(() => this.draw());
    onLit(() => this.draw());
  }

  /** `state` is the answer of /debug/state: live requests, and those that have finished since the last update. */
  update(state) {
    this.now = state.time;
    const live = new Set();
    for (const request of state.requests) {
      live.add(request.key);
      this.#see(request, state.time);
    }
    for (const ended of state.ended) this.#end(ended);
    for (const [key, bar] of this.bars) {
      if (bar.end === null && !live.has(key)) bar.end = bar.seen; // it ended between two updates, and is not in the list
      if (bar.end !== null && bar.end < this.now - WINDOW_S) this.bars.delete(key);
    }
    this.#pack();
    this.draw();
  }

  #see(request, now) {
    let bar = this.bars.get(request.key);
    if (!bar) {
      bar = { key: request.key, id: request.id, start: request.arrival_time, lane: null, read: null, write: null, reason: null };
      this.bars.set(request.key, bar);
    }
    if (request.place === "running") bar.read ??= now;
    Object.assign(bar, {
      seen: now, end: null, place: request.place, read: request.scheduled_time ?? bar.read, write: request.first_token_time,
      tokens: request.output_tokens, prompt: request.prompt_tokens, cached: request.cached_tokens, preemptions: request.preemptions,
    });
  }

  #end(ended) {
    let bar = [...this.bars.values()].find((one) => one.id === ended.id && (one.end === null || one.reason === null)
      && Math.abs(one.start - (ended.end_time - ended.e2e_s)) < 0.5);
    if (!bar) {
      bar = { key: `ended-${ended.number}`, id: ended.id, lane: null };
      this.bars.set(bar.key, bar);
    }
    const write = ended.decode_s === null ? null : ended.end_time - ended.decode_s;
    Object.assign(bar, {
      start: ended.end_time - ended.e2e_s, end: ended.end_time, seen: ended.end_time, place: "ended", reason: ended.reason, write,
      read: write !== null && ended.prefill_s !== null ? write - ended.prefill_s : bar.read ?? null,
      tokens: ended.output_tokens, prompt: ended.prompt_tokens, cached: ended.cached_tokens, preemptions: ended.preemptions,
    });
  }

  /** Assigns lanes. A bar keeps its lane, so that nothing jumps. */
  #pack() {
    const until = new Array(MAX_LANES).fill(-Infinity);
    const stop = (bar) => bar.end ?? Infinity;
    const bars = [...this.bars.values()].sort((a, b) => a.start - b.start);
    for (const bar of bars) if (bar.lane !== null) until[bar.lane] = Math.max(until[bar.lane], stop(bar));
    for (const bar of bars) {
      if (bar.lane !== null) continue;
      const lane = until.findIndex((end) => end + GAP_S <= bar.start);
      if (lane >= 0) {
        bar.lane = lane;
        until[lane] = stop(bar);
      }
    }
    this.drawn = bars.filter((bar) => bar.lane !== null);
    this.hidden = bars.length - this.drawn.length;
    this.lanes = Math.max(MIN_LANES, ...this.drawn.map((bar) => bar.lane + 1));
    const running = bars.filter((bar) => bar.end === null).length;
    this.canvas.setAttribute("aria-label",
      `Timeline of the last minute: ${plural(bars.length, "request")}, ${count(running)} of them not ended yet. Arrow keys go from request to request.`);
    if (this.chosen === null) setText(this.detail, this.#hint());
  }

  #hint() {
    const more = this.hidden ? ` ${plural(this.hidden, "request")} found no room in the picture.` : "";
    return `Point at a bar or tap it, or move with the arrow keys.${more}`;
  }

  /** Height of a lane in pixels. */
  get lane() {
    return this.lanes > MANY_LANES ? 8 : 15;
  }

  #x(time) {
    return this.canvas.clientWidth * (1 - (this.now - time) / WINDOW_S);
  }

  #barAt(x, y) {
    const lane = Math.floor(y / this.lane);
    return this.drawn?.find((bar) => bar.lane === lane && x >= this.#x(bar.start) - 2 && x <= this.#x(bar.end ?? this.now) + 2) ?? null;
  }

  #onKey(event) {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step || !this.drawn?.length) return;
    event.preventDefault();
    const at = this.drawn.indexOf(this.chosen);
    this.choose(this.drawn[at < 0 ? this.drawn.length - 1 : Math.min(this.drawn.length - 1, Math.max(0, at + step))]);
  }

  choose(bar) {
    this.chosen = bar;
    setText(this.detail, bar ? this.#describe(bar) : this.#hint());
    light(bar?.key ?? null);
    this.draw();
  }

  #describe(bar) {
    const end = bar.end ?? this.now;
    const parts = [`${bar.id}: ${bar.end === null ? bar.place : `ended (${bar.reason ?? "not seen"})`}`];
    parts.push(`waited ${duration((bar.read ?? end) - bar.start)}`);
    if (bar.read !== null) {
      const cached = bar.cached > 0 ? `, ${count(bar.cached)} found in the cache` : "";
      parts.push(`prompt of ${plural(bar.prompt, "token")} read in ${duration((bar.write ?? end) - bar.read)}${cached}`);
    }
    if (bar.write !== null) parts.push(`${plural(bar.tokens, "token")} written in ${duration(end - bar.write)}`);
    if (bar.preemptions) parts.push(`lost its blocks ${plural(bar.preemptions, "time")}`);
    return `${parts.join(" · ")}.`;
  }

  draw() {
    const { context: c, width, height } = prepare(this.canvas, this.lanes * this.lane + AXIS);
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "center";
    for (let back = 0; back <= WINDOW_S; back += 10) {
      const x = Math.round(this.#x(this.now - back)) + 0.5;
      c.strokeStyle = colour("--line");
      c.beginPath();
      c.moveTo(x, 0);
      c.lineTo(x, height - AXIS + 3);
      c.stroke();
      c.fillStyle = colour("--soft");
      if (back && back < WINDOW_S) c.fillText(`-${back} s`, x, height - 5);
    }
    c.textAlign = "right";
    c.fillText("now", width - 2, height - 5);
    for (const bar of this.drawn ?? []) this.#bar(c, bar);
  }

  #bar(c, bar) {
    const gap = this.lane > 10 ? 2 : 1, top = bar.lane * this.lane + gap, tall = this.lane - 2 * gap, end = bar.end ?? this.now, lit = litKey();
    c.globalAlpha = lit !== null && lit !== bar.key ? 0.3 : 1;
    const part = (from, to, variable) => {
      c.fillStyle = colour(variable);
      c.fillRect(this.#x(from), top, Math.max(1, this.#x(to) - this.#x(from)), tall);
    };
    part(bar.start, bar.read ?? end, "--waiting");
    if (bar.read !== null) part(bar.read, bar.write ?? end, "--prompt");
    if (bar.write !== null) part(bar.write, end, "--writing");
    c.fillStyle = colour(bar.end === null ? ownerColour(bar.key) : "--panel");
    c.fillRect(this.#x(bar.start) - 3, top, 3, tall);
    if (["abort", "error"].includes(bar.reason)) {
      c.fillStyle = colour("--danger");
      c.fillRect(this.#x(end) - 3, top, 4, tall);
    }
    if (bar === this.chosen) {
      c.strokeStyle = colour("--focus");
      c.lineWidth = 2;
      c.strokeRect(this.#x(bar.start) - 3, top - 1, this.#x(end) - this.#x(bar.start) + 5, tall + 2);
      c.lineWidth = 1;
    }
    c.globalAlpha = 1;
  }
}
