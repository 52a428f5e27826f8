// The chat page: a conversation with the model, streamed.

import { Answer, hideCard } from "./answer.js";
import { call, events, offer, wireKey } from "./api.js";
import { byId, el, setText, wireTheme } from "./dom.js";
import { Settings } from "./settings.js";

const settings = new Settings();
const messages = []; // as the API has them, without the system prompt
let running = null; // the AbortController of the answer that is being written
let model = "the model";

wireTheme(byId("theme-button"));
offer(byId("docs-link"));
const askKey = wireKey(byId("key-button"), loadModel);

async function loadModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    model = data[0]?.id ?? model;
    setText(byId("model"), data[0] ? `${model} · context of ${data[0].max_model_len.toLocaleString("en")} tokens` : "");
    complain("");
  } catch (error) {
    if (error.status === 401) askKey("This server asks for a key.");
    else complain(error.message);
  }
}

function complain(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

const EXAMPLES = ["What is prefix caching?", "Explain paging in three sentences.", "Why are requests answered in batches?"];
function showEmpty() {
  byId("messages").replaceChildren(el("div", { class: "empty" },
    el("img", { src: new URL("quire.svg", import.meta.url).href, alt: "", width: 56, height: 56 }),
    el("p", {}, "Ask the model something. What it writes comes token by token, straight from the engine on this server."),
    ...EXAMPLES.map((text) => el("button", { type: "button", onclick: () => send(text) }, text)),
    el("p", { class: "hint" }, "Open the dashboard in a second window to see what the engine does meanwhile.")));
}

function addUser(text, who = "You") {
  if (!messages.length) byId("messages").replaceChildren();
  byId("messages").append(el("article", { class: "message user", "aria-label": who }, el("p", { class: "text" }, text)));
}

function send(text) {
  if (running) return;
  addUser(text);
  messages.push({ role: "user", content: text });
  answer();
}

function setRunning(controller) {
  running = controller;
  byId("stop").disabled = !controller;
  byId("send").disabled = Boolean(controller);
  byId("retry").disabled = Boolean(controller) || !messages.length;
}

/** Ask for the next message, and show it as it comes. */
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
  byId("messages").append(reply.node);
  setRunning(controller);
  setText(byId("status"), "The model is writing.");
  scrollDown(true);
  const asked = messages.length;
  try {
    const system = settings.systemPrompt ? [{ role: "system", content: settings.systemPrompt }] : [];
    const body = { messages: [...system, ...messages], stream: true, stream_options: { include_usage: true }, ...fields };
    const response = await call("v1/chat/completions", { body, signal: controller.signal, accept: "text/event-stream" });
    for await (const chunk of events(response)) {
      const follows = isAtEnd();
      reply.take(chunk);
      scrollDown(follows);
    }
    reply.close();
    setText(byId("status"), "The answer is complete.");
  } catch (error) {
    if (controller.signal.aborted) {
      reply.close({ stopped: true });
      setText(byId("status"), "Stopped.");
    } else {
      reply.close({ error: error.param ? `${error.param}: ${error.message}` : error.message });
      setText(byId("status"), "");
      if (error.status === 401) askKey("This server asks for a key.");
    }
  }
  // whoever began a new conversation meanwhile gets nothing of the old one
  if (messages.length === asked && reply.node.isConnected && (reply.content || reply.calls.length)) messages.push(reply.message);
  if (running === controller) setRunning(null);
  scrollDown(isAtEnd());
}

const isAtEnd = () => byId("messages").scrollHeight - byId("messages").scrollTop - byId("messages").clientHeight < 60;
function scrollDown(follows) {
  if (follows) byId("messages").scrollTop = byId("messages").scrollHeight;
}

function stop() {
  running?.abort();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  byId("prompt").value = "";
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
byId("clear").addEventListener("click", () => {
  stop();
  messages.length = 0;
  showEmpty();
  setRunning(null);
  setText(byId("status"), "");
  byId("prompt").focus();
});
byId("retry").addEventListener("click", () => {
  if (running || !messages.length) return;
  if (messages.at(-1).role === "assistant") messages.pop();
  byId("messages").lastElementChild.remove();
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
