// The chat page: a conversation with the model, streamed.

import { Answer, hideCard } from "./answer.js";
import { call, events, keyProblem, offer, wireKey } from "./api.js";
import { byId, el, setText, wireTheme } from "./dom.js";
import { Settings } from "./settings.js";

const settings = new Settings();
const messages = []; // in the form of the API, without the system prompt
let firstKept = 0; // the messages before this one are not sent: the context is too short for all
let running = null; // the AbortController of the answer that is being written
let model = "the model";
let maxModelLen = null; // the model's context, in tokens
let lastEnded = 0; // the number of the last finished request that the server has listed

wireTheme(byId("theme-button"));
offer(byId("docs-link"));
const askKey = wireKey(byId("key-button"), loadModel);

async function loadModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    model = data[0]?.id ?? model;
    maxModelLen = data[0]?.max_model_len ?? null;
    setText(byId("model"), data[0] ? `${model} · context of ${maxModelLen.toLocaleString("en")} tokens` : "");
    byId("model").title = byId("model").textContent;
    complain("");
    offerChat(await readTasks());
  } catch (error) {
    if (error.status === 401) askKey(keyProblem());
    else complain(error.message);
  }
}

async function readTasks() {
  try {
    return (await (await call("server_info")).json()).supported_tasks;
  } catch {
    return ["generate"]; // not told by this server; a request will show it
  }
}

/** A pooling model answers no chat: then there is nothing to type. */
function offerChat(tasks) {
  if (tasks.includes("generate")) return;
  complain(`${model} does not write text. It is served for: ${tasks.join(", ")}. The API page has the routes.`);
  for (const node of document.querySelectorAll(".empty button, #prompt, #send")) node.disabled = true;
}

