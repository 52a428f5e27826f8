// The chat page: conversations with the model, streamed, and kept in this browser. `#id` in the address names one.

import { hideCard } from "./answer.js";
import { call, keyProblem, offer, wireKey } from "./api.js";
import { byId, count, el, plural, setText, wireTheme } from "./dom.js";
import { Drawer, isNarrow } from "./drawer.js";
import { History } from "./history.js";
import { copyFrom } from "./icons.js";
import { Settings } from "./settings.js";
import { get, isLasting, list, onChange } from "./store.js";
import { newRecord, Thread } from "./thread.js";

const SPOKEN_MS = 10_000;
const settings = new Settings();
const threads = new Map(); // those whose answers are being written or stored, by id
let current = null, follows = true; // `current` is the conversation that is shown
let lastEnded = 0; // the number of the last finished request that the server has listed
const isTouch = matchMedia("(hover: none) and (pointer: coarse)").matches;

/** What conversations need of the page. */
const page = {
  settings,
  model: "the model",
  maxModelLen: null, // the model's context, in tokens
  complain(text) {
    byId("notice").hidden = !text;
    setText(byId("notice"), text);
  },
  /** Enter sends; on a touch screen it starts a new line, and the button sends. */
  sends: (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch,
  began(thread) {
    threads.set(thread.record.id, thread);
    if (thread !== current) return;
    byId("spoken").replaceChildren();
    history.replaceState(null, "", `#${thread.record.id}`);
    follows = true;
    showRunning();
    if (!isTouch && document.activeElement === document.body) byId("prompt").focus(); // what was used is gone
    setText(byId("status"), "The model is writing.");
  },
  async ended(thread, reply, problem) {
    if (problem?.status === 401) askKey(keyProblem());
    if (thread === current) {
      showRunning();
      setText(byId("status"), problem ? "" : reply.reason === "stopped" ? "Stopped." : "The answer is complete.");
      showContext(reply.usage);
      if (follows) scrollDown();
    }
    await thread.save();
    if (!problem && (await measure(reply))) {
      const message = thread.messages.find((one) => thread.nodes.get(one) === reply.node && one.role === "assistant");
      if (message) message.stats = reply.stats.textContent;
      await thread.save();
    }
    if (!thread.running) threads.delete(thread.record.id); // from now on the stored one is the same
  },
  changed: (thread) => historyList.show(thread === current ? thread.record.id : undefined),
  /** Gives a screen reader a block of the answer once it is complete, not every token. */
  speak(thread, node) {
    if (thread !== current) return;
    const code = node.matches("figure.code") ? node.querySelector("code").textContent : null;
    const spoken = el("p", {}, code === null ? node.textContent : `A block of code of ${plural(code.split("\n").length, "line")}.`);
    byId("spoken").append(spoken);
    setTimeout(() => spoken.remove(), SPOKEN_MS);
  },
  /** After a refusal the text is in the box again, to be changed. */
  giveBack(text) {
    if (byId("prompt").value) return;
    byId("prompt").value = text;
    grow();
  },
};

wireTheme(byId("theme-button"));
offer(byId("docs-link"));
const askKey = wireKey(byId("key-button"), loadModel);
const historyList = new History({
  onRename({ id, title }) {
    for (const thread of [current, ...threads.values()]) if (thread.record.id === id) thread.record.title = title;
    showTitle();
  },
  onRemove(record, isDeleted) {
    const thread = threads.get(record.id) ?? (current.record.id === record.id ? current : null);
    if (thread) thread.record.isDeleted = isDeleted;
    if (isDeleted) thread?.stop();
    if (isDeleted && thread === current) {
      history.replaceState(null, "", location.pathname);
      open("", { keepsFocus: true }); // it is on the button that brings the conversation back
    } else historyList.show();
  },
});
const historyDrawer = new Drawer("history", { startsOpen: true });
const settingsDrawer = new Drawer("settings");

async function loadModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    page.model = data[0]?.id ?? page.model;
    page.maxModelLen = data[0]?.max_model_len ?? null;
    setText(byId("model"), data[0] ? `${page.model} · context of ${count(page.maxModelLen)} tokens` : "");
    byId("model").title = byId("model").textContent;
    page.complain("");
    offerChat(await readTasks());
  } catch (error) {
    if (error.status === 401) askKey(keyProblem());
    else page.complain(`${error.message} ${error.nextStep ?? ""}`);
  }
}

async function readTasks() {
  try {
    return (await (await call("server_info")).json()).supported_tasks;
  } catch {
    return ["generate"]; // not told by this server; a request will show it
  }
}

let writesText = true;

/** A pooling model answers no chat: then there is nothing to type. */
function offerChat(tasks) {
  if (tasks.includes("generate")) return;
  writesText = false;
  page.complain(`${page.model} does not write text. It is served for: ${tasks.join(", ")}. The API page has the routes.`);
  disableInput();
}

function disableInput() {
  for (const node of document.querySelectorAll(".empty button, #prompt, #send")) node.disabled = true;
}

/** Shows a conversation; a new one without an id. The focus goes to the message box, and a sheet is closed. */
async function open(id, { keepsFocus = false } = {}) {
  const live = threads.get(id);
  const record = live?.record ?? (id ? await get(id) : null);
  if (id !== location.hash.slice(1)) return; // another one was chosen meanwhile
  if (id && !record) historyList.note("This conversation is not in this browser.");
  if (record) settings.values = record.settings;
  current = live ?? new Thread(record ?? newRecord(), page);
  byId("shown").replaceChildren(current.messages.length ? current.node : emptyPage());
  if (!writesText) disableInput();
  follows = true;
  scrollDown();
  showTitle();
  showRunning();
  setText(byId("status"), "");
  setText(byId("context"), "");
  historyList.show(current.record.id);
  if (keepsFocus) return;
  if (isNarrow()) historyDrawer.close();
  if (!isTouch) byId("prompt").focus();
}

