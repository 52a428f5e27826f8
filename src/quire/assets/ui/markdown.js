// Markdown as elements, while it is being written. marked finds the structure of the text. The elements are made here, from
// a closed list, and without parsing HTML: a model's tags are shown as they are, and its links lead to the web or to mail.

import { el } from "./dom.js";
import { icon } from "./icons.js";
import { Lexer } from "./marked.js";

const OPTIONS = { gfm: true, breaks: true };
const SAFE = new Set(["http:", "https:", "mailto:"]);
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", mdash: "—", ndash: "–", hellip: "…" };
const MAX_DEPTH = 20; // of quotes and lists in one another; what is deeper is shown as it was written

/** Replaces character references; unknown ones stay. */
function decode(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/gi, (whole, decimal, hex, name) => {
    const point = decimal ? Number(decimal) : hex ? parseInt(hex, 16) : null;
    if (point === null) return NAMED[name] ?? whole;
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}

/** Returns the address of a link that may be followed; null for any other. */
function safe(href) {
  try {
    const url = new URL(decode(href));
    return SAFE.has(url.protocol) ? url.href : null;
  } catch {
    return null; // relative: a model knows no pages of this server
  }
}

function link(href, title, children) {
  const target = safe(href);
  return target === null ? el("span", { title: href }, ...children)
    : el("a", { href: target, title, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

const INLINE = {
  strong: (token, depth) => el("strong", {}, ...inline(token.tokens, depth)),
  em: (token, depth) => el("em", {}, ...inline(token.tokens, depth)),
  del: (token, depth) => el("del", {}, ...inline(token.tokens, depth)),
  codespan: (token) => el("code", {}, token.text),
  br: () => el("br"),
  link: (token, depth) => link(token.href, token.title, inline(token.tokens, depth)),
  image: (token) => link(token.href, token.title, [`🖼 ${decode(token.text) || token.href}`]), // pages load nothing from elsewhere
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  html: (token) => (/^<br\s*\/?>$/i.test(token.raw.trim()) ? el("br") : token.raw),
  escape: (token) => token.text,
  text: (token, depth) => (token.tokens ? el("span", {}, ...inline(token.tokens, depth)) : decode(token.text)),
};

function inline(tokens, depth) {
  if (depth > MAX_DEPTH) return tokens.map((token) => token.raw);
  return tokens.map((token) => (INLINE[token.type] ?? ((other) => other.raw))(token, depth + 1));
}

const BLOCK = {
  paragraph: (token, depth) => el("p", {}, ...inline(token.tokens, depth)),
  text: (token, depth) => el("p", {}, ...inline(token.tokens ?? [token], depth)),
  heading: (token, depth) => el(`h${Math.min(token.depth + 2, 6)}`, {}, ...inline(token.tokens, depth)),
  code: (token) => codeBlock(token.text, token.lang?.split(/\s/)[0] ?? ""),
  blockquote: (token, depth) => el("blockquote", {}, ...blocks(token.tokens, depth)),
  hr: () => el("hr"),
  list: (token, depth) => el(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null },
    ...token.items.map((item) => el("li", { class: item.task && "task" }, ...(item.loose ? blocks(item.tokens, depth) : tight(item.tokens, depth))))),
  table: (token) => el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...token.header.map((cell) => tableCell("th", cell)))),
    el("tbody", {}, ...token.rows.map((row) => el("tr", {}, ...row.map((cell) => tableCell("td", cell))))))),
};

const tableCell = (tag, cell) => el(tag, { class: cell.align && `align-${cell.align}` }, ...inline(cell.tokens, 0));
const isInline = (token) => token.type in INLINE && token.type !== "html";

/** An item of a list without empty lines: its text stands in it without a paragraph. */
const tight = (tokens, depth) => tokens.flatMap((token) => (isInline(token) ? inline([token], depth) : blocks([token], depth)));

function blocks(tokens, depth = 0) {
  if (depth > MAX_DEPTH) return [el("p", {}, tokens.map((token) => token.raw).join(""))];
  return tokens.filter(isShown).map((token) => (BLOCK[token.type] ?? ((other) => el("p", { class: "raw" }, other.raw.trimEnd())))(token, depth + 1));
}

const isShown = (token) => token.type !== "space" && token.type !== "def";

export function codeBlock(text, language = "") {
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), el("button", { type: "button", class: "quiet small copy-code" }, icon("copy"), "Copy")),
    el("pre", { tabindex: 0, role: "region", "aria-label": `Code${language && `, ${language}`}` }, el("code", {}, text)));
}

/** Makes `old` equal to `fresh`, and leaves alone what is equal: selections, scroll positions and the focus stay. */
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
  } else if (old.nodeType === Node.TEXT_NODE || !old.cloneNode(false).isEqualNode(fresh.cloneNode(false))) {
    old.replaceWith(fresh);
  } else {
    const children = [...fresh.childNodes];
    while (old.childNodes.length > children.length) old.lastChild.remove();
    children.forEach((child, i) => (old.childNodes[i] ? morph(old.childNodes[i], child) : old.append(child)));
  }
}

/** A text that grows. Blocks that are complete stay the elements they are; of the last one only what is new is drawn. */
export class Markdown {
  /** `onBlock` is called with every block once it is complete. */
  constructor(onBlock = () => {}) {
    this.node = el("div", { class: "markdown" });
    this.onBlock = onBlock;
    this.text = "";
    this.drawn = []; // the source of each block on the page
    this.start = 0; // where in the text the blocks begin that may still change
    this.numFixed = 0; // the blocks before it
    this.numDone = 0; // the blocks that `onBlock` has had
    this.links = {}; // addresses that blocks before it define
  }

  /** Draws the whole text so far. */
  draw(text) {
    this.text = text;
    const lexer = new Lexer(OPTIONS);
    Object.assign(lexer.tokens.links, this.links);
    const tokens = [...lexer.lex(text.slice(this.start).replaceAll("\r", ""))];
    const shown = tokens.filter(isShown);
    shown.forEach((token, i) => {
      const index = this.numFixed + i;
      if (this.drawn[index] === token.raw) return;
      const [fresh] = blocks([token]), old = this.node.children[index];
      if (old) morph(old, fresh);
      else this.node.append(fresh);
      this.drawn[index] = token.raw;
    });
    this.drawn.length = this.numFixed + shown.length;
    while (this.node.children.length > this.drawn.length) this.node.lastChild.remove();
    this.#finish(this.drawn.length - 1);
    this.#fix(tokens, shown, text);
  }

  /** Takes the text as complete. What a later block has changed, such as the address of an earlier link, is drawn now. */
  close() {
    const whole = new Markdown();
    whole.draw(this.text);
    morph(this.node, whole.node);
    this.#finish(this.drawn.length);
  }

  #finish(count) {
    for (; this.numDone < count; this.numDone++) this.onBlock(this.node.children[this.numDone]);
  }

  /** Reads from now on only from the block before the last one: what follows a block may still change it. */
  #fix(tokens, shown, text) {
    if (shown.length < 3 || text.includes("\r")) return; // with \r the lengths would not be those of the text
    for (const token of tokens.slice(0, tokens.indexOf(shown.at(-2)))) {
      this.start += token.raw.length;
      this.numFixed += Number(isShown(token));
      if (token.type === "def") this.links[token.tag] ??= { href: token.href, title: token.title };
    }
  }
}
