// Requests to the server that these pages come from, and to no other. The key is kept in this tab and goes with it.

import { el, setText } from "./dom.js";

export const BASE = new URL("..", import.meta.url);
const KEY = "quire-api-key";

export class ApiError extends Error {
  constructor(status, message, param = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }

  /** What the reader can do about it. */
  get nextStep() {
    const wait = this.retryAfter ? `in ${this.retryAfter} s` : "in a moment";
    if (this.status === 0) return "The terminal of quire serve says whether it still runs. Then try again.";
    if (this.status === 401) return "Give a key with the API key button, then try again.";
    if (this.status === 429 || this.status === 503) return `Try again ${wait}.`;
    if (this.status >= 500) return "Try again; the log of the server has the details.";
    return "Change the message or the settings, then send it again.";
  }
}

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

/** Fetches with the key. Throws ApiError with the server's message for every answer that is not 2xx. */
export async function call(path, { body, signal, accept = "application/json", key = getKey() } = {}) {
  const headers = { accept };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError(0, "The server does not answer. Is it running?");
  }
  if (!response.ok) throw await describe(response);
  return response;
}

/** Returns the reason for asking for a key after a 401. */
export const keyProblem = () => (getKey() ? "The server does not accept this key." : "The server asks for a key.");

/** Shows a link if its page exists: the operator can switch pages off. */
export async function offer(link) {
  const answer = await fetch(link.href, { method: "HEAD", credentials: "omit" }).catch(() => null);
  link.hidden = !answer?.ok;
}

async function describe(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch { /* it was no JSON */ }
  const message = error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  return new ApiError(response.status, message, error?.param ?? null, response.headers.get("retry-after"));
}

/** Yields the data of each server-sent event as an object, until [DONE]. Throws ApiError if the stream ends before it. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) throw new ApiError(0, "The connection ended before the answer did.");
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        rest = rest.slice(end + 2);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Makes a dialog that asks for the key; `button` opens it. Returns a function that opens it with a reason. */
export function wireKey(button, onChange) {
  const input = el("input", { type: "password", id: "key-input", autocomplete: "off", spellcheck: "false" });
  const reason = el("p", { class: "hint" });
  const forget = el("button", { type: "button", class: "quiet", onclick: () => finish("") }, "Forget the key");
  const form = el("form", { method: "dialog" },
    el("h2", {}, "API key"), reason,
    el("label", { for: "key-input" }, "Key"), input,
    el("p", { class: "hint" }, "The key is kept in this tab only, and sent to this server only."),
    el("div", { class: "row" }, el("span", { class: "grow" }), forget,
      el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Use it")));
  const dialog = el("dialog", { "aria-label": "API key" }, form);
  document.body.append(dialog);
  function finish(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
    input.value = "";
    dialog.close();
    show();
    onChange?.();
  }
  const show = () => setText(button, getKey() ? "API key: set" : "API key");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    finish(input.value.trim());
  });
  const ask = (why) => {
    setText(reason, why);
    if (!dialog.open) dialog.showModal();
    input.focus();
  };
  button.addEventListener("click", () => ask("For a server that was started with --api-key."));
  show();
  return ask;
}
