// The list of the conversations of this browser: each is a link, and a menu renames, exports or deletes it.

import { byId, el, setText } from "./dom.js";
import { icon, iconButton } from "./icons.js";
import { asJson, asMarkdown, get, list, put, remove } from "./store.js";

const MINUTE_MS = 60_000, DAY_MS = 86_400_000;
const ago = new Intl.RelativeTimeFormat("en", { numeric: "auto" });

/** Returns how long ago a moment was, in one unit. */
function since(moment) {
  const passed = Date.now() - moment;
  if (passed < MINUTE_MS) return "now";
  if (passed < 60 * MINUTE_MS) return ago.format(-Math.floor(passed / MINUTE_MS), "minute");
  if (passed < DAY_MS) return ago.format(-Math.floor(passed / (60 * MINUTE_MS)), "hour");
  return ago.format(-Math.floor(passed / DAY_MS), "day");
}

function download(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

const fileName = ({ title }) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";

export class History {
  /** `onRemove` and `onRename` are called with a conversation that was deleted, brought back or renamed. */
  constructor({ onRemove, onRename }) {
    this.onRemove = onRemove;
    this.onRename = onRename;
    this.current = "";
    this.menu = byId("row-menu");
    this.menu.addEventListener("click", async (event) => {
      const action = event.target.closest("button")?.dataset.action;
      if (!action) return;
      this.menu.hidePopover();
      this.#act(action, await get(this.chosen.id));
    });
    this.menu.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], buttons = [...this.menu.children];
      if (!step) return;
      event.preventDefault();
      buttons.at((buttons.indexOf(document.activeElement) + step) % buttons.length).focus();
    });
  }

  async show(current = this.current) {
    this.current = current;
    const records = await list();
    if (byId("conversations").querySelector("input")) return; // one is being renamed
    byId("conversations").replaceChildren(...records.map((record) => this.#row(record)));
    byId("no-conversations").hidden = records.length > 0;
  }

  #row(record) {
    const link = el("a", { href: `#${record.id}`, "aria-current": record.id === this.current ? "true" : null },
      el("span", { class: "title", title: record.title }, record.title), el("span", { class: "hint" }, since(record.updated)));
    const button = iconButton("more", `Actions for ${record.title}`, { "aria-haspopup": "menu", onclick: () => this.#openMenu(record, button) });
    return el("li", {}, link, button);
  }

  #linkOf({ id }) {
    return byId("conversations").querySelector(`a[href="#${id}"]`);
  }

  #openMenu(record, button) {
    this.chosen = record;
    const box = button.getBoundingClientRect();
    this.menu.showPopover();
    this.menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - this.menu.offsetWidth - 8))}px`;
    this.menu.style.top = `${Math.max(8, Math.min(box.bottom, innerHeight - this.menu.offsetHeight - 8))}px`;
    this.menu.firstElementChild.focus();
  }

  #act(action, record) {
    if (!record) return; // another window has deleted it
    if (action === "rename") this.#rename(record);
    if (action === "markdown") download(`${fileName(record)}.md`, "text/markdown", asMarkdown(record));
    if (action === "json") download(`${fileName(record)}.json`, "application/json", asJson(record));
    if (action === "delete") this.#delete(record);
  }

  #rename(record) {
    const link = this.#linkOf(record);
    if (!link) return;
    const box = el("input", { type: "text", "aria-label": "New name", maxlength: 200 });
    box.value = record.title;
    let isDone = false; // to leave the box may remove it, and to remove it is to leave it
    const finish = async (title) => {
      if (isDone) return;
      isDone = true;
      box.remove();
      if (title && title !== record.title) {
        await put({ ...record, title });
        this.onRename({ ...record, title });
      }
      await this.show();
      this.#linkOf(record)?.focus();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(box.value.trim());
      if (event.key !== "Escape") return;
      event.preventDefault(); // the drawer stays open
      finish("");
    });
    box.addEventListener("blur", () => finish(box.value.trim()));
    link.parentElement.replaceChildren(box);
    box.focus();
    box.select();
  }

  /** Deletes without a question, and offers to bring it back. */
  async #delete(record) {
    await remove(record.id);
    this.onRemove(record, true);
    const undo = el("button", { type: "button", class: "small", onclick: async () => {
      await put(record);
      this.onRemove(record, false);
      byId("history-note").replaceChildren();
      await this.show();
      this.#linkOf(record)?.focus();
    } }, icon("again"), "Undo");
    byId("history-note").replaceChildren(el("span", {}, `“${record.title}” is deleted.`), undo);
    undo.focus();
  }

  note(text) {
    setText(byId("history-note"), text);
  }
}
