// The tables of requests: rows are kept from one update to the next, so that the keyboard focus stays.

import { byId, count, duration, el, setText } from "./dom.js";
import { light, litKey, onLit, ownerColour } from "./palette.js";

const MAX_ROWS = 60, MAX_ENDED = 30;
const PLACES = {
  running: "running", waiting: "waiting", preempted: "waiting, preempted", blocked: "deferred", resting: "session at rest",
};
export const SOURCES = { disk: "disk", p2p: "another engine", host: "main memory", external_unspecified: "outside" };
const ABORT_NOTES = {
  here: "The last column aborts a request.",
  admin: "To abort a request, open the dashboard of the admin listener (--admin-host, --admin-port).",
  off: "Aborting requests here needs the admin routes: quire serve --enable-admin.",
};

function cachedInWords({ cached_tokens, external_tokens, external_source }) {
  if (!external_tokens) return count(cached_tokens);
  return `${count(cached_tokens)}, ${count(external_tokens)} of them from ${SOURCES[external_source] ?? external_source}`;
}

export class RequestTables {
  /** `abort` ends the requests of an id. Throws the error of the server. */
  constructor(abort) {
    this.abort = abort;
    this.rows = new Map();
    this.body = byId("requests").tBodies[0];
    this.ended = [];
    onLit(() => {
      for (const [key, row] of this.rows) row.node.classList.toggle("lit", key === litKey());
    });
  }

  update(state) {
    setText(byId("abort-note"), ABORT_NOTES[state.abort] ?? "");
    const shown = state.requests.slice(0, MAX_ROWS), keys = new Set(shown.map((request) => request.key));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.node.remove();
        this.rows.delete(key);
      }
    }
    shown.forEach((request, index) => {
      const row = this.rows.get(request.key) ?? this.#add(request, state.abort === "here");
      if (this.body.rows[index] !== row.node) this.body.insertBefore(row.node, this.body.rows[index] ?? null);
      this.#fill(row, request, state.time);
    });
    const hidden = state.requests.length - shown.length + state.requests_left_out;
    const more = hidden > 0 ? `${count(hidden)} more are not listed.` : "";
    setText(byId("table-note"), shown.length ? more : "No request is running or waiting.");
    this.#showEnded(state.ended);
  }

  #add(request, canAbort) {
    const chip = el("span", { class: "chip", "aria-hidden": "true" });
    chip.style.background = `var(${ownerColour(request.key)})`;
    const cells = Array.from({ length: 7 }, () => el("td"));
    const button = el("button", { type: "button", class: "danger small", "aria-label": `Abort ${request.id}`,
      onclick: () => this.#abort(request.id, button) }, "Abort");
    const node = el("tr", { onpointerenter: () => light(request.key), onpointerleave: () => light(null) },
      el("td", { class: "id", title: request.id }, chip, request.id), ...cells, el("td", {}, canAbort ? button : null));
    const row = { node, cells };
    this.rows.set(request.key, row);
    return row;
  }

  #fill({ cells }, request, now) {
    const computed = Math.min(request.computed_tokens, request.prompt_tokens);
    [PLACES[request.place] ?? request.place, `${count(computed)} of ${count(request.prompt_tokens)}`, cachedInWords(request),
      request.max_tokens ? `${count(request.output_tokens)} of at most ${count(request.max_tokens)}` : count(request.output_tokens),
      count(request.num_blocks), duration(Math.max(0, now - request.arrival_time)),
      request.preemptions ? count(request.preemptions) : "–"].forEach((text, i) => setText(cells[i], text));
  }

  async #abort(id, button) {
    button.disabled = true;
    setText(button, "Aborting…");
    try {
      await this.abort(id);
      setText(byId("table-note"), `${id} is being aborted.`);
    } catch (error) {
      button.disabled = false;
      setText(button, "Abort");
      setText(byId("table-note"), `${id} could not be aborted: ${error.message}`);
    }
  }

  #showEnded(news) {
    if (!news.length) return;
    this.ended = [...news.toReversed(), ...this.ended].slice(0, MAX_ENDED);
    byId("ended").tBodies[0].replaceChildren(...this.ended.map((one) => el("tr", {},
      el("td", { class: "id", title: one.id }, one.id),
      ...[one.reason, duration(one.e2e_s), duration(one.queued_s), duration(one.prefill_s), duration(one.decode_s),
        count(one.prompt_tokens), count(one.cached_tokens), count(one.output_tokens)].map((text) => el("td", {}, text)))));
  }
}
