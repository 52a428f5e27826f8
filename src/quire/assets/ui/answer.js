// One answer of the model on the page: its reasoning, its text (as Markdown, or token by token with probabilities), its tool
// calls, and its figures. It is drawn once a frame, however many chunks arrive in between.
//
// The speed shown is measured by the engine. Chunks reach the page in bursts, so arrival times are wrong for short answers.

import { ApiError } from "./api.js";
import { byId, count, duration, el, percent, plural, rate, setText } from "./dom.js";
import { Markdown } from "./markdown.js";

const MIN_WRITING_S = 1; // after this time a speed by arrival times is good enough

const encoder = new TextEncoder();

const RESULT_TEXT = 2000; // characters of a tool's result that are shown
const ENDS = { length: "ended: longest answer reached", tool_calls: "calls a tool" };

export class Answer {
  /** `onResults` is called with the tool messages once every call has a result; `onBlock` with every finished block. */
  constructor(model, { onResults, onBlock } = {}) {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.tokens = [];
    this.entries = []; // tokens that were not found in the text yet
    this.bytes = []; // bytes of the text without a token yet
    this.decoder = new TextDecoder();
    this.id = null;
    this.decodeTime = null; // in seconds, by the engine's clock
    this.onResults = onResults;
    this.onBlock = onBlock;
    this.start = performance.now();
    this.firstAt = this.lastAt = this.thoughtAt = null;
    this.numEvents = 0;
    this.usage = null;
    this.reason = null;
    this.frame = null;
    this.markdown = new Markdown(onBlock);
    this.textNode = this.markdown.node;
    this.thoughts = new Markdown();
    this.reasoningTitle = el("summary", {}, "Thinking…");
    this.reasoningBox = el("details", { class: "reasoning", hidden: true }, this.reasoningTitle);
    this.callsNode = el("div");
    this.stats = el("p", { class: "stats" }, "Waiting for the first token…");
    this.node = el("article", { class: "message assistant writing", "aria-label": "Answer" },
      el("p", { class: "who" }, model), this.reasoningBox, this.textNode, this.callsNode, el("div", { class: "below" }, this.stats));
  }

  /** Shows the text as it is, without Markdown: for JSON, and for tokens with their probabilities. */
  showPlain() {
    if (this.markdown === null) return;
    this.markdown = null;
    const node = el("p", { class: "text" }, this.tokens.length ? "" : this.content);
    node.addEventListener("keydown", (event) => this.#onKey(event));
    this.textNode.replaceWith(node);
    this.textNode = node;
  }

  /** Shows an answer that was stored; `results` are the tool messages that followed it. */
  restore(message, results) {
    this.content = message.content;
    this.reasoning = message.reasoning ?? "";
    for (const call of message.tool_calls ?? []) this.#addCall({ ...call, index: this.calls.length });
    this.#draw();
    if (results.length) this.showResults(results);
    else this.#askForResults();
    this.#end(message.stats ?? "");
  }

  /** Adds a chunk of the stream. */
  take(chunk) {
    if (chunk.error) throw new ApiError(Number(chunk.error.code) || 500, chunk.error.message);
    this.id ??= chunk.id;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning ?? delta.reasoning_content;
    if (delta.content || reasoning || delta.tool_calls) this.#stamp();
    this.reasoning += reasoning ?? "";
    if (delta.content) this.thoughtAt ??= this.lastAt;
    const entries = reasoning && !delta.content ? [] : choice.logprobs?.content ?? [];
    if (entries.length) this.showPlain();
    this.content += delta.content ?? "";
    if (entries.length || this.entries.length || this.tokens.length) this.#place(entries, delta.content ?? "");
    else if (delta.content && this.markdown === null) this.textNode.append(delta.content);
    for (const part of delta.tool_calls ?? []) this.#addCall(part);
    this.reason = choice.finish_reason ?? this.reason;
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.markdown?.draw(this.content);
    this.reasoningBox.hidden = !this.reasoning;
    if (this.thoughts.text !== this.reasoning) this.thoughts.draw(this.reasoning);
    if (this.reasoning && !this.thoughts.node.parentNode) this.reasoningBox.append(this.thoughts.node);
    this.#showStats();
  }

  #stamp() {
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.numEvents += 1;
  }

