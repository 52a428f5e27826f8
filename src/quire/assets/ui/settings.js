// The settings of the chat page, and the request fields made of them.

import { byId, el, setText } from "./dom.js";

/** [field, label, min, max, step, hint]. An empty box leaves the field out of the request. */
const KNOBS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0 always takes the most likely token"],
  ["top_p", "Top-p", 0.01, 1, 0.01, "only the most likely tokens, up to this total probability"],
  ["top_k", "Top-k", 0, 200, 1, "only this many tokens; 0 for all"],
  ["min_p", "Min-p", 0, 1, 0.01, "no token below this share of the most likely one"],
  ["max_tokens", "Longest answer", 1, 2048, 1, "in tokens"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "lowers tokens that have occurred"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "lowers tokens by how often they have occurred"],
  ["repetition_penalty", "Repetition penalty", 0.5, 2, 0.05, "above 1 against repetition"],
];

export class Settings {
  constructor() {
    this.knobs = new Map();
    for (const [name, label, min, max, step, hint] of KNOBS) {
      const id = `knob-${name}`;
      const range = el("input", { type: "range", min, max, step, tabindex: "-1", "aria-hidden": "true" });
      const box = el("input", { type: "number", id, min, step, placeholder: "auto", title: hint, "aria-description": hint });
      range.value = name === "max_tokens" ? 256 : name.includes("penalty") ? Number(name.startsWith("rep")) : name === "top_p" ? 1 : min;
      range.addEventListener("input", () => { box.value = range.value; });
      box.addEventListener("input", () => { if (box.value !== "") range.value = box.value; });
      byId("sampling").append(el("div", { class: "knob" }, el("label", { for: id }, label), range, box));
      this.knobs.set(name, box);
    }
    this.seed = el("input", { type: "number", id: "knob-seed", step: 1, placeholder: "new each time" });
    this.stop = el("input", { type: "text", id: "knob-stop", placeholder: "none", title: "Several with | between them" });
    byId("sampling").append(el("label", { for: "knob-seed" }, "Seed"), this.seed, el("label", { for: "knob-stop" }, "Stop at"), this.stop);
    this.schema = new JsonBox("schema", "schema-note", (value) => (isObject(value) ? null : "A schema is a JSON object."));
    this.tools = new JsonBox("tools", "tools-note", (value) =>
      (Array.isArray(value) && value.every((tool) => isObject(tool) && isObject(tool.function)) ? null
        : "A list of objects with type and function."));
  }

  /** What the boxes hold, by id, without empty ones. */
  get values() {
    return Object.fromEntries(this.#boxes().map((box) => [box.id, box.type === "checkbox" ? box.checked : box.value]).filter(([, value]) => value));
  }

  set values(values) {
    for (const box of this.#boxes()) {
      if (box.type === "checkbox") box.checked = Boolean(values[box.id]);
      else box.value = values[box.id] ?? "";
      box.dispatchEvent(new Event("input", { bubbles: true }));
    }
  }

  #boxes() {
    return [...byId("settings-form").elements].filter((box) => box.id);
  }

  get systemPrompt() {
    return byId("system").value.trim();
  }

  get wantsLogprobs() {
    return byId("logprobs").checked;
  }

  /** Returns the fields of a request. Throws Error for a box with an invalid value. */
  fields() {
    const fields = {};
    for (const [name, box] of this.knobs) {
      if (box.validity.badInput) throw new Error(`${name} is not a number.`);
      if (box.value !== "") fields[name] = Number(box.value);
    }
    if (this.seed.value !== "") fields.seed = Number(this.seed.value);
    if (this.stop.value !== "") fields.stop = this.stop.value.split("|").filter(Boolean);
    const schema = this.schema.read();
    if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    const tools = this.tools.read();
    if (tools?.length) {
      fields.tools = tools;
      if (byId("tool-choice").value) fields.tool_choice = byId("tool-choice").value;
    }
    if (this.wantsLogprobs) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    return fields;
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** A text box for JSON that shows errors while the user types. */
class JsonBox {
  constructor(id, noteId, complain) {
    this.box = byId(id);
    this.note = byId(noteId);
    this.complain = complain;
    this.usual = this.note.textContent;
    this.box.addEventListener("input", () => {
      try {
        this.read();
      } catch { /* shown beside the box */ }
    });
  }

  /** Returns its value; null if it is empty. Throws Error. */
  read() {
    const text = this.box.value.trim();
    let problem = null, value = null;
    if (text) {
      try {
        value = JSON.parse(text);
        problem = this.complain(value);
      } catch (error) {
        problem = `Not valid JSON yet: ${error.message}`;
      }
    }
    this.box.setAttribute("aria-invalid", String(problem !== null));
    setText(this.note, problem ?? this.usual);
    if (problem) throw new Error(problem);
    return value;
  }
}
