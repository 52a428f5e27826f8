// The panel of LoRA adapters: hidden unless the server has them.

import { byId, count, el, plural, rate, setText } from "./dom.js";
import { total } from "./metrics.js";

const WRITTEN = "quire_lora_generation_tokens_total", MAX_ROWS = 20;

/** Returns the values of a metric by one label, over all others. */
function by(metrics, name, label) {
  const found = new Map();
  for (const { labels, value } of metrics.get(name) ?? []) {
    found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
  }
  return found;
}

/** Shows which adapters have requests, and how fast their answers are written. */
export function showAdapters(readings, windowS) {
  const metrics = readings.last, written = by(metrics, WRITTEN, "adapter");
  byId("adapters").hidden = !metrics.has(WRITTEN);
  if (byId("adapters").hidden) return;
  const states = by(metrics, "quire_lora_adapters", "state");
  const bytes = total(metrics, "quire_lora_resident_bytes") ?? 0;
  setText(byId("adapters-note"), `${plural(states.get("ready") ?? 0, "adapter")} in memory (${(bytes / 2 ** 20).toFixed(1)} MiB), `
    + `${count(states.get("loading") ?? 0)} being loaded, ${count(states.get("cold") ?? 0)} to be loaded when a request names one.`);
  const grown = readings.growthBy(WRITTEN, "adapter", windowS);
  const requests = { running: new Map(), waiting: new Map() };
  for (const { labels, value } of metrics.get("quire_lora_requests") ?? []) requests[labels.state]?.set(labels.adapter, value);
  const names = new Set([...requests.running.keys(), ...written.keys()]);
  const rows = [...names].sort((a, b) => (grown.get(b) ?? 0) - (grown.get(a) ?? 0) || a.localeCompare(b)).slice(0, MAX_ROWS);
  byId("adapter-rows").replaceChildren(...rows.map((name) => el("tr", {}, el("td", {}, name || "none (the model itself)"),
    el("td", {}, name ? count(requests.running.get(name) ?? 0) : "–"), el("td", {}, name ? count(requests.waiting.get(name) ?? 0) : "–"),
    el("td", {}, rate((grown.get(name) ?? 0) / windowS)), el("td", {}, count(written.get(name) ?? 0)))));
}