  /** Finds the tokens of the text by their bytes. Markers, such as the end of a turn, are tokens that are not in the text. */
  #place(entries, text) {
    this.entries.push(...entries);
    this.bytes.push(...encoder.encode(text));
    while (this.entries.length && this.bytes.length) {
      const entry = this.entries[0];
      const own = entry.bytes ?? [...encoder.encode(entry.token)];
      const length = Math.min(own.length, this.bytes.length);
      const isInText = length && own.slice(0, length).every((byte, i) => byte === this.bytes[i]);
      if (isInText && own.length > length) break; // the rest of its text is in the next chunk
      this.entries.shift();
      if (isInText) this.#addToken(entry, this.bytes.splice(0, length));
    }
    this.textNode.tabIndex = 0;
    this.textNode.setAttribute("role", "application");
    this.textNode.setAttribute("aria-label", `${this.content}. Arrow keys go from token to token.`);
    this.textNode.addEventListener("blur", () => hideCard(), { once: true });
  }

  #addToken(entry, bytes) {
    const text = this.decoder.decode(Uint8Array.from(bytes), { stream: true });
    const node = el("span", { class: "token" }, text);
    const probability = Math.exp(entry.logprob);
    node.style.setProperty("--doubt", `${Math.round(70 * (1 - probability))}%`);
    const token = { ...entry, probability, node, index: this.tokens.length };
    node.addEventListener("pointerenter", () => this.#point(token));
    node.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hideCard(); }); // a finger is gone at once
    this.tokens.push(token);
    this.textNode.append(node);
  }

  #onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.tokens.length) return;
    event.preventDefault();
    const at = this.pointed === undefined ? (step > 0 ? 0 : this.tokens.length - 1) : this.pointed + step;
    this.#point(this.tokens[Math.min(this.tokens.length - 1, Math.max(0, at))]);
  }

  #point(token) {
    this.tokens[this.pointed]?.node.classList.remove("chosen");
    this.pointed = token.index;
    token.node.classList.add("chosen");
    showCard(token);
  }

  #addCall(part) {
    const call = (this.calls[part.index] ??= this.#newCall());
    if (part.id) call.id = part.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
    setText(call.title, call.name || "A tool");
    setText(call.shown, pretty(call.arguments));
  }

  #newCall() {
    const call = { id: "", name: "", arguments: "", title: el("code"), shown: el("pre", { tabindex: 0, "aria-label": "Arguments" }), result: el("div") };
    this.callsNode.append(el("div", { class: "call" }, el("p", { class: "who" }, "The model calls ", call.title), call.shown, call.result));
    return call;
  }

  #askForResults() {
    if (!this.calls.length) return;
    for (const call of this.calls) {
      const id = `result-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
      call.input = el("input", { type: "text", id, placeholder: "What the tool returns" });
      call.result.append(el("label", { for: id }, "Its result"), call.input);
    }
    this.giveButton = el("button", { type: "button", class: "primary", onclick: () =>
      this.onResults(this.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.input.value }))) }, "Give the results to the model");
    this.callsNode.append(this.giveButton);
  }

  /** Shows what the tools returned, instead of the boxes for it. */
  showResults(results) {
    this.giveButton?.remove();
    for (const call of this.calls) {
      const content = results.find((result) => result.tool_call_id === call.id)?.content ?? "";
      call.result.replaceChildren(el("details", {}, el("summary", {}, "Its result"), el("p", { class: "text" }, content.slice(0, RESULT_TEXT))));
    }
  }

  #showStats() {
    const parts = [];
    if (this.reasoning) {
      const took = (this.thoughtAt - this.firstAt) / 1000, seconds = this.thoughtAt && took >= 1 ? ` for ${duration(took)}` : "";
      setText(this.reasoningTitle, this.thoughtAt || this.reason || !this.node.classList.contains("writing") ? `Thought${seconds}` : "Thinking…");
    }
    const tokens = this.usage?.completion_tokens ?? this.numEvents;
    if (this.firstAt !== null) {
      parts.push(`TTFT ${duration((this.firstAt - this.start) / 1000)}`);
      const writing = this.decodeTime ?? (this.lastAt - this.firstAt) / 1000;
      if (tokens > 1 && (this.decodeTime || writing >= MIN_WRITING_S)) parts.push(`${rate((tokens - 1) / writing)} tokens/s`);
    }
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${plural(tokens, "token")} after a prompt of ${count(this.usage.prompt_tokens)}${cached ? ` (${count(cached)} from the cache)` : ""}`);
    }
    if (this.reason && this.reason !== "stop") parts.push(ENDS[this.reason] ?? this.reason);
    if (parts.length) setText(this.stats, parts.join(" · "));
  }

  /** Sets the engine's time from the first token to the last, in seconds. */
  note(decodeTime) {
    this.decodeTime = decodeTime;
    this.#showStats();
  }

  /** Ends the answer: complete, stopped, or with an error. */
  close({ stopped = false, failed = false } = {}) {
    if (stopped) this.reason = "stopped";
    if (this.bytes.length) this.textNode.append(this.decoder.decode(Uint8Array.from(this.bytes.splice(0)))); // part of a token
    this.#draw();
    this.thoughts.close();
    if (this.markdown) this.markdown.close();
    else this.onBlock?.(this.textNode);
    if (!stopped && !failed) this.#askForResults();
    this.#end(this.firstAt !== null || this.reason ? this.stats.textContent : failed ? "" : "No token came.");
  }

  #end(stats) {
    this.node.classList.remove("writing");
    this.#showStats();
    setText(this.stats, stats);
  }

  /** The message: what the API wants of it for the next request, and what is shown of it. */
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    return { ...message, stats: this.stats.textContent };
  }
}

/** Arguments of a call with line breaks; as they are while they are incomplete. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";

function showCard(token) {
  const card = byId("token-card");
  const rows = new Map((token.top_logprobs ?? []).map((one) => [one.token, Math.exp(one.logprob)]));
  rows.set(token.token, token.probability);
  const sorted = [...rows].sort((a, b) => b[1] - a[1]);
  card.replaceChildren(el("table", {}, el("tbody", {}, ...sorted.map(([text, probability]) =>
    el("tr", { class: text === token.token ? "taken" : null }, el("td", {}, visible(text)), el("td", {}, percent(probability)))))),
  el("span", { class: "hint" }, `log-probability ${token.logprob.toFixed(3)}`));
  card.hidden = false;
  const box = token.node.getBoundingClientRect(), own = card.getBoundingClientRect();
  card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
  card.style.top = `${box.bottom + own.height + 8 < innerHeight ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
}

export function hideCard() {
  byId("token-card").hidden = true;
  for (const node of document.querySelectorAll(".token.chosen")) node.classList.remove("chosen");
}
