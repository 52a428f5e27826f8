// What has become of the engine core and of the server while the page was open: when each went, and when it came back.

import { byId, el, plural } from "./dom.js";
import { labelled, total } from "./metrics.js";

const RESTARTS = "quire_engine_restarts_total", MAX_EVENTS = 5;
const CAUSES = { crash: "crashed", hang: "hung", killed: "was killed", start: "failed to start", lost: "was lost" };
const clock = (moment) => moment.toLocaleTimeString("en-GB");
const passed = (from, to) => `${Math.max(1, Math.round((to - from) / 1000))} s`;

export class CoreWatch {
  constructor() {
    this.downSince = null; // the core has not been ready since
    this.lostSince = null; // the server has not answered since
    this.counts = null; // restarts by cause, when the core was last ready
  }

  /** Reads metrics. Returns whether the core is ready. */
  read(metrics, now = new Date()) {
    if (this.lostSince) {
      this.#tell(`${clock(this.lostSince)}: the server stopped answering. It answers again since ${clock(now)}, ${passed(this.lostSince, now)} later.`);
      this.lostSince = null;
    }
    const ready = total(metrics, "quire_engine_ready") !== 0; // a server without statistics does not say
    if (!ready) {
      this.downSince ??= now;
      return false;
    }
    const counts = new Map((metrics.get(RESTARTS) ?? []).map(({ labels, value }) => [labels.cause, value]));
    const sum = [...counts.values()].reduce((a, b) => a + b, 0);
    if (this.counts === null && sum) this.#tell(`Before this page was opened the engine core was started again ${plural(sum, "time")}: it ${inWords(counts)}.`);
    const grown = new Map([...counts].filter(([cause, value]) => value > (this.counts?.get(cause) ?? value)));
    if (this.downSince) {
      this.#tell(`${clock(this.downSince)}: the engine core ${inWords(grown) || "was gone"}. It is back since ${clock(now)}, ${passed(this.downSince, now)} later; its requests went on.`);
    } else if (grown.size) {
      this.#tell(`Before ${clock(now)} the engine core ${inWords(grown)}, and came back; its requests went on.`);
    }
    this.downSince = null;
    this.counts = counts;
    return true;
  }

  /** The server does not answer. */
  lose(now = new Date()) {
    this.lostSince ??= now;
    this.downSince = this.counts = null; // another server may answer next, and counts from 0
  }

  /** What is wrong at this moment; nothing if all is well. */
  get trouble() {
    return this.downSince ? `The engine core is gone since ${clock(this.downSince)} and is being started again; it loads its model. Requests wait, and go on then.` : "";
  }

  #tell(text) {
    byId("events").prepend(el("li", {}, text));
    while (byId("events").children.length > MAX_EVENTS) byId("events").lastChild.remove();
    byId("events").hidden = false;
  }
}

/** Returns the causes of restarts as a predicate. */
export function inWords(counts) {
  return [...counts].filter(([, value]) => value).map(([cause]) => CAUSES[cause] ?? cause).join(" and ");
}

export const isAsleep = (metrics) => labelled(metrics, "vllm:engine_sleep_state", "sleep_state", "awake") === 0;
