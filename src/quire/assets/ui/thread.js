// One conversation: its messages, what the page shows of them, and the requests that continue it.

import { Answer } from "./answer.js";
import { call, events } from "./api.js";
import { count, el, setText } from "./dom.js";
import { iconButton } from "./icons.js";
import { put } from "./store.js";

const TITLE_LENGTH = 60, SAVE_MS = 2000;
const FORM = ["role", "content", "tool_calls", "tool_call_id"]; // what the API gets of a message
/** With a call also the reasoning before it: the model goes on from there once it has the result. */
const sentForm = (message) => Object.fromEntries(Object.entries(message).filter(([key]) => FORM.includes(key) || (key === "reasoning" && message.tool_calls)));

const titleOf = (message) => message.content.trim().split("\n")[0].slice(0, TITLE_LENGTH);
export const newRecord = () => ({ id: "", title: "", created: Date.now(), updated: 0, model: "", settings: {}, messages: [], firstKept: 0 });
const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export class Thread {
  /** `page` has the settings and the model, and is told what happens: see chat.js. */
  constructor(record, page) {
    this.record = record;
    this.page = page;
    this.node = el("div", { class: "thread" });
    this.nodes = new Map(); // of each message
    this.running = null; // the AbortController of the answer that is being written
    record.messages.forEach((message, i) => this.#show(message, i));
  }

  get messages() {
    return this.record.messages;
  }

  /** Asks a question. One before it that got no answer is left out: it was refused, or stopped before the first token. */
  send(text) {
    if (this.running) return;
    const last = this.messages.at(-1);
    if (last?.role === "user") {
      last.dropped = true;
      for (let node = this.nodes.get(last); node; node = node.nextElementSibling) node.classList.add("dropped");
    }
    this.#add({ role: "user", content: text });
    this.answer();
  }

  /** Replaces a message of the user's, and all that came after it. */
  resend(message, text) {
    if (this.running) return;
    const index = this.messages.indexOf(message);
    if (index === 0 && this.record.title === titleOf(message)) this.record.title = ""; // nobody has named it otherwise
    this.#cut(index);
    this.send(text);
  }

  /** Asks for the last answer again. */
  retry() {
    if (this.running || !this.messages.length) return;
    this.#cut(this.messages.length - (this.messages.at(-1).role === "assistant" ? 1 : 0));
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  /** Stores the conversation; `more` is an answer that is still being written. */
  async save(...more) {
    const { record } = this;
    if (!record.id || record.isDeleted) return;
    record.updated = Date.now();
    try {
      await put({ ...record, messages: [...record.messages, ...more] });
    } catch (error) {
      this.page.complain(`This browser cannot store the conversation (${error?.message ?? "no room"}). Export it, or delete others.`);
    }
    this.page.changed(this);
  }

  #add(message) {
    const { record } = this;
    record.id ||= newId();
    record.title ||= titleOf(message);
    record.model = this.page.model;
    record.settings = this.page.settings.values;
    this.messages.push(message);
    this.#show(message, this.messages.length - 1);
    this.save();
  }

  #show(message, index) {
    if (message.role === "tool") {
      const answered = this.messages.findLast((one, i) => i < index && one.role === "assistant");
      this.nodes.set(message, this.nodes.get(answered)); // it is shown with the call
    } else if (message.role === "user") {
      this.nodes.set(message, this.#userNode(message));
    } else {
      const after = this.messages.slice(index + 1), end = after.findIndex((one) => one.role !== "tool");
      const reply = this.#newAnswer(this.record.model, () => {});
      reply.restore(message, end < 0 ? after : after.slice(0, end));
      this.#finish(reply, message);
    }
    if (!this.nodes.get(message).isConnected) this.node.append(this.nodes.get(message));
  }

  #userNode(message) {
    const node = el("article", { class: "message user", "aria-label": "You" }, el("p", { class: "text" }, message.content),
      el("div", { class: "actions" }, iconButton("edit", "Edit and send again", { onclick: () => this.edit(message) }),
        iconButton("copy", "Copy the message", { class: "copy-message" })));
    if (message.dropped) markDropped(node);
    return node;
  }

  /** Makes a message of the user's a box to change it in. */
  edit(message) {
    if (this.running) return;
    const shown = this.nodes.get(message);
    const box = el("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Your message" });
    const back = () => {
      form.replaceWith(shown);
      shown.querySelector(".actions button").focus();
    };
    const form = el("form", { class: "message user editing", onsubmit: (event) => {
      event.preventDefault();
      if (box.value.trim() && !this.running) this.resend(message, box.value.trim());
    } }, box, el("div", { class: "row" }, el("span", { class: "hint grow" }, "What comes after it is replaced."),
      el("button", { type: "button", class: "quiet", onclick: back }, "Cancel"), el("button", { type: "submit", class: "primary" }, "Send")));
    box.value = message.content;
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      else if (this.page.sends(event)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    shown.replaceWith(form);
    box.focus();
  }

  /** Leaves the first `length` messages, and nothing after them. */
  #cut(length) {
    const last = this.nodes.get(this.messages[length - 1]);
    while (this.node.lastChild && this.node.lastChild !== last) this.node.lastChild.remove();
    for (const message of this.messages.splice(length)) this.nodes.delete(message);
    this.record.firstKept = 0; // what was left out may have room again
  }

  #newAnswer(model, onBlock) {
    const reply = new Answer(model, { onBlock, onResults: (results) => {
      if (this.running) return;
      reply.showResults(results);
      for (const result of results) this.#add(result);
      this.answer();
    } });
    return reply;
  }

  #finish(reply, message) {
    this.nodes.set(message, reply.node);
    reply.stats.parentElement.append(el("div", { class: "actions" }, iconButton("copy", "Copy the answer", { class: "copy-message" }),
      iconButton("again", "Answer again", { class: "again", onclick: () => this.retry() })));
  }

  get #system() {
    const { systemPrompt } = this.page.settings;
    return systemPrompt ? [{ role: "system", content: systemPrompt }] : [];
  }

  get #sent() {
    const kept = this.messages.slice(this.record.firstKept).filter((message) => !message.dropped);
    return [...this.#system, ...kept.map(sentForm)];
  }

  /** Leaves out the oldest turns until a quarter of the context is free for the answer, as `quire chat` does. Returns the
   *  room for the answer in tokens. */
  async #fit({ tools, max_tokens: maxTokens }, signal) {
    const limit = this.page.maxModelLen;
    if (!limit) return Infinity;
    const wanted = Math.min(maxTokens ?? limit, Math.floor(limit / 4));
    for (;;) {
      const room = limit - (await (await call("tokenize", { body: { messages: this.#sent, tools }, signal })).json()).count;
      const next = this.messages.findIndex((message, i) => i > this.record.firstKept && message.role === "user" && !message.dropped);
      if (room >= wanted || next < 0) return room; // a long question alone has what room there is, or is refused
      this.record.firstKept = next;
    }
  }

  /** Sends the conversation. The answer gets what room the context has where that is less than it may have otherwise. */
  async #ask(fields, note, signal) {
    const before = this.record.firstKept;
    const room = await this.#fit(fields, signal);
    const leftOut = this.messages.slice(0, this.record.firstKept).filter((message) => !message.dropped).length;
    if (this.record.firstKept > before) setText(note, `The context is full: the ${count(leftOut)} oldest messages are no longer sent.`);
    const body = { messages: this.#sent, stream: true, stream_options: { include_usage: true }, ...fields };
    const send = () => call("v1/chat/completions", { body, signal, accept: "text/event-stream" });
    try {
      return await send();
    } catch (error) {
      if (error.param !== "max_tokens" || !(room > 0) || room === Infinity) throw error;
      body.max_tokens = room;
      return send();
    }
  }

  /** Asks for the next message, and shows it as it comes. */
  async answer() {
    let fields;
    try {
      fields = this.page.settings.fields();
    } catch (error) {
      this.page.complain(error.message);
      return;
    }
    this.page.complain("");
    const controller = (this.running = new AbortController());
    const reply = this.#newAnswer(this.page.model, (node) => this.page.speak(this, node));
    if (fields.response_format) reply.showPlain();
    const note = el("p", { class: "hint left-out", role: "status" });
    this.node.append(note, reply.node);
    this.page.began(this);
    const keptBefore = this.record.firstKept;
    let problem = null, savedAt = performance.now();
    try {
      for await (const chunk of events(await this.#ask(fields, note, controller.signal))) {
        reply.take(chunk);
        if (performance.now() - savedAt < SAVE_MS) continue;
        savedAt = performance.now();
        this.save(reply.message); // a page that is closed now loses little
      }
      reply.close();
    } catch (error) {
      const stopped = controller.signal.aborted;
      reply.close({ stopped, failed: !stopped });
      if (!stopped) problem = error;
    }
    this.running = null;
    if (reply.content || reply.calls.length || reply.reasoning) {
      const { message } = reply;
      this.messages.push(message);
      this.#finish(reply, message);
    }
    if (problem) this.#showProblem(problem, reply, note, keptBefore);
    this.page.ended(this, reply, problem);
  }

  #showProblem(error, reply, note, keptBefore) {
    const text = error.param ? `${error.param}: ${error.message}` : error.message;
    reply.stats.parentElement.before(el("div", { class: "error", role: "alert" }, el("p", {}, text), el("p", { class: "hint" }, error.nextStep ?? "Try again."),
      el("button", { type: "button", class: "again", onclick: () => this.retry() }, "Try again")));
    if (error.status !== 400) return;
    this.record.firstKept = keptBefore; // nothing was left out for a message that was refused
    setText(note, "");
    const last = this.messages.at(-1);
    if (last?.role === "user") this.page.giveBack(last.content);
  }
}

function markDropped(node) {
  node.classList.add("dropped");
  node.title = "Not part of the conversation: it got no answer.";
}