const EXAMPLES = ["What is prefix caching?", "Explain paging in three sentences.", "Why are requests answered in batches?", "What is a KV cache?"];
const emptyPage = () => el("div", { class: "empty" },
  el("img", { src: new URL("quire.svg", import.meta.url).href, alt: "", width: 56, height: 56 }),
  el("h2", {}, "What would you like to know?"),
  el("p", {}, "The answer comes token by token, straight from the engine on this server."),
  el("div", { class: "examples" }, ...EXAMPLES.map((text) => el("button", { type: "button", onclick: () => send(text) }, text))),
  el("p", { class: "hint" }, "Open the dashboard in a second window to see what the engine does."));

const showTitle = () => { document.title = `${current.record.title || "Chat"} · Quire`; };

function send(text) {
  if (current.running) return;
  if (!current.messages.length) byId("shown").replaceChildren(current.node);
  current.send(text);
  showTitle();
}

function showRunning() {
  const isRunning = Boolean(current.running);
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  current.node.classList.toggle("running", isRunning);
}

function showContext(usage) {
  const total = usage?.total_tokens;
  setText(byId("context"), total && page.maxModelLen ? `${count(total)} of ${count(page.maxModelLen)} tokens of context` : "");
}

/** Reads from the engine how long it took for an answer. Returns whether it did. */
async function measure(reply) {
  try {
    const { ended } = await (await call(`debug/state?after=${lastEnded}`)).json();
    lastEnded = ended.at(-1)?.number ?? lastEnded;
    const own = ended.find(({ id }) => id === reply.id);
    if (own?.decode_s) reply.note(own.decode_s);
    return Boolean(own?.decode_s);
  } catch {
    return false; // the answer is shown without a speed
  }
}

const isAtEnd = () => byId("messages").scrollHeight - byId("messages").scrollTop - byId("messages").clientHeight < 60;
function scrollDown() {
  byId("messages").scrollTop = current.messages.length ? byId("messages").scrollHeight : 0; // an empty page begins at its top
}

function newConversation() {
  if (location.hash.length > 1) location.hash = "";
  else open("");
}

/** The box grows with its text. */
function grow() {
  byId("prompt").style.height = "auto";
  byId("prompt").style.height = `${byId("prompt").scrollHeight}px`;
}

/** A keyboard on the screen covers the page or shrinks it, as the browser likes. The page is as high as what is seen. */
function fitScreen() {
  if (visualViewport.scale !== 1) return; // somebody looks closer
  document.documentElement.style.setProperty("--seen", `${visualViewport.height}px`);
  scrollTo(0, 0);
  if (follows) scrollDown();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || current.running) return;
  byId("prompt").value = "";
  grow();
  if (isNarrow()) settingsDrawer.close();
  send(text);
});
byId("prompt").addEventListener("input", grow);
byId("prompt").addEventListener("keydown", (event) => {
  if (page.sends(event)) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !byId("prompt").value) {
    const last = current.messages.findLast((message) => message.role === "user");
    if (!last) return;
    event.preventDefault();
    current.edit(last);
  }
});
byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
byId("settings-form").addEventListener("input", () => {
  const changed = Object.keys(settings.values).length;
  byId("settings-button").dataset.count = changed || "";
  byId("reset").disabled = !changed;
});
byId("reset").addEventListener("click", () => { settings.values = {}; });
byId("stop").addEventListener("click", () => {
  current.stop();
  byId("prompt").focus();
});
for (const button of document.querySelectorAll(".new")) button.addEventListener("click", newConversation);
byId("down").addEventListener("click", () => {
  scrollDown();
  byId("prompt").focus();
});
byId("messages").addEventListener("click", ({ target }) => {
  const code = target.closest(".copy-code"), whole = target.closest(".copy-message");
  if (code) copyFrom(code, code.closest("figure").querySelector("code").textContent);
  if (whole) copyFrom(whole, [...current.nodes].findLast(([message, node]) => message.role !== "tool" && node.contains(whole))[0].content);
});
document.addEventListener("pointerdown", ({ target }) => { if (!target.closest?.(".token")) hideCard(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  hideCard();
  if (current.running && !document.querySelector("dialog:modal, :popover-open")) current.stop();
});
byId("messages").addEventListener("scroll", () => {
  hideCard();
  follows = isAtEnd();
  byId("down").hidden = follows || !current.messages.length;
});
new ResizeObserver(() => {
  if (follows && current?.running) scrollDown();
  else byId("down").hidden = isAtEnd() || !current?.messages.length;
}).observe(byId("shown"));
visualViewport.addEventListener("resize", fitScreen);
addEventListener("hashchange", () => open(location.hash.slice(1)));
onChange(async (id) => {
  if (id === current.record.id && !current.running && (await get(id))) open(id); // another window has gone on with it
  else historyList.show();
});

current = new Thread(newRecord(), page); // somebody may type before the storage answers
fitScreen();
loadModel();
const latest = location.hash.slice(1) ? null : (await list())[0];
if (!current.messages.length) {
  if (latest) settings.values = latest.settings;
  await open(location.hash.slice(1));
}
if (!(await isLasting())) historyList.note("This browser stores nothing: conversations end with the page.");