function complain(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

const EXAMPLES = ["What is prefix caching?", "Explain paging in three sentences.", "Why are requests answered in batches?"];
function showEmpty() {
  byId("messages").replaceChildren(el("div", { class: "empty" },
    el("img", { src: new URL("quire.svg", import.meta.url).href, alt: "", width: 56, height: 56 }),
    el("p", {}, "Ask the model something. The answer comes token by token, straight from the engine on this server."),
    ...EXAMPLES.map((text) => el("button", { type: "button", onclick: () => send(text) }, text)),
    el("p", { class: "hint" }, "Open the dashboard in a second window to see what the engine does.")));
}

function addUser(text, who = "You") {
  if (!messages.length) byId("messages").replaceChildren();
  byId("messages").append(el("article", { class: "message user", "aria-label": who }, el("p", { class: "text" }, text)));
}

function send(text) {
  if (running) return;
  dropUnanswered();
  addUser(text);
  messages.push({ role: "user", content: text });
  answer();
}

/** Leaves out messages that got no answer: they were refused, or stopped before the first token. */
function dropUnanswered() {
  const numKept = messages.findLastIndex((message) => message.role === "assistant") + 1;
  if (numKept === messages.length) return;
  messages.length = numKept;
  const nodes = [...byId("messages").children];
  for (const node of nodes.slice(nodes.findLastIndex((one) => one.classList.contains("answered")) + 1)) {
    node.classList.add("dropped");
    node.title = "Not part of the conversation: it got no answer.";
  }
}

/** Leaves out the oldest turns until a quarter of the context is free for the answer, as `quire chat` does. Returns the
 *  room for the answer in tokens. */
async function fit(system, { tools, max_tokens: maxTokens }, signal) {
  if (!maxModelLen) return Infinity;
  const wanted = Math.min(maxTokens ?? maxModelLen, Math.floor(maxModelLen / 4));
  for (;;) {
    const body = { messages: [...system, ...messages.slice(firstKept)], tools };
    const room = maxModelLen - (await (await call("tokenize", { body, signal })).json()).count;
    const next = messages.findIndex((message, i) => i > firstKept && message.role === "user");
    if (room >= wanted || next < 0) return room; // a long question alone has what room there is, or is refused
    firstKept = next;
  }
}

/** Sends the conversation. The answer gets what room the context has where that is less than it may have otherwise. */
async function ask(fields, note, signal) {
  const before = firstKept;
  const system = settings.systemPrompt ? [{ role: "system", content: settings.systemPrompt }] : [];
  const room = await fit(system, fields, signal);
  if (firstKept > before) setText(note, `The context is full: the ${firstKept} oldest messages are no longer sent.`);
  const body = { messages: [...system, ...messages.slice(firstKept)], stream: true, stream_options: { include_usage: true }, ...fields };
  const send = () => call("v1/chat/completions", { body, signal, accept: "text/event-stream" });
  try {
    return await send();
  } catch (error) {
    if (error.param !== "max_tokens" || !(room > 0) || room === Infinity) throw error;
    body.max_tokens = room;
    return send();
  }
}

/** Reads from the engine how long it took for an answer. */
async function measure(reply) {
  try {
    const { ended } = await (await call(`debug/state?after=${lastEnded}`)).json();
    lastEnded = ended.at(-1)?.number ?? lastEnded;
    const own = ended.find(({ id }) => id === reply.id);
    if (own?.decode_s) reply.note(own.decode_s);
  } catch { /* the answer is shown without a speed */ }
}

function setRunning(controller) {
  running = controller;
  byId("stop").disabled = !controller;
  byId("send").disabled = Boolean(controller);
  byId("retry").disabled = Boolean(controller) || !messages.length;
}

/** Asks for the next message, and shows it as it comes. */
async function answer() {
  let fields;
  try {
    fields = settings.fields();
  } catch (error) {
    complain(error.message);
    return;
  }
  complain("");
  const controller = new AbortController();
  const reply = new Answer(model, (results) => {
    for (const result of results) addUser(result.content, "Result of the tool");
    messages.push(...results);
    answer();
  });
  const note = el("p", { class: "hint left-out" });
  byId("messages").append(note, reply.node);
  setRunning(controller);
  setText(byId("status"), "The model is writing.");
  scrollDown(true);
  const asked = messages.length, keptBefore = firstKept;
  try {
    const response = await ask(fields, note, controller.signal);
    for await (const chunk of events(response)) {
      const follows = isAtEnd();
      reply.take(chunk);
      scrollDown(follows);
    }
    reply.close();
    setText(byId("status"), "The answer is complete.");
    measure(reply);
  } catch (error) {
    if (controller.signal.aborted) {
      reply.close({ stopped: true });
      setText(byId("status"), "Stopped.");
    } else {
      reply.close({ error: error.param ? `${error.param}: ${error.message}` : error.message });
      setText(byId("status"), "");
      if (error.status === 401) askKey(keyProblem());
      else if (error.status === 400) giveBack(keptBefore, note);
    }
  }
  // an answer of a conversation that was left meanwhile is no part of the new one
  if (messages.length === asked && reply.node.isConnected && (reply.content || reply.calls.length)) {
    messages.push(reply.message);
    reply.node.classList.add("answered");
  }
  if (running === controller) setRunning(null);
  scrollDown(isAtEnd());
}

/** After a refusal: the text goes back to the box, to be changed, and nothing was left out for it. */
function giveBack(keptBefore, note) {
  firstKept = keptBefore;
  setText(note, "");
  const last = messages.at(-1);
  if (last?.role === "user" && !byId("prompt").value) byId("prompt").value = last.content;
}

const isAtEnd = () => byId("messages").scrollHeight - byId("messages").scrollTop - byId("messages").clientHeight < 60;
function scrollDown(follows) {
  if (follows) byId("messages").scrollTop = byId("messages").scrollHeight;
}

/** Only narrow windows: in others the settings stand beside the messages. */
function showSettings(isShown) {
  document.body.classList.toggle("with-settings", isShown);
  byId("settings-button").setAttribute("aria-expanded", String(isShown));
}

function stop() {
  running?.abort();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  byId("prompt").value = "";
  showSettings(false);
  send(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("stop").addEventListener("click", stop);
byId("settings-button").addEventListener("click", () => showSettings(!document.body.classList.contains("with-settings")));
byId("clear").addEventListener("click", () => {
  stop();
  messages.length = firstKept = 0;
  showEmpty();
  setRunning(null);
  setText(byId("status"), "");
  byId("prompt").focus();
});
byId("retry").addEventListener("click", () => {
  if (running || !messages.length) return;
  if (messages.at(-1).role === "assistant") messages.pop();
  for (let i = 0; i < 2; i++) byId("messages").lastElementChild.remove(); // the answer, and the note before it
  answer();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideCard();
  if (running && !document.querySelector("dialog[open]")) stop();
});
byId("messages").addEventListener("scroll", hideCard);

showEmpty();
loadModel();
