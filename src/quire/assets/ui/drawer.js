// A drawer beside the conversation: a column in a wide window, a sheet above everything in a narrow one.

import { byId } from "./dom.js";

const narrow = matchMedia("(max-width: 60rem)");
export const isNarrow = () => narrow.matches;

export class Drawer {
  /** `id` is a dialog, and `${id}-button` opens and closes it. */
  constructor(id, { startsOpen = false } = {}) {
    this.node = byId(id);
    this.button = byId(`${id}-button`);
    this.button.addEventListener("click", () => (this.node.open ? this.close() : this.open()));
    this.node.querySelector(".close")?.addEventListener("click", () => this.close());
    this.node.addEventListener("close", () => this.#show());
    this.node.addEventListener("click", (event) => { if (event.target === this.node && narrow.matches) this.close(); });
    const start = () => { if (startsOpen && !narrow.matches) this.open({ focus: false }); };
    narrow.addEventListener("change", () => {
      this.close(); // a sheet is no column
      start();
    });
    start();
  }

  open({ focus = true } = {}) {
    const focused = document.activeElement;
    if (narrow.matches) this.node.showModal();
    else this.node.show();
    if (!focus) focused?.focus();
    this.#show();
  }

  close() {
    if (this.node.open) this.node.close();
  }

  #show() {
    this.button.setAttribute("aria-expanded", String(this.node.open));
  }
}
