// The pages' icons: strokes in a square of 24, drawn in the colour of the text.

import { el } from "./dom.js";

const SHAPES = {
  menu: "M4 7h16M4 12h16M4 17h10", plus: "M12 5v14M5 12h14", close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 7h8M18 7h2M4 17h2M12 17h8M12 7a3 3 0 1 0 6 0a3 3 0 1 0-6 0M6 17a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
  copy: "M9 9h10v10H9zM15 9V5H5v10h4", check: "M5 12.5l4.5 4.5L19 7.5", edit: "M4 20l1-4L16 5l3 3L8 19z",
  again: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L20 9M20 4v5h-5", more: "M5 12a.6.6 0 1 0 .01 0M12 12a.6.6 0 1 0 .01 0M19 12a.6.6 0 1 0 .01 0",
  send: "M12 19V5M6 11l6-6l6 6", stop: "M8 8h8v8H8z", down: "M12 5v14M6 13l6 6l6-6",
};

export function icon(name) {
  const make = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const svg = make("svg", { viewBox: "0 0 24 24", width: 20, height: 20, class: "icon-shape", "aria-hidden": "true" });
  svg.append(make("path", { d: SHAPES[name] }));
  return svg;
}

/** Makes a button that shows an icon and is called `label`. */
export const iconButton = (name, label, props = {}) =>
  el("button", { type: "button", "aria-label": label, title: label, ...props, class: `icon ${props.class ?? ""}` }, icon(name));

for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));

/** Copies text, and shows on the button whether that worked. */
export async function copyFrom(button, text) {
  const worked = await copy(text);
  const before = [...button.childNodes];
  button.replaceChildren(icon(worked ? "check" : "close"), ...(button.classList.contains("icon") ? [] : [worked ? "Copied" : "Not copied"]));
  setTimeout(() => button.replaceChildren(...before), 1500);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // browsers offer the clipboard to https and localhost only; a phone on the same network has the older way
    const box = el("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    const focused = document.activeElement;
    box.value = text;
    document.body.append(box);
    box.select();
    const worked = document.execCommand("copy");
    box.remove();
    focused?.focus({ preventScroll: true });
    return worked;
  }
}
