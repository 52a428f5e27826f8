// Elements, text and colours. Text never becomes markup: no code of these pages parses HTML.

export const byId = (id) => document.getElementById(id);

/** Makes an element. `props` are attributes, or `on…` listeners; strings among `children` become text. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets text only if it changes, so that screen readers and selections are not disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes a swatch for legends, as an image without inline style. */
export function swatch(variable, shape = "box") {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", shape === "line" || shape === "dash" ? 22 : 12);
  svg.setAttribute("height", 12);
  svg.setAttribute("aria-hidden", "true");
  const part = document.createElementNS("http://www.w3.org/2000/svg", shape === "box" || shape === "dot" ? "rect" : "line");
  const sizes = { box: { width: 12, height: 12, rx: 2 }, dot: { width: 12, height: 12, rx: 2 } }[shape] ?? { x1: 0, x2: 22, y1: 6, y2: 6 };
  for (const [name, value] of Object.entries(sizes)) part.setAttribute(name, value);
  if (shape === "line" || shape === "dash") {
    part.style.stroke = `var(${variable})`;
    part.setAttribute("stroke-width", 2.5);
    if (shape === "dash") part.setAttribute("stroke-dasharray", "5 3");
  } else part.style.fill = `var(${variable})`;
  svg.append(part);
  if (shape === "dot") {
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    for (const [name, value] of Object.entries({ cx: 6, cy: 6, r: 2 })) dot.setAttribute(name, value);
    dot.style.fill = "var(--panel)";
    svg.append(dot);
  }
  return svg;
}

const colours = new Map();
const probe = document.createElement("span");
probe.hidden = true;

/** Returns the value of a style-sheet variable in the present theme, for canvases. */
export function colour(variable) {
  if (!colours.has(variable)) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${variable})`;
    colours.set(variable, getComputedStyle(probe).color);
  }
  return colours.get(variable);
}

const themeListeners = [];
export const onTheme = (listener) => themeListeners.push(listener);
function themeChanged() {
  colours.clear();
  for (const listener of themeListeners) listener();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

const THEMES = ["system", "light", "dark"];
function remembered() {
  try {
    return THEMES.includes(localStorage.getItem("quire-theme")) ? localStorage.getItem("quire-theme") : "system";
  } catch {
    return "system"; // storage is disabled
  }
}

/** Makes the button cycle through the themes: system, light, dark. */
export function wireTheme(button) {
  let theme = remembered();
  const show = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    setText(button, `Theme: ${theme}`);
    themeChanged();
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("quire-theme", theme);
    } catch { /* the choice lasts as long as this page */ }
    show();
  });
  show();
}

/** Sizes a canvas to its box in device pixels, and returns its context for drawing in CSS pixels. */
export function prepare(canvas, height) {
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (height !== undefined && canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const tall = height ?? canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}

/** Calls `point` with each event of the pointer over a canvas, and `leave` once it is gone. A finger is gone at once: what it
 * has touched stays until something else is touched. */
export function followPointer(canvas, point, leave) {
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") leave(); });
  canvas.addEventListener("blur", leave);
  document.addEventListener("pointerdown", ({ target }) => { if (target !== canvas) leave(); });
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (value) => plain.format(value);
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
export function rate(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  return value >= 100 ? count(value) : value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}
export const percent = (share) => (share === null || !Number.isFinite(share) ? "–" : `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`);
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0";
  if (seconds < 0.001) return `${(1e6 * seconds).toFixed(0)} µs`;
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
